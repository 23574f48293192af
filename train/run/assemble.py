"""A run: what a step touches, how it is put together, saved, and brought up to date."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel
from torch import Tensor

from shards.base.config import save_config
from shards.base.errors import WorkError
from train.config import TrainConfig
from train.data.draws import global_slots
from train.model.ema import Ema, ema_decay
from train.model.norms import use_low_precision_norms
from train.model.sharding import shard
from train.objective.loss import NUM_QUARTERS, DiffusionLoss
from train.run.checkpoint import CheckpointWriter, TrainState, load_weights, restore, take_snapshot
from train.run.request import Request


@dataclass
class Run:
    """Everything a step touches."""

    config: TrainConfig
    request: Request
    accelerator: Accelerator
    unet: UNet2DConditionModel
    model: Any
    """`unet` as accelerate wrapped it, or in parts."""
    optimizer: Any
    loss: DiffusionLoss
    state: TrainState
    ema: Ema | None
    writer: CheckpointWriter
    slots: Tensor
    pending: list[Tensor] = field(default_factory=list)
    """Of each step not yet in `state`: whether it was skipped, then this rank's `DiffusionLoss.by_quarter`, flat."""


def assemble(config: TrainConfig, request: Request, accelerator: Accelerator) -> Run:
    """Build the run from config, or from the newest checkpoint; writes the run folder."""
    unet, optimizer_config = request.unet, config.optimizer
    cuda, sharded = accelerator.device.type == "cuda", config.sharding != "none" and accelerator.num_processes > 1
    writer = CheckpointWriter(config.run_dir, unet.to_json_string(), request.fingerprint, config.checkpoint)
    if request.checkpoint is not None:
        load_weights(unet, request.checkpoint[0] / "unet")
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    if config.low_precision_norms:
        use_low_precision_norms(unet)
    unet.to(accelerator.device)
    # fully_shard takes contiguous weights only
    if not sharded and (cuda if config.channels_last is None else config.channels_last):
        unet.to(memory_format=torch.channels_last)
    if not cuda:
        # the name is CUDA's, but it governs the CPU's kernel too, whose bfloat16 backward pass is 5 to 15 times slower
        # than the plain one on the short sequences that a CPU trains on
        torch.backends.cuda.enable_flash_sdp(False)
    if sharded:
        shard(unet, config.sharding, config.precision)
    optimizer = torch.optim.AdamW(
        unet.parameters(),
        lr=optimizer_config.lr,
        betas=optimizer_config.betas,
        eps=optimizer_config.eps,
        weight_decay=optimizer_config.weight_decay,
        fused=True,
    )
    state, ema = TrainState(), None
    if request.checkpoint is not None:
        folder, content = request.checkpoint
        state, ema = restore(folder, content, unet, optimizer, config.ema)
        tag = content.get("tag", config.run_dir.name)
        accelerator.print(f"resuming {config.run_dir} after step {state.step} ({tag}, {folder.name})")
    elif request.start is not None:
        accelerator.print(f"starting {config.run_dir} from {request.start}")
    if accelerator.is_main_process:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, config.run_dir / "config.yaml")
    accelerator.wait_for_everyone()
    if config.compile:
        unet.compile()
    # what is in parts is wrapped for autocast alone: DDP would hold it whole
    model = accelerator.prepare_model(unet, device_placement=False, evaluation_mode=sharded)
    prepared = accelerator.prepare_optimizer(optimizer)
    slots = global_slots(
        config.global_batch_size // accelerator.num_processes,
        accelerator.process_index,
        accelerator.num_processes,
        request.local_world_size,
    )
    if accelerator.scaler is not None and state.scaler:
        accelerator.scaler.load_state_dict(state.scaler)
    loss = DiffusionLoss(config.objective, request.spec, accelerator.device)
    return Run(config, request, accelerator, unet, model, prepared, loss, state, ema, writer, slots)


def update_ema(run: Run) -> None:
    """Start the moving average at its first step, and move it at each one after."""
    start = run.config.ema.start_step
    if start is None or run.state.step < start:
        return
    if run.ema is None:
        run.ema = Ema(dict(run.unet.named_parameters()))
    else:
        run.ema.update(dict(run.unet.named_parameters()), ema_decay(run.config.ema, run.state.step))


def save(run: Run, last: bool) -> None:
    """Write a checkpoint of the step just done; it is there on return if it is the `last`, or not `asynchronous`."""
    collect_losses(run)
    if run.accelerator.scaler is not None:
        run.state.scaler = run.accelerator.scaler.state_dict()
    main = run.accelerator.is_main_process
    snapshot = take_snapshot(run.state, run.unet, run.optimizer.optimizer, run.ema, keep=main)
    if main:
        run.writer.write(snapshot)
        if last:
            run.writer.finish()
    if last or not run.config.checkpoint.asynchronous:
        run.accelerator.wait_for_everyone()


def collect_losses(run: Run) -> None:
    """Bring `state` up to date over all ranks: each step's mean loss, sums by quarter, and the steps skipped.

    Raises:
        WorkError: more steps were skipped than `optimizer.max_skipped_steps`.
    """
    if not run.pending:
        return
    rows = torch.stack(run.pending)  # (steps, 1 + 8)
    run.pending.clear()
    bad = rows[:, 0]
    for quarters in run.accelerator.reduce(rows[:, 1:].contiguous(), "sum").tolist():
        loss = sum(quarters[:NUM_QUARTERS]) / run.config.global_batch_size
        if math.isfinite(loss):
            run.state.losses.append(loss)
            run.state.quarters = [a + b for a, b in zip(run.state.quarters, quarters, strict=True)]
    scaler = run.accelerator.scaler
    if scaler is None or scaler.get_scale() <= 1:  # above, a float16 overflow is the scaler finding its scale
        run.state.skipped += int(bad.sum())
    if run.state.skipped > run.config.optimizer.max_skipped_steps:
        raise WorkError(
            f"{run.state.skipped} steps up to step {run.state.step} had a loss or gradient that is not finite, more "
            f"than optimizer.max_skipped_steps. Nothing of them is in the weights. Lower optimizer.lr, or use another "
            f"precision (bfloat16, float32); the same run would meet the same steps again."
        )
