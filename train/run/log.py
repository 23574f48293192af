"""What a run says while it trains: metrics.jsonl, samples.jsonl, the tracker and the progress bar."""

import math
import resource
import sys
import time
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from train.data.batch import Batch
from train.model.ema import ema_decay
from train.model.flops import peak_tflops, training_flops
from train.objective.loss import NUM_QUARTERS
from train.run.assemble import Run, collect_losses
from train.run.metrics import JsonLines, finite
from train.run.plot import plot_run


class Log:
    """metrics.jsonl, samples.jsonl, the tracker and the progress bar."""

    def __init__(self, run: Run):
        config, step = run.config, run.state.step
        self.run = run
        self.utilisation = Utilisation(run)
        self.data_seconds = 0.0
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
        self.interval_start = time.perf_counter()

    def samples(self, batch: Batch) -> None:
        """Write the keys of the global batch of the step about to be done, in global order."""
        if not self.run.config.log.samples:
            return
        pairs = gather_object(list(zip(batch.slots.tolist(), batch.keys, strict=True)))
        if self.sample_lines:
            self.sample_lines.write(step=self.run.state.step + 1, keys=[key for _, key in sorted(pairs)])

    def step(self, batch: Batch, grad_norm: Tensor) -> None:
        """Count a step; at every `log.every`-th write a line. Only then does the host wait for the device."""
        run = self.run
        self.bar.update()
        self.interval_steps += 1
        self.utilisation.count(batch)
        if run.state.step % run.config.log.every and run.state.step != run.config.max_steps:
            return
        collect_losses(run)
        seconds = time.perf_counter() - self.interval_start
        loss = sum(run.state.losses) / len(run.state.losses) if run.state.losses else None
        rate = self.interval_steps * run.config.global_batch_size / seconds
        holds_ema = run.ema is not None
        fields: dict[str, Any] = {
            "loss": loss,
            "loss_by_quarter": means_by_quarter(run.state.quarters, run.config.objective.num_train_timesteps),
            "skipped_steps": run.state.skipped,
            "grad_norm": float(grad_norm),
            "lr": run.optimizer.param_groups[0]["lr"],
            "images_per_second": round(rate, 3),
            "images_per_second_per_gpu": round(rate / run.accelerator.num_processes, 3),
            "mfu": self.utilisation.take(seconds),
            "memory_gb": round(peak_memory(run.accelerator.device) / 2**30, 3),
            "data_wait": round(self.data_seconds / seconds, 4),
            "epoch": round(run.state.step / run.request.spec.steps_per_epoch, 4),
            "ema": holds_ema,
            "ema_decay": ema_decay(run.config.ema, run.state.step) if holds_ema else None,
        }
        if run.request.validation is not None and run.state.step % run.config.validation.every == 0:
            fields |= run.request.validation(run.unet, run.loss, run.accelerator)
        run.state.losses.clear()
        run.state.quarters = [0.0] * len(run.state.quarters)
        self.data_seconds, self.interval_steps, self.interval_start = 0.0, 0, time.perf_counter()
        if self.metrics:
            self.metrics.write(step=run.state.step, **fields)
            self.bar.set_postfix(loss=loss)
        run.accelerator.log(flat_numbers(finite(fields)), step=run.state.step)

    def close(self) -> None:
        """Finish the tracker and draw loss.png."""
        self.bar.close()
        self.run.accelerator.end_training()
        if self.main:
            plot_run(self.run.config.run_dir)


class Utilisation:
    """The arithmetic that this rank's part of an interval needed, as a share of what its device does at its peak."""

    def __init__(self, run: Run):
        """Counts an image of each latent shape once, here, where no interval is being timed."""
        device = run.accelerator.device
        known = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        if run.config.precision == "float32":
            known = None  # the table is bfloat16's
        self.peak = run.config.log.peak_tflops or known
        shapes = {stream.latent_hw for stream in run.request.spec.streams} if self.peak else set()
        length = run.request.spec.text_length
        self.flops_per_image = {shape: training_flops(run.unet, shape, length) for shape in shapes}
        self.flops = 0

    def count(self, batch: Batch) -> None:
        """Add one step on this rank's share of a global batch."""
        if self.peak:
            self.flops += (
                len(batch) * self.flops_per_image[(batch.image_latents.shape[2], batch.image_latents.shape[3])]
            )

    def take(self, seconds: float) -> float | None:
        """The share over the interval that ends now, and begin the next; None where the peak is not known."""
        flops, self.flops = self.flops, 0
        return round(flops / seconds / (self.peak * 1e12), 4) if self.peak else None


def means_by_quarter(quarters: list[float], num_train_timesteps: int) -> dict[str, float | None]:
    """Timesteps of each quarter, as `first-last`, → mean loss of the samples that were drawn there; None where none."""
    edges = [math.ceil(k * num_train_timesteps / NUM_QUARTERS) for k in range(NUM_QUARTERS + 1)]
    sums, counts = quarters[:NUM_QUARTERS], quarters[NUM_QUARTERS:]
    return {
        f"{first}-{last - 1}": total / count if count else None
        for first, last, total, count in zip(edges, edges[1:], sums, counts, strict=False)
    }


def peak_memory(device: torch.device) -> int:
    """Most bytes that were allocated on a GPU at once; on a CPU, that this process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flat_numbers(fields: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log line as trackers take them: `a/b` for what is b in a."""
    flat: dict[str, float] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{name}": number for name, number in flat_numbers(value).items()}
        elif isinstance(value, int | float):
            flat[key] = value
    return flat
