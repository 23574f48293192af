"""A run is put together: here its config is taken apart, and each piece gets its own section."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from shards.base.config import save_config
from shards.base.device import choose_attention, device_module, is_accelerator
from train.config import TrainConfig
from train.data.draws import global_slots
from train.data.loader import Loader
from train.loop import Run
from train.model.channels_last import keep_channels_last
from train.model.ema import make_averages
from train.model.fit import on_meta
from train.model.flops import peak_tflops, training_flops
from train.model.norms import use_low_precision_norms
from train.model.optimizer import Optimizer, build_optimizer
from train.model.sharding import shard_weights
from train.model.unet import compile_network
from train.objective.loss import DiffusionLoss
from train.prepare import Prepared
from train.run.alarm import Alarm
from train.run.health.heartbeat import Heart
from train.run.health.meter import Meter
from train.run.health.output import outdated
from train.run.launches import Launch, publish
from train.run.saving.away import Away
from train.run.saving.checkpoint import SNAPSHOTS, drop_later, restore, trained
from train.run.saving.config import CheckpointConfig
from train.run.saving.shares import Writers
from train.run.saving.writer import CheckpointWriter, too_slow_to_leave
from train.run.state import StepResults, TrainState
from train.run.telling.log import Log


def assemble(
    config: TrainConfig,
    prepared: Prepared,
    accelerator: Accelerator,
    launch: Launch,
    away: Away | None = None,
    heart: Heart | None = None,
) -> Run:
    """The run, standing after the last step that it has done; writes the run folder's config.

    Args:
        away: the run's address, where it lies at one.
        heart: what tells the others what this process is at, where there are others.
    """
    assert config.precision != "auto", "it must be resolved first"
    is_split = config.sharding != "none" and accelerator.num_processes > 1
    unet_json = prepared.unet.to_json_string()  # splitting weights renames the class
    unet, aligned = place_unet(config, prepared.unet, accelerator, is_split), prepared.aligned
    if aligned is not None:
        aligned.head.to(accelerator.device)
        if is_split:
            shard_weights(aligned.head, config.sharding, config.precision)
    network = aligned or unet
    # made of the weights as they now lie: what is placed or split later would not be what it steps
    torch_optimizer = build_optimizer(trained(unet, aligned and aligned.head), config.optimizer)
    averages = make_averages(config.ema)
    state = TrainState()
    if prepared.checkpoint is not None:
        # before anything is compiled or wrapped, so that names are the U-Net's own
        state = restore(prepared.checkpoint, unet, torch_optimizer, averages, aligned and aligned.head)
    tell_start(config, prepared, accelerator, launch)
    begin_folder(config, accelerator, launch, away, state.step)
    spec = prepared.spec
    if config.compile:
        compile_network(unet, len({stream.latent_hw for stream in spec.streams}))
    # what is split is wrapped for autocast alone: DDP would hold it whole
    model = accelerator.prepare_model(network, device_placement=False, evaluation_mode=is_split)
    optimizer = Optimizer(torch_optimizer, accelerator, config.optimizer, config.schedule, config.max_steps)
    if accelerator.scaler is not None and state.scaler:
        accelerator.scaler.load_state_dict(state.scaler)
    alarm = Alarm(config.alarm)
    writer, snapshots = make_writers(config, prepared, accelerator, launch, away, unet_json)
    peak = device_peak(config, accelerator.device)
    run = Run(
        accelerator=accelerator,
        launch=launch,
        heart=heart or Heart(),
        seed=config.seed,
        max_steps=config.max_steps,
        global_batch_size=config.global_batch_size,
        microbatch_size=min(config.microbatch_size, config.global_batch_size // prepared.world.size),
        compiled=config.compile and not is_split,
        collective_timeout=config.collective_timeout,
        unet=unet,
        aligned=aligned,
        model=model,
        casts=torch.autocast(accelerator.device.type, enabled=False),
        optimizer=optimizer,
        averages=averages,
        loss=DiffusionLoss(config.objective, spec, accelerator.device, prepared.backbone, aligned=aligned),
        loader=make_loader(config, prepared, accelerator.process_index, state.step),
        steps_per_epoch=spec.steps_per_epoch,
        validation=prepared.validation,
        state=state,
        results=StepResults(accelerator, config.global_batch_size, config.optimizer.max_skipped_steps, alarm),
        writer=writer,
        snapshots=snapshots,
        log=make_log(config, accelerator, launch.folder, state.step),
        meter=make_meter(prepared, unet) if peak else Meter({}),
        peak_tflops=peak,
    )
    if accelerator.is_main_process:
        for folder in prepared.ahead:
            run.writer.put_again(folder)
    return run


def place_unet(config: TrainConfig, unet: Any, accelerator: Accelerator, is_split: bool) -> Any:
    """On the device, in the memory format and in the parts that the config asks for."""
    assert config.precision != "auto", "it must be resolved first"
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    if config.low_precision_norms:
        use_low_precision_norms(unet)
    unet.to(accelerator.device)
    # fully_shard takes contiguous weights only
    if not is_split and (is_accelerator(unet.device) if config.channels_last is None else config.channels_last):
        keep_channels_last(unet)
    choose_attention(accelerator.device)
    if is_split:
        shard_weights(unet, config.sharding, config.precision)
    return unet


def tell_start(config: TrainConfig, prepared: Prepared, accelerator: Accelerator, launch: Launch) -> None:
    """Print where the run starts unless from random weights, a reduced microbatch, and recalled samples."""
    own = prepared.checkpoint
    if own is not None:
        accelerator.print(f"resuming {config.run_dir} after step {own.state.step} ({own.tag}, {own.folder.name})")
    elif prepared.start is not None:
        accelerator.print(f"starting {config.run_dir} from {prepared.start}")
        if prepared.start_seed == config.seed:
            accelerator.print(
                f"{config.init_from} was trained with the same seed, {config.seed}, so this run draws the same "
                f"timesteps and noise at the same steps again, and on the same data the same order of samples. Set "
                f"another `seed`."
            )
    warning = too_slow_to_leave(launch.pace, config.checkpoint)
    if warning is not None:
        accelerator.print(warning)
    share = config.global_batch_size // prepared.world.size
    if config.microbatch_size > share:
        accelerator.print(
            f"microbatch_size {config.microbatch_size} is larger than each process's share of the batch "
            f"(global_batch_size {config.global_batch_size} over {prepared.world.size} processes), so the effective "
            f"microbatch is {share}."
        )
    for stream in prepared.spec.streams:
        if stream.recalled:
            accelerator.print(
                f"{stream.recalled} of {stream.files.num_samples} samples of "
                f"{stream.config.root}/{stream.config.bucket} were recalled since their index was published. The run "
                f"goes on with them; `--data.index newest` leaves them out."
            )


def begin_folder(config: TrainConfig, accelerator: Accelerator, launch: Launch, away: Away | None, step: int) -> None:
    """Put the config into the run folder, as it was resolved; what came after `step` goes from there."""
    if accelerator.is_main_process:
        save_config(config, launch.folder / "config.yaml")
        publish(launch.folder / "config.yaml", config.work / "config.yaml", launch.folder)
    accelerator.wait_for_everyone()
    if away is not None and accelerator.is_main_process:
        away.share(config.work)
        away.drop_logs(lambda names: outdated(names, away.number, config.log.keep_output))
    if accelerator.is_main_process:
        drop_later(config.work / SNAPSHOTS, step, launch.folder)


def make_loader(config: TrainConfig, prepared: Prepared, rank: int, step: int) -> Loader:
    """Of this rank's share of each step after `step`."""
    world, batch = prepared.world, config.global_batch_size
    nodes = config.data.num_canonical_nodes
    slots = global_slots(batch // world.size, rank, world.size, world.local_size, nodes)
    data = config.data.model_copy(update={"timeout": config.patience(config.data.timeout, world.size)})
    return Loader(data, prepared.spec, batch, config.seed, step, slots)


def make_writers(
    config: TrainConfig,
    prepared: Prepared,
    accelerator: Accelerator,
    launch: Launch,
    away: Away | None,
    unet_json: str,
) -> tuple[CheckpointWriter, CheckpointWriter]:
    """Of checkpoints, which every process writes its part of where weights are split; of averages' snapshots."""
    rank, total, beside = accelerator.process_index, accelerator.num_processes, prepared.world.local_size
    each = Writers(rank, total, config.collective_timeout, beside) if config.sharding != "none" else Writers(rank)
    every = config.checkpoint.model_copy(update={"every": config.ema.snapshot_every or 1, "keep_every": 1})

    def writer(folder: Path, checkpoint: CheckpointConfig, writers: Writers) -> CheckpointWriter:
        return CheckpointWriter(folder, launch.folder, unet_json, prepared.fingerprint, checkpoint, writers, away)

    return writer(config.work, config.checkpoint, each), writer(config.work / SNAPSHOTS, every, Writers(rank))


def make_log(config: TrainConfig, accelerator: Accelerator, folder: Path, step: int) -> Log:
    """Of the lines after `step`, by the launch whose own folder is `folder`."""
    settings = config.model_dump(mode="json")
    return Log(config.log, config.run_dir, folder, step, config.max_steps, accelerator, settings)


def make_meter(prepared: Prepared, unet: Any) -> Meter:
    """That knows a sample's arithmetic in each shape of latents."""
    shapes = {stream.latent_hw for stream in prepared.spec.streams}
    return Meter({shape: training_flops(on_meta(unet, prepared.backbone, prepared.spec, shape)[1]) for shape in shapes})


def device_peak(config: TrainConfig, device: torch.device) -> float | None:
    """What one device does at most, in TFLOP/s: as the config says, or by the device's name; None: not known."""
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops
    if not is_accelerator(device) or config.precision == "float32":  # the table is bfloat16's
        return None
    return peak_tflops(device_module().get_device_name(device))
