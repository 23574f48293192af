"""Estimates for one phase on one GPU count, from the nearest measurement or an assumed utilisation."""

import math
from dataclasses import dataclass
from typing import Literal

from plan.arithmetic.costs import GIGA, SECONDS_PER_HOUR, checkpoint_bytes, days_for, sample_bytes, text_bytes
from plan.arithmetic.restarts import daly_interval, expected_time
from plan.arithmetic.scaling import Machine, Step, StepTime, calibrate, step_time
from plan.arithmetic.work import Work
from plan.config import Phase, Plan
from plan.measured import Rate, Rates
from shards.base.errors import RequestError
from shards.format.towers import TextTower
from train.model.config import optimizer_class

BITS, MEGA = 8, 1e6
Basis = Literal["measured", "predicted", "assumed"]
"""Origin of a throughput: `measured` on this GPU count, `predicted` from a different one, or `assumed`."""


@dataclass(frozen=True)
class Inputs:
    """A plan with its counted FLOPs and measured rates."""

    plan: Plan
    work: Work
    rates: Rates

    @property
    def machine(self) -> Machine:
        """Effective bandwidths of the plan's hardware, in B/s."""
        gpu, links = self.plan.gpu, self.plan.links
        return Machine(
            gpus_per_node=gpu.gpus_per_node,
            link=gpu.link_gb_per_s * GIGA * links.efficiency,
            network=gpu.network_gbit_per_s * GIGA / BITS * links.efficiency,
            memory=gpu.memory_gb_per_s * GIGA,
            data_per_node=links.data_gbit_per_node * GIGA / BITS,
            data_total=links.data_gbit_total * GIGA / BITS,
        )

    @property
    def texts(self) -> list[TextTower]:
        """Text encoders, with the plan's default `storage` and `trim` where an encoder does not override them."""
        towers = []
        for name, tower in self.work.texts.items():
            override, default = self.plan.networks.texts.get(name), self.plan.text
            storage = (override and override.storage) or default.storage
            trim = default.trim if override is None or override.trim is None else override.trim
            towers.append(tower.model_copy(update={"storage": storage, "trim": trim and tower.states}))
        return towers

    def sample_bytes(self, bucket: str) -> float:
        """Return the size of one stored sample of `bucket` in bytes."""
        data, work = self.plan.data, self.work
        moments = data.posterior == "moments" and work.has_posterior
        return sample_bytes(
            work.latent_channels * (2 if moments else 1),
            work.latent_hw[bucket],
            sum(text_bytes(tower, self.plan.text.tokens) for tower in self.texts),
            data.string_bytes,
            self.plan.image.storage,
            work.latent_channels,
        )

    def rates_of(self, stage: Literal["train", "encode", "text"], bucket: str | None) -> list[Rate]:
        """Return the measured rates of a stage, sorted by GPU count, or one rate from the assumed utilisation."""
        gpu, work = self.plan.gpu, self.work
        flops = work.caption if bucket is None else (work.train if stage == "train" else work.encode)[bucket]
        utilisation = gpu.train_utilisation if stage == "train" else gpu.encode_utilisation
        source = f"{utilisation:.3g} of {gpu.peak_tflops:.0f} TFLOP/s ÷ {flops / GIGA:.1f} GFLOP"
        modelled = Rate(gpu.peak_tflops * 1e12 * utilisation / flops, gpu.gpus_per_node, source, assumed=True)
        return self.rates.of(stage, bucket) or [modelled]

    def encode_seconds(self, bucket: str) -> float:
        """Return the GPU-seconds needed to encode one image in `bucket` and its caption."""
        rates = self.rates_of("encode", bucket)[0], self.rates_of("text", None)[0]
        return sum(1 / rate.images_per_second_per_gpu for rate in rates)

    def step(self, phase: Phase, rate: Rate | None = None, online: bool = False) -> Step:
        """Describe a step of `phase`. The batch sizes recorded with `rate` override those of the phase."""
        data = self.plan.data
        return Step(
            (rate and rate.global_batch_size) or phase.global_batch_size,
            (rate and rate.microbatch_size) or phase.microbatch_size,
            self.work.num_parameters,
            self.plan.links.gradient_bytes,
            data.picture_bytes + data.string_bytes if online else self.sample_bytes(phase.bucket),
            self.plan.links.bucket_mb * MEGA,
            self.work.backward[phase.bucket],
            optimizer_class(self.plan.optimizer).step_bytes(),
        )


@dataclass(frozen=True)
class PhaseRow:
    """Estimates for one phase on one GPU count. Times are in seconds unless a field says otherwise."""

    bucket: str
    images_per_gpu: float
    """Images per GPU and step."""
    images_per_second: float
    basis: Basis
    source: str
    predicted_images_per_second: float
    """Prediction from a measurement on another GPU count, even if this count was measured."""
    step: StepTime
    split_speedup: float
    """Speedup from sharding weights within each node (HSDP), which the trainer does not support."""
    bottleneck: str
    days: float
    read_per_node: float
    """Read rate of one node, in B/s."""
    read_total: float
    """Total read rate from the store, in B/s."""
    save_every_steps: int
    best_interval: float
    """Optimal training time between checkpoints by Daly's formula."""
    num_checkpoints: int
    expected_days: float
    """Days including checkpoints and failures."""


def phase_row(inputs: Inputs, phase: Phase, gpus: int, online: bool) -> PhaseRow:
    """Estimate `phase` on `gpus` GPUs, encoding online or reading precomputed latents.

    Raises:
        RequestError: a measured rate is impossible at the given bandwidths, or failures are so frequent that training
            never finishes.
    """
    rates = inputs.rates_of("train", phase.bucket)
    rate = _basis_for(rates, gpus)
    time = _predict(inputs, phase, rate, gpus, online)
    other_rate = _basis_for([other for other in rates if other.gpus != gpus] or rates, gpus)
    step = inputs.step(phase, online=online)
    matches_benchmark = rate.gpus == gpus and not online and inputs.step(phase, rate) == step
    exact = matches_benchmark and time.bottleneck != "data rate"
    images_per_second = phase.global_batch_size / time.total
    days = days_for(phase.steps * phase.global_batch_size, images_per_second)
    read = images_per_second * step.sample_bytes
    every, best, expected = _restarts(inputs, phase, time.total, gpus)
    return PhaseRow(
        bucket=phase.bucket,
        images_per_gpu=phase.global_batch_size / gpus,
        images_per_second=images_per_second,
        basis="assumed" if rate.assumed else "measured" if exact else "predicted",
        source=rate.source,
        predicted_images_per_second=phase.global_batch_size / _predict(inputs, phase, other_rate, gpus, online).total,
        step=time,
        split_speedup=time.total / _predict(inputs, phase, rate, gpus, online, sharded=True).total,
        bottleneck=time.bottleneck,
        days=days,
        read_per_node=read * min(gpus, inputs.plan.gpu.gpus_per_node) / gpus,
        read_total=read,
        save_every_steps=every,
        best_interval=best,
        num_checkpoints=phase.steps // every,
        expected_days=days * expected,
    )


def _basis_for(rates: list[Rate], gpus: int) -> Rate:
    """Return the rate with the most GPUs up to `gpus`, or else the fewest. `rates` must be sorted by GPU count."""
    return next((rate for rate in reversed(rates) if rate.gpus <= gpus), rates[0])


def _predict(inputs: Inputs, phase: Phase, rate: Rate, gpus: int, online: bool, sharded: bool = False) -> StepTime:
    machine = inputs.machine
    try:
        seconds = calibrate(rate.images_per_second_per_gpu, inputs.step(phase, rate), rate.gpus, machine)
    except ValueError as error:
        raise RequestError(
            f"{phase.bucket}: {error}. Either the bandwidths in `links` and `gpu` or the benchmark ({rate.source}) "
            f"must be wrong. Correct one of them."
        ) from None
    encode_seconds = inputs.encode_seconds(phase.bucket) if online else 0.0
    return step_time(seconds, inputs.step(phase, online=online), gpus, machine, encode_seconds, sharded=sharded)


def _restarts(inputs: Inputs, phase: Phase, step_seconds: float, gpus: int) -> tuple[int, float, float]:
    """Return the steps between checkpoints, the optimal interval in seconds, and expected ÷ uninterrupted time."""
    saving = inputs.plan.checkpoints
    num_bytes = checkpoint_bytes(
        inputs.work.num_parameters, phase.ema, optimizer_class(inputs.plan.optimizer).state_bytes
    )
    seconds = num_bytes / (inputs.plan.links.checkpoint_gbit * GIGA / BITS)
    between_failures = saving.gpu_hours_per_failure * SECONDS_PER_HOUR / gpus
    best = daly_interval(seconds, between_failures)
    every = min(phase.steps, saving.every_steps or max(1, round(best / step_seconds)))
    expected = expected_time(1.0, every * step_seconds, seconds, saving.restart_seconds, between_failures)
    if math.isinf(expected):
        raise RequestError(
            f"On {gpus} GPUs, a failure occurs every {between_failures:.3g} s on average, but {phase.bucket} saves "
            f"only every {every * step_seconds:.3g} s, so the training would never finish. Lower "
            f"checkpoints.every_steps, or correct checkpoints.gpu_hours_per_failure."
        )
    return every, best, expected
