"""The whole of stage 2: assemble a run, then loop over global batches."""

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import UNet2DConditionModel
from torch import Tensor
from tqdm import tqdm

from shards.config import save_config
from shards.errors import WorkError
from train.checkpoint import TrainState, newest_checkpoint, restore, save_checkpoint
from train.config import TrainConfig
from train.data import Batch, global_batches, make_loader
from train.draws import Draws, global_slots
from train.ema import Ema
from train.metrics import JsonLines
from train.objective import DiffusionLoss
from train.plot import plot_run
from train.request import Request, check_resume
from train.schedule import learning_rate


@dataclass
class Run:
    """Everything a step touches."""

    config: TrainConfig
    request: Request
    accelerator: Accelerator
    unet: UNet2DConditionModel
    model: Any
    """`unet` as accelerate wrapped it."""
    optimizer: Any
    loss: DiffusionLoss
    state: TrainState
    ema: Ema | None
    slots: Tensor
    pending: list[Tensor] = field(default_factory=list)
    """This rank's summed loss of each step since `state.losses` was last brought up to date."""


def train(config: TrainConfig, request: Request, accelerator: Accelerator) -> None:
    """Train until `max_steps`, from the newest checkpoint of `run_dir` where there is one."""
    run = assemble(config, request, accelerator)
    if run.state.step >= config.max_steps:
        accelerator.print(f"{config.run_dir} has done its {config.max_steps} steps; there is nothing to do.")
        return
    loader = make_loader(config.data, request.spec, config.global_batch_size, config.seed, run.state.step, run.slots)
    batches = global_batches(loader, request.spec, run.state.step)
    log = Log(run)
    while run.state.step < config.max_steps:
        waited = time.perf_counter()
        batch = next(batches)
        log.data_seconds += time.perf_counter() - waited
        log.samples(batch)

        grad_norm = train_step(run, batch)

        run.state.step += 1
        update_ema(run)
        log.step(grad_norm)
        if run.state.step % config.checkpoint.every == 0 or run.state.step == config.max_steps:
            save(run)
    log.close()


def train_step(run: Run, batch: Batch) -> Tensor:
    """One optimizer step on this rank's share of a global batch; returns the gradient's norm before clipping."""
    config, accelerator = run.config, run.accelerator
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.state.step, config.optimizer.lr, config.schedule, config.max_steps)
    total = torch.zeros((), device=accelerator.device)
    microbatches = list(batch.to(accelerator.device).microbatches(config.microbatch_size))
    for microbatch in microbatches:
        draws = Draws(config.seed, run.state.step, microbatch.slots)
        last = microbatch is microbatches[-1]
        # gradients cross ranks once, with the last microbatch
        with nullcontext() if last else accelerator.no_sync(run.model):
            losses = run.loss(run.model, microbatch, draws)
            accelerator.backward(losses.sum() / len(batch))
        total += losses.detach().sum()
    grad_norm = accelerator.clip_grad_norm_(run.model.parameters(), config.optimizer.max_grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.pending.append(total)
    return grad_norm


def assemble(config: TrainConfig, request: Request, accelerator: Accelerator) -> Run:
    """Build the run from config, or from the newest checkpoint; writes the run folder."""
    unet, optimizer_config = request.unet, config.optimizer
    cuda = accelerator.device.type == "cuda"
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    unet.to(accelerator.device)
    if cuda:
        unet.to(memory_format=torch.channels_last)
    else:
        # the name is CUDA's, but it governs the CPU's kernel too, whose bfloat16 backward pass is 5 to 15 times slower
        # than the plain one on the short sequences that a CPU trains on
        torch.backends.cuda.enable_flash_sdp(False)
    optimizer = torch.optim.AdamW(
        unet.parameters(),
        lr=optimizer_config.lr,
        betas=optimizer_config.betas,
        eps=optimizer_config.eps,
        weight_decay=optimizer_config.weight_decay,
        fused=True,
    )
    state, ema = TrainState(), None
    found = newest_checkpoint(config.run_dir, accelerator.print)
    if found is not None:
        folder, content = found
        check_resume(folder, content["fingerprint"], request.fingerprint)
        state, ema = restore(folder, content, unet, optimizer, config.ema.decay)
        accelerator.print(f"resuming {config.run_dir} after step {state.step}")
    if accelerator.is_main_process:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, config.run_dir / "config.yaml")
    accelerator.wait_for_everyone()
    if config.compile:
        unet.compile()
    model, prepared = accelerator.prepare(unet, optimizer)
    slots = global_slots(
        config.global_batch_size // accelerator.num_processes,
        accelerator.process_index,
        accelerator.num_processes,
        request.local_world_size,
    )
    loss = DiffusionLoss(config.objective, request.spec, accelerator.device)
    return Run(config, request, accelerator, unet, model, prepared, loss, state, ema, slots)


def update_ema(run: Run) -> None:
    """Start the moving average at its first step, and move it at each one after."""
    start = run.config.ema.start_step
    if start is None or run.state.step < start:
        return
    if run.ema is None:
        run.ema = Ema(dict(run.unet.named_parameters()), run.config.ema.decay)
    else:
        run.ema.update(dict(run.unet.named_parameters()))


def save(run: Run) -> None:
    """Write a checkpoint of the step just done."""
    collect_losses(run)
    if run.accelerator.is_main_process:
        optimizer = run.optimizer.optimizer
        keep = run.config.checkpoint.keep
        save_checkpoint(run.config.run_dir, run.state, run.request.fingerprint, run.unet, optimizer, run.ema, keep)
    run.accelerator.wait_for_everyone()


def collect_losses(run: Run) -> None:
    """Bring `state.losses` up to date: the global mean of each step, summed over all ranks."""
    if run.pending:
        means = run.accelerator.reduce(torch.stack(run.pending), "sum") / run.config.global_batch_size
        run.state.losses += means.tolist()
        run.pending.clear()


class Log:
    """metrics.jsonl, samples.jsonl, the tracker and the progress bar."""

    def __init__(self, run: Run):
        config, step = run.config, run.state.step
        self.run = run
        self.data_seconds = 0.0
        self.interval_start = time.perf_counter()
        self.interval_steps = 0
        self.main = run.accelerator.is_main_process
        self.metrics = JsonLines(config.run_dir / "metrics.jsonl", step) if self.main else None
        self.sample_lines = (
            JsonLines(config.run_dir / "samples.jsonl", step) if self.main and config.log.samples else None
        )
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(
            total=config.max_steps, initial=step, disable=not self.main, unit="step", mininterval=15 if quiet else 0.5
        )
        if config.log.tracker != "none":
            run.accelerator.init_trackers("tracker")

    def samples(self, batch: Batch) -> None:
        """Write the keys of the global batch of the step about to be done, in global order."""
        if not self.run.config.log.samples:
            return
        pairs = gather_object(list(zip(batch.slots.tolist(), batch.keys, strict=True)))
        if self.sample_lines:
            self.sample_lines.write(step=self.run.state.step + 1, keys=[key for _, key in sorted(pairs)])

    def step(self, grad_norm: Tensor) -> None:
        """Count a step; at every `log.every`-th write a line. Only then does the host wait for the device."""
        run = self.run
        self.bar.update()
        self.interval_steps += 1
        if run.state.step % run.config.log.every and run.state.step != run.config.max_steps:
            return
        collect_losses(run)
        seconds = time.perf_counter() - self.interval_start
        loss = sum(run.state.losses) / len(run.state.losses)
        fields = {
            "loss": loss,
            "grad_norm": float(grad_norm),
            "lr": run.optimizer.param_groups[0]["lr"],
            "images_per_second": round(self.interval_steps * run.config.global_batch_size / seconds, 3),
            "data_wait": round(self.data_seconds / seconds, 4),
            "epoch": round(run.state.step / run.request.spec.steps_per_epoch, 4),
            "ema": run.ema is not None,
        }
        run.state.losses.clear()
        self.data_seconds, self.interval_steps, self.interval_start = 0.0, 0, time.perf_counter()
        if self.metrics:
            self.metrics.write(step=run.state.step, **fields)
            self.bar.set_postfix(loss=f"{loss:.4f}")
        run.accelerator.log(fields, step=run.state.step)
        if math.isnan(loss):
            raise WorkError(
                f"The loss is NaN at step {run.state.step}. The newest checkpoint in {run.config.run_dir}/checkpoints "
                f"is from before it: lower optimizer.lr, or use precision bfloat16 or float32, and run again."
            )

    def close(self) -> None:
        """Finish the tracker and draw loss.png."""
        self.bar.close()
        self.run.accelerator.end_training()
        if self.main:
            plot_run(self.run.config.run_dir)
