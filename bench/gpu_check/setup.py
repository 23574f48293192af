"""Sizes used by the check: Stable Diffusion 2's on a GPU, and small ones for a rehearsal without one."""

import fcntl
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from bench.encode import EncoderSizes, sizes_for
from bench.kit.common import synchronize, timed
from bench.train_step import StepSetting, training
from shards.base.device import Precision
from train.model.network import build_network
from train.start import ACCELERATE_PRECISION
from train.step import TrainStep

REHEARSED = Path(__file__).with_name("rehearsal_unet.json")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Setup:
    """Device and sizes of the check."""

    device: torch.device
    small: bool
    """Whether this is a rehearsal: the same code with small networks, and without a C++ compiler."""
    lock: Path | None = None
    """File to lock before timing anything; None: no other part runs."""

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Wait until no other part is timing, and keep the others from timing."""
        if self.lock is None:
            yield
            return
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            yield

    @property
    def unet(self) -> Path:
        """Config of the U-Net whose speed is measured."""
        return REHEARSED if self.small else Path("configs/unet/sd2-base.json")

    @property
    def curve_unet(self) -> Path:
        """Config of the U-Net whose losses are compared."""
        return REHEARSED if self.small else Path("bench/kit/unet.json")

    @property
    def buckets(self) -> tuple[str, str]:
        """Buckets of the two training phases."""
        return ("64x64", "128x128") if self.small else ("256x256", "512x512")

    def microbatches(self, bucket: str) -> tuple[int, ...]:
        """Return the microbatch sizes to time: that of the config, and a larger one."""
        if self.small:
            return (4, 8)
        return (128, 256) if bucket == self.buckets[0] else (32, 64)

    @property
    def profiled(self) -> tuple[StepSetting, int]:
        """StepSetting and number of images of the step that is profiled, at the larger size."""
        bucket = self.buckets[1]
        setting = StepSetting(bucket, self.microbatches(bucket)[0], True, True, compile=not self.small)
        return setting, self.batch

    @property
    def batch(self) -> int:
        """Images per step."""
        return 8 if self.small else 256

    @property
    def steps(self) -> int:
        """Steps of a loss curve."""
        return 4 if self.small else 40

    @property
    def encoders(self) -> EncoderSizes:
        """Sizes of the VAE and the text encoder."""
        return sizes_for(torch.device("cpu" if self.small else "cuda"))

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that the device can train in. accelerate rejects float16 on a CPU."""
        return PRECISIONS if self.device.type == "cuda" else PRECISIONS[:2]

    def accelerator(self, precision: str) -> Accelerator:
        """Make an accelerator, which replaces the last one of this process."""
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(mixed_precision=ACCELERATE_PRECISION[precision], cpu=self.device.type == "cpu")

    @contextmanager
    def training(
        self, setting: StepSetting, precision: str, unet: Path, batch: int, **fields: Any
    ) -> Iterator[tuple[TrainStep, Any]]:
        """Yield the trainer's own step, on a batch in memory. `fields` set its optimizer and schedule."""
        options = Namespace(batch=batch, unet=unet, precision=precision)
        with training(setting, options, self.accelerator(precision), build_network(unet, 0), **fields) as running:
            yield running


def use_no_compiler() -> None:
    """Make torch.compile trace and then run eagerly, which takes seconds and needs no compiler."""
    compile_with = torch.compile

    def traced(*arguments: Any, **options: Any) -> Any:
        return compile_with(*arguments, **{**options, "backend": "eager", "mode": None})

    torch.compile = traced


def seconds_of(function: Callable[[], object], setup: Setup, rounds: int = 10) -> float:
    """Return the median seconds of a call, after two warm-up calls. Each call includes the host's overhead."""
    rounds = 2 if setup.small else rounds

    def run() -> None:
        function()
        synchronize(setup.device)

    for _ in range(2):
        run()
    with setup.quiet():
        return statistics.median(timed(run)[0] for _ in range(rounds))
