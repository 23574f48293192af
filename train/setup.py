"""Build a run's training step and trainer from its config and the results of `prepare`."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from shards.base.config import save_config
from shards.base.device import device_module, is_accelerator
from shards.base.store import Place
from shards.open import open_store
from train.config import TrainConfig
from train.data.draws import global_slots
from train.data.loader import Loader
from train.memory import largest_shape, microbatch_size
from train.metrics import Metrics
from train.model.blocks import find_blocks
from train.model.ema import make_averages
from train.model.fit import dry_call
from train.model.float8 import large_linears, use_float8
from train.model.flops import peak_tflops, training_flops
from train.model.network import compile_network, compiles_by_block
from train.model.optimizer import Optimizer, build_optimizer
from train.model.recompute import recomputed_shares
from train.model.sharding import group_mesh, shard_weights
from train.objective.loss import DiffusionLoss
from train.prepare import Prepared
from train.run.checkpoints.checkpoint import SNAPSHOTS, STATE_NAME, drop_later, restore, trained
from train.run.checkpoints.remote import RemoteRun
from train.run.checkpoints.retention import CheckpointConfig
from train.run.checkpoints.writer import CheckpointWriter, WriterGroup, warn_if_slow_to_stop
from train.run.health.heartbeat import HeartbeatReporter
from train.run.health.output import outdated
from train.run.lease.folder import publish
from train.run.lease.lease import Lease
from train.run.processes import print_once, set_collective_timeout
from train.run.reporting.log import Log
from train.run.state import TrainState
from train.step import TrainStep, place_network
from train.trainer import Trainer


def build_step(config: TrainConfig, prepared: Prepared, accelerator: Accelerator) -> tuple[TrainStep, TrainState]:
    """Build the training step, and restore the optimizer and the averages from the checkpoint to resume, if any.

    This does not need a run folder.

    Returns:
        The training step, and the state of the run after its last completed step.
    """
    assert config.precision != "auto", "`auto` must be resolved first"
    network, aligned = prepared.network, prepared.aligned
    is_sharded = config.sharding != "none" and accelerator.num_processes > 1
    if config.float8:
        layers = float8_layers(config, prepared, is_sharded)
        print_once(accelerator, f"float8: {len(layers)} linear layers are large enough for it to save time")
        use_float8(network, layers)
    mesh = group_mesh(config.active_group, accelerator.num_processes, accelerator.device.type) if is_sharded else None
    of_blocks, of_activations = recomputed_shares(config.gradient_checkpointing, config.compile)
    place_network(
        network,
        accelerator.device,
        channels_last=config.channels_last,
        low_precision_norms=config.low_precision_norms,
        gradient_checkpointing=of_blocks,
        sharding=config.sharding if is_sharded else "none",
        precision=config.precision,
        mesh=mesh,
        attention=config.attention,
    )
    if aligned is not None:
        aligned.head.to(accelerator.device)
        if is_sharded:
            shard_weights(aligned.head, config.sharding, config.precision, mesh)

    # after sharding, which replaces the parameters
    head = aligned and aligned.head
    torch_optimizer = build_optimizer(trained(network, head), config.optimizer)
    averages = make_averages(config.ema)
    state = TrainState()
    if prepared.checkpoint is not None:
        # before compiling and wrapping, which rename the parameters
        state = restore(prepared.checkpoint, network, torch_optimizer, averages, head)

    if config.compile:
        num_shapes = len({stream.latent_hw for stream in prepared.spec.streams})
        compile_network(network, num_shapes, by_block=compiles_by_block(network, is_sharded), recomputed=of_activations)
    # with evaluation_mode, accelerate applies autocast to a sharded model but does not wrap it in DDP, which would keep
    # all weights in every process
    model = accelerator.prepare_model(aligned or network, device_placement=False, evaluation_mode=is_sharded)
    optimizer = Optimizer(torch_optimizer, accelerator, config.optimizer, config.schedule, config.max_steps)
    if accelerator.scaler is not None and state.scaler:
        accelerator.scaler.load_state_dict(state.scaler)
    step = TrainStep(
        accelerator=accelerator,
        network=network,
        loss=DiffusionLoss(config.objective, prepared.spec, accelerator.device, prepared.backbone, aligned=aligned),
        optimizer=optimizer,
        microbatch_size=microbatch_size(config, prepared.world.size),
        seed=config.seed,
        model=model,
        averages=averages,
        compiled=config.compile,
        mesh=mesh,
    )
    return step, state


def float8_layers(config: TrainConfig, prepared: Prepared, is_sharded: bool) -> list[str]:
    """Return the names of the linear layers that multiply in float8: the large ones among those that are compiled.

    Without compilation, casting takes longer. The layer that REPA aligns is left out, because a hook reads its output.
    """
    shape = largest_shape({stream.latent_hw for stream in prepared.spec.streams})
    network, call = dry_call(prepared.network, prepared.backbone, prepared.spec, shape)
    compiled = tuple(f"{name}." for name in find_blocks(network)) if compiles_by_block(network, is_sharded) else ""
    large = large_linears(network, call, microbatch_size(config, prepared.world.size))
    return [name for name in large if name.startswith(compiled) and name != config.repa.layer]


def build_trainer(
    config: TrainConfig,
    prepared: Prepared,
    accelerator: Accelerator,
    lease: Lease,
    remote: RemoteRun | None = None,
    heartbeat: HeartbeatReporter | None = None,
) -> Trainer:
    """Build the trainer for a run that this launch holds, and write the resolved config into the run folder.

    Args:
        remote: uploads to the run's URL, if it has one.
        heartbeat: reports this process's progress to the other processes; None: this is the only process.
    """
    network_json = prepared.network.to_json_string()  # before sharding, which renames the class
    train_step, state = build_step(config, prepared, accelerator)
    print_start(config, prepared, accelerator, lease)
    begin_folder(config, accelerator, lease, remote, state.step)
    heartbeat = heartbeat or HeartbeatReporter()
    set_collective_timeout(heartbeat, config.start_timeout, train_step.groups)  # new groups have torch's timeout
    writers = make_writers(config, prepared, accelerator, lease, remote, network_json, heartbeat.store)
    peak = device_peak(config, accelerator.device)
    settings = config.model_dump(mode="json")  # for trackers
    metrics = Metrics(
        train_step,
        state,
        flops_per_image(prepared, train_step.network) if peak else {},
        config.global_batch_size,
        config.optimizer.max_skipped_steps,
        config.alarm,
        prepared.spec.steps_per_epoch,
        peak,
    )
    trainer = Trainer(
        accelerator=accelerator,
        train_step=train_step,
        state=state,
        loader=make_loader(config, prepared, accelerator, state.step),
        metrics=metrics,
        log=Log(config.log, config.run_dir, lease.folder, state.step, config.max_steps, accelerator, settings),
        validation=prepared.validation,
        checkpoints=writers[0],
        average_snapshots=writers[1],
        lease=lease,
        heartbeat=heartbeat,
        max_steps=config.max_steps,
        collective_timeout=config.collective_timeout,
    )
    every = config.ema.snapshot_every
    if every and state.step and state.step % every == 0 and lacks_snapshot(config.run_dir, state.step, accelerator):
        trainer.snapshot_averages()
    if accelerator.is_main_process and prepared.orphan is not None:
        trainer.checkpoints.upload_again(prepared.orphan)
    return trainer


def lacks_snapshot(run_dir: Place, step: int, accelerator: Accelerator) -> bool:
    """Return whether a run that resumes has no snapshot of its averages of this step. All processes must call it.

    The checkpoint of the step can exist without it, because both are written in the background.
    """
    lacks = [True]
    if accelerator.is_main_process:
        states = [name for name in open_store(run_dir).files(f"{SNAPSHOTS}/checkpoints") if name.endswith(STATE_NAME)]
        lacks = [not any(name.startswith(f"step-{step:08d}") for name in states)]
    return bool(broadcast_object_list(lacks)[0])


def print_start(config: TrainConfig, prepared: Prepared, accelerator: Accelerator, lease: Lease) -> None:
    """Print the source of the weights, unless they are random, and warnings about unusual settings."""
    own = prepared.checkpoint
    if own is not None:
        print_once(accelerator, f"resuming {config.run_dir} after step {own.state.step} ({own.tag}, {own.folder.name})")
    elif prepared.start is not None:
        print_once(accelerator, f"starting {config.run_dir} from {prepared.start}")
        if prepared.start_seed == config.seed:
            print_once(
                accelerator,
                f"warning: {config.init_from} was trained with the same seed, {config.seed}, so every step of this run "
                f"draws the same timesteps and noise as the same step of that run and, if the data is the same, also "
                f"the same samples. Set a different `seed`.",
            )
    warmup, last = config.schedule.warmup_steps, config.max_steps
    if warmup >= last:
        print_once(
            accelerator,
            f"warning: the learning rate rises during the whole run, because schedule.warmup_steps, {warmup}, is not "
            f"less than max_steps, {last}. A tenth of the steps is common: `--schedule.warmup_steps {last // 10}`.",
        )
    slow = warn_if_slow_to_stop(lease.pace, config.checkpoint)
    if slow is not None:
        print_once(accelerator, slow)
    share = config.global_batch_size // prepared.world.size
    if config.microbatch_size > share:
        print_once(
            accelerator,
            f"microbatch_size {config.microbatch_size} is larger than each process's share of the batch "
            f"(global_batch_size {config.global_batch_size} over {prepared.world.size} "
            f"process{'es' * (prepared.world.size != 1)}), so the effective microbatch size is {share}.",
        )
    for stream in prepared.spec.streams:
        if stream.recalled:
            print_once(
                accelerator,
                f"{stream.recalled} of {stream.files.num_samples} samples in "
                f"{stream.config.root}/{stream.config.bucket} {'was' if stream.recalled == 1 else 'were'} recalled "
                f"after the run's index was published. The run keeps training on recalled samples. To drop them, "
                f"resume with `--data.index newest`.",
            )


def begin_folder(
    config: TrainConfig, accelerator: Accelerator, lease: Lease, remote: RemoteRun | None, step: int
) -> None:
    """Write the resolved config into the run folder, and delete outdated output and snapshots from after `step`."""
    if accelerator.is_main_process:
        save_config(config, lease.folder / "config.yaml")
        publish(lease.folder / "config.yaml", lease.run_dir / "config.yaml", lease.folder)
    accelerator.wait_for_everyone()
    if remote is not None and accelerator.is_main_process:
        remote.upload_logs()
        remote.drop_logs(lambda names: outdated(names, lease.number, config.log.keep_output))
        remote.drop_later(step)
    if accelerator.is_main_process:
        drop_later(lease.run_dir / SNAPSHOTS, step, lease.folder)


def make_loader(config: TrainConfig, prepared: Prepared, accelerator: Accelerator, step: int) -> Loader:
    """Build the loader of this rank's share of the global batches, starting after `step` completed steps."""
    world, batch = prepared.world, config.global_batch_size
    nodes = config.data.num_canonical_nodes
    slots = global_slots(batch // world.size, accelerator.process_index, world.size, world.local_size, nodes)
    data = config.data.model_copy(update={"timeout": config.patience(config.data.timeout, world.size)})
    return Loader(data, prepared.spec, batch, config.seed, step, slots, accelerator.device)


def make_writers(
    config: TrainConfig,
    prepared: Prepared,
    accelerator: Accelerator,
    lease: Lease,
    remote: RemoteRun | None,
    network_json: str,
    store: dist.Store | None,
) -> tuple[CheckpointWriter, CheckpointWriter]:
    """Build the writers for checkpoints and for snapshots of the averages.

    With sharded weights, every process writes its share of a checkpoint; otherwise the main process writes all of it.
    """
    single = each = WriterGroup(accelerator.process_index)
    if config.sharding != "none" and store is not None:
        # a cloned connection, because waiting for a share blocks the connection
        total, beside = accelerator.num_processes, prepared.world.local_size
        each = WriterGroup(single.rank, total, store.clone(), config.collective_timeout, beside)
    every = config.checkpoint.model_copy(update={"every": config.ema.snapshot_every or 1, "keep_every": 1})

    def writer(folder: Path, checkpoint: CheckpointConfig, group: WriterGroup) -> CheckpointWriter:
        return CheckpointWriter(folder, lease, network_json, prepared.fingerprint, checkpoint, group, remote)

    return writer(lease.run_dir, config.checkpoint, each), writer(lease.run_dir / SNAPSHOTS, every, single)


def flops_per_image(prepared: Prepared, network: Any) -> dict[tuple[int, int], int]:
    """Return a dict from each latent shape (h, w) in the data to the training FLOPs per image."""
    flops = {}
    for shape in {stream.latent_hw for stream in prepared.spec.streams}:
        _, call = dry_call(network, prepared.backbone, prepared.spec, shape)
        flops[shape] = training_flops(call)
    return flops


def device_peak(config: TrainConfig, device: torch.device) -> float | None:
    """Return the device's peak throughput in TFLOP/s, from the config or a table of devices; None: it is unknown."""
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops
    if not is_accelerator(device) or config.precision == "float32":  # the table lists peaks for bfloat16
        return None
    return peak_tflops(device_module().get_device_name(device))
