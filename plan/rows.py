"""One phase of a plan on one number of GPUs, from the nearest measurement or from an assumed utilisation."""

import math
from dataclasses import dataclass
from typing import Literal

from plan.arithmetic.costs import GIGA, SECONDS_PER_HOUR, checkpoint_bytes, days_of, sample_bytes, text_bytes
from plan.arithmetic.restarts import best_interval, expected_time
from plan.arithmetic.scaling import Machine, Step, StepTime, calibrate, step_time
from plan.arithmetic.work import Work
from plan.config import Phase, Plan
from plan.measured import Rate, Rates
from shards.base.errors import RequestError
from shards.format.towers import TextTower

BITS, MEGA = 8, 1e6
Basis = Literal["measured", "predicted", "assumed"]
"""A throughput measured on this number of GPUs; predicted from another number; or from an assumed utilisation."""


@dataclass(frozen=True)
class Inputs:
    """A plan with its counted work and its measured rates."""

    plan: Plan
    work: Work
    rates: Rates

    @property
    def machine(self) -> Machine:
        """The plan's bandwidths in B/s."""
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
        """The text towers, stored as the plan says where they do not say it themselves."""
        towers = []
        for name, tower in self.work.texts.items():
            asked, default = self.plan.networks.texts.get(name), self.plan.text
            storage = (asked and asked.storage) or default.storage
            trim = default.trim if asked is None or asked.trim is None else asked.trim
            towers.append(tower.model_copy(update={"storage": storage, "trim": trim and tower.states}))
        return towers

    def sample_bytes(self, bucket: str) -> float:
        """Bytes of one stored sample of `bucket`."""
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
        """Measured rates of a stage, by rising GPUs; or the one that the assumed utilisation gives on a node."""
        gpu, work = self.plan.gpu, self.work
        flops = work.caption if bucket is None else (work.train if stage == "train" else work.encode)[bucket]
        utilisation = gpu.train_utilisation if stage == "train" else gpu.encode_utilisation
        source = f"{utilisation:.3g} of {gpu.peak_tflops:.0f} TFLOP/s ÷ {flops / GIGA:.1f} GFLOP"
        modelled = Rate(gpu.peak_tflops * 1e12 * utilisation / flops, gpu.gpus_per_node, source, assumed=True)
        return self.rates.of(stage, bucket) or [modelled]

    def encode_seconds(self, bucket: str) -> float:
        """GPU-seconds to encode one picture of `bucket` and its caption."""
        rates = self.rates_of("encode", bucket)[0], self.rates_of("text", None)[0]
        return sum(1 / rate.images_per_second_per_gpu for rate in rates)

    def step(self, phase: Phase, rate: Rate | None = None, online: bool = False) -> Step:
        """The phase's step, with the batch sizes of `rate`'s own run where it had others."""
        data = self.plan.data
        return Step(
            (rate and rate.global_batch_size) or phase.global_batch_size,
            (rate and rate.microbatch_size) or phase.microbatch_size,
            self.work.num_parameters,
            self.plan.links.gradient_bytes,
            data.picture_bytes + data.string_bytes if online else self.sample_bytes(phase.bucket),
            self.plan.links.bucket_mb * MEGA,
            self.work.backward[phase.bucket],
        )


@dataclass(frozen=True)
class PhaseRow:
    """One phase on one number of GPUs. Times in seconds where not said otherwise."""

    bucket: str
    images_per_gpu: float
    """Per step."""
    images_per_second: float
    basis: Basis
    source: str
    predicted_images_per_second: float
    """From another number of GPUs, also where this one was measured."""
    step: StepTime
    split_speedup: float
    """Of weights split within each node (HSDP), which the trainer has not."""
    bottleneck: str
    days: float
    read_per_node: float
    """B/s into one node."""
    read_total: float
    """B/s out of the store."""
    save_every_steps: int
    best_interval: float
    """Of work between checkpoints: Daly's optimum."""
    num_checkpoints: int
    expected_days: float
    """With checkpoints and failures."""


def phase_row(inputs: Inputs, phase: Phase, gpus: int, online: bool) -> PhaseRow:
    """`phase` on `gpus`, encoding online or reading latents.

    Raises:
        RequestError: the stated bandwidths do not allow a measured rate.
    """
    rates = inputs.rates_of("train", phase.bucket)
    rate = _basis_for(rates, gpus)
    time = _predict(inputs, phase, rate, gpus, online)
    of_another = _basis_for([other for other in rates if other.gpus != gpus] or rates, gpus)
    step = inputs.step(phase, online=online)
    like_the_benchmark = rate.gpus == gpus and not online and inputs.step(phase, rate) == step
    exact = like_the_benchmark and time.bottleneck != "data rate"
    images_per_second = phase.global_batch_size / time.total
    days = days_of(phase.steps * phase.global_batch_size, images_per_second)
    read = images_per_second * step.sample_bytes
    every, best, expected = _restarts(inputs, phase, time.total, gpus)
    return PhaseRow(
        bucket=phase.bucket,
        images_per_gpu=phase.global_batch_size / gpus,
        images_per_second=images_per_second,
        basis="assumed" if rate.assumed else "measured" if exact else "predicted",
        source=rate.source,
        predicted_images_per_second=phase.global_batch_size / _predict(inputs, phase, of_another, gpus, online).total,
        step=time,
        split_speedup=time.total / _predict(inputs, phase, rate, gpus, online, is_split=True).total,
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
    """The measurement on the most GPUs up to `gpus`, or else on the fewest above; `rates` rise."""
    return next((rate for rate in reversed(rates) if rate.gpus <= gpus), rates[0])


def _predict(inputs: Inputs, phase: Phase, rate: Rate, gpus: int, online: bool, is_split: bool = False) -> StepTime:
    machine = inputs.machine
    try:
        seconds = calibrate(rate.images_per_second_per_gpu, inputs.step(phase, rate), rate.gpus, machine)
    except ValueError as error:
        raise RequestError(
            f"{phase.bucket}: {error}. One of the two is wrong: mend `links` and `gpu`, or the benchmark "
            f"({rate.source})."
        ) from None
    encode_seconds = inputs.encode_seconds(phase.bucket) if online else 0.0
    return step_time(seconds, inputs.step(phase, online=online), gpus, machine, encode_seconds, is_split=is_split)


def _restarts(inputs: Inputs, phase: Phase, step_seconds: float, gpus: int) -> tuple[int, float, float]:
    """Steps between checkpoints, the best interval in seconds, and expected time ÷ uninterrupted time."""
    saving = inputs.plan.checkpoints
    num_bytes = checkpoint_bytes(inputs.work.num_parameters, phase.ema)
    seconds = num_bytes / (inputs.plan.links.checkpoint_gbit * GIGA / BITS)
    between = saving.gpu_hours_per_failure * SECONDS_PER_HOUR / gpus
    best = best_interval(seconds, between)
    every = min(phase.steps, saving.every_steps or max(1, round(best / step_seconds)))
    expected = expected_time(1.0, every * step_seconds, seconds, saving.restart_seconds, between)
    if math.isinf(expected):
        raise RequestError(
            f"On {gpus} GPUs a failure comes every {between:.3g} s, and {phase.bucket} saves every "
            f"{every * step_seconds:.3g} s: the training would never end. Lower checkpoints.every_steps, or mend "
            f"checkpoints.gpu_hours_per_failure."
        )
    return every, best, expected
