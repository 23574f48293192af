"""The report on a plan: time and cost per GPU count, storage, online encoding, inputs and notes.

Speeds come from measurements or, for stages without a measurement, from an assumed utilisation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from plan.arithmetic.costs import (
    GIGA,
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    TERA,
    checkpoint_bytes,
    sample_bytes,
)
from plan.arithmetic.counted import cached_work
from plan.arithmetic.restarts import daly_interval, expected_time
from plan.arithmetic.scaling import Machine, Step, StepTime, calibrate, step_time
from plan.arithmetic.work import Training, Work, read_training
from plan.config import Fact, Phase, Plan
from plan.measured import Rate, Rates, read_rates
from shards.base.errors import RequestError
from shards.base.table import counted
from shards.format.buckets import Bucket
from shards.format.towers import TextStorage, TextTower
from train.model.config import optimizer_class

BITS, MIB = 8, 2**20
Basis = Literal["measured", "predicted", "assumed"]
"""Origin of a throughput: `measured` on this GPU count, `predicted` from another GPU count or batch size, or
`assumed`."""
MAX_UNEXPLAINED_GAP = 0.1
"""If a measured rate is below the predicted rate by more than this fraction, the report adds a note."""
MIN_SHARDING_SPEEDUP = 1.05
"""If sharding (HSDP) would give a larger speedup than this, the report adds a note."""
MIN_IMAGES_PER_GPU = 8
"""Number of images per GPU and step below which kernels are too small to keep a GPU busy."""


@dataclass(frozen=True)
class Inputs:
    """A plan, the FLOPs counted for its networks, and the measured rates that apply to it."""

    plan: Plan
    work: Work
    rates: Rates

    @cached_property
    def training(self) -> Training:
        """The training config that the plan names."""
        return read_training(self.plan.networks)

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
    def texts(self) -> dict[str, TextTower]:
        """Text encoders with the plan's storage."""
        return stored_texts(self.plan, self.work.texts)

    def sample_bytes(self, bucket: str, texts: dict[str, TextTower] | None = None) -> float:
        """Return the size of one stored sample of `bucket` in bytes. `texts` replaces the plan's text encoders."""
        data, image = self.plan.data, self.work.image
        posterior = image.posterior if image.posterior == "deterministic" else data.posterior
        image = image.model_copy(update={"posterior": posterior, "storage": self.plan.image.storage})
        return sample_bytes(image, texts or self.texts, Bucket.parse(bucket), self.plan.text.tokens, data.string_bytes)

    def rates_of(self, stage: Literal["train", "encode", "text"], bucket: str | None) -> list[Rate]:
        """Return a stage's measured rates, sorted by GPU count, or else one rate based on the assumed utilisation."""
        gpu, work = self.plan.gpu, self.work
        if bucket is None:
            flops: float = work.caption
        else:
            flops = work.train[bucket] * self.training.recomputation if stage == "train" else work.encode[bucket]
        utilisation = gpu.train_utilisation if stage == "train" else gpu.encode_utilisation
        source = f"{utilisation:.3g} of {gpu.peak_tflops:.0f} TFLOP/s ÷ {flops / GIGA:.1f} GFLOP"
        speed = gpu.peak_tflops * 1e12 * utilisation / flops
        return self.rates.of(stage, bucket) or [Rate(speed, gpu.gpus_per_node, source, assumed=True)]

    def checkpoint_bytes(self, phase: Phase) -> int:
        """Return the size of one checkpoint of `phase` in bytes."""
        state_bytes = optimizer_class(self.plan.optimizer).state_bytes
        return checkpoint_bytes(self.work.num_parameters, phase.ema, state_bytes)

    def encode_seconds(self, bucket: str) -> float:
        """Return the GPU-seconds needed to encode one image in `bucket` and its caption."""
        rates = self.rates_of("encode", bucket)[0], self.rates_of("text", None)[0]
        return sum(1 / rate.images_per_second_per_gpu for rate in rates)

    def step(self, phase: Phase, rate: Rate | None = None, online: bool = False) -> Step:
        """Describe a step of `phase`. Batch sizes recorded with `rate` override the phase's batch sizes."""
        data = self.plan.data
        return Step(
            (rate and rate.global_batch_size) or phase.global_batch_size,
            (rate and rate.microbatch_size) or phase.microbatch_size,
            self.work.num_parameters,
            self.training.gradient_bytes,
            data.picture_bytes + data.string_bytes if online else self.sample_bytes(phase.bucket),
            self.training.ddp.bucket_mb * MIB,
            self.work.backward[phase.bucket],
            optimizer_class(self.plan.optimizer).step_bytes(),
            self.training.sharding,
            self.training.sharding_group,
        )


def stored_texts(plan: Plan, texts: Mapping[str, TextTower]) -> dict[str, TextTower]:
    """Return the text encoders with the plan's storage. Where an encoder does not set `storage`, `trim` or `width`, the
    plan's default applies."""
    towers = {}
    for name, tower in texts.items():
        override, default = plan.networks.texts.get(name), plan.text
        storage = (override and override.storage) or default.storage
        trim = default.trim if override is None or override.trim is None else override.trim
        width = min(tower.width, (override and override.width) or default.width or tower.width)
        changes = {"storage": storage, "trim": trim and tower.states, "width": width}
        towers[name] = tower.model_copy(update=changes)
    return towers


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
    """Rate predicted from a measurement on a different GPU count, even if this GPU count was measured."""
    step: StepTime
    split_speedup: float
    """Speedup from sharding weights within each node (HSDP), relative to the training config."""
    bottleneck: str
    days: float
    read_per_node: float
    """Read rate of one node, in B/s."""
    read_total: float
    """Total read rate from the store, in B/s."""
    save_every_steps: int
    num_checkpoints: int
    expected_days: float
    """Days including the time for checkpoints and failures."""


def phase_row(inputs: Inputs, phase: Phase, gpus: int, online: bool) -> PhaseRow:
    """Estimate time and cost of `phase` on `gpus` GPUs. `online`: latents are encoded during training, not read.

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
    days = phase.num_images / images_per_second / SECONDS_PER_DAY
    read = images_per_second * step.sample_bytes
    every, expected = _restarts(inputs, phase, time.total, gpus)
    return PhaseRow(
        bucket=phase.bucket,
        images_per_gpu=phase.global_batch_size / gpus,
        images_per_second=images_per_second,
        basis="assumed" if rate.assumed else "measured" if exact else "predicted",
        source=rate.source,
        predicted_images_per_second=phase.global_batch_size / _predict(inputs, phase, other_rate, gpus, online).total,
        step=time,
        split_speedup=time.total / _predict(inputs, phase, rate, gpus, online, split=True).total,
        bottleneck=time.bottleneck,
        days=days,
        read_per_node=read * min(gpus, inputs.plan.gpu.gpus_per_node) / gpus,
        read_total=read,
        save_every_steps=every,
        num_checkpoints=math.ceil(phase.steps / every),  # a phase's last step is always saved
        expected_days=days * expected,
    )


def _basis_for(rates: list[Rate], gpus: int) -> Rate:
    """Return the rate on the largest GPU count up to `gpus`, or on the smallest count if all are larger.

    `rates` must be sorted by GPU count.
    """
    return next((rate for rate in reversed(rates) if rate.gpus <= gpus), rates[0])


def _predict(inputs: Inputs, phase: Phase, rate: Rate, gpus: int, online: bool, split: bool = False) -> StepTime:
    """Return the time of a step. `split`: weights are sharded within each node, whatever the training config says."""
    step = inputs.step(phase, online=online)
    if split:
        step = replace(step, sharding="full", group=inputs.plan.gpu.gpus_per_node, gradient_bytes=4)
    seconds = _seconds_per_image(inputs, phase, rate)
    encode_seconds = inputs.encode_seconds(phase.bucket) if online else 0.0
    return step_time(seconds, step, gpus, inputs.machine, encode_seconds)


def _seconds_per_image(inputs: Inputs, phase: Phase, rate: Rate) -> float:
    """Return the time of the forward and backward pass for one image on one GPU.

    A measured rate is that of a whole step, from which the optimizer and the traffic between GPUs are subtracted. An
    assumed utilisation applies to the forward and backward pass alone.
    """
    if rate.assumed:
        return 1 / rate.images_per_second_per_gpu
    try:
        return calibrate(rate.images_per_second_per_gpu, inputs.step(phase, rate), rate.gpus, inputs.machine)
    except ValueError as error:
        raise RequestError(
            f"{phase.bucket}: {error}. Either the bandwidths in `links` and `gpu` or the benchmark ({rate.source}) "
            f"must be wrong. Check both, and correct the wrong one."
        ) from None


def _restarts(inputs: Inputs, phase: Phase, step_seconds: float, gpus: int) -> tuple[int, float]:
    """Return the steps between checkpoints, by default the optimal number, and expected ÷ uninterrupted time."""
    saving = inputs.plan.checkpoints
    seconds = inputs.checkpoint_bytes(phase) / (inputs.plan.links.checkpoint_gbit * GIGA / BITS)
    between_failures = saving.gpu_hours_per_failure * SECONDS_PER_HOUR / gpus
    best = daly_interval(seconds, between_failures)
    every = min(phase.steps, saving.every_steps or max(1, round(best / step_seconds)))
    expected = expected_time(1.0, every * step_seconds, seconds, saving.restart_seconds, between_failures)
    if math.isinf(expected):
        raise RequestError(
            f"On {counted(gpus, 'GPU')}, a failure occurs every {between_failures:.3g} s on average, but the phase "
            f"with bucket {phase.bucket} saves a checkpoint only every {every * step_seconds:.3g} s, writing it takes "
            f"{seconds:.3g} s, and a restart takes {saving.restart_seconds:.3g} s, so the training would never finish. "
            f"Check checkpoints.every_steps, links.checkpoint_gbit, checkpoints.restart_seconds and "
            f"checkpoints.gpu_hours_per_failure."
        )
    return every, expected


TEXT_SETTINGS: list[tuple[TextStorage, int | None]] = [
    ("float16", None),
    *(("float8", width) for width in (None, 512, 256, 192, 128, 64)),
]
"""Combinations of `text.storage` and `text.width` in the table of sizes."""


@dataclass(frozen=True)
class BucketReport:
    """Size and cost of one bucket's latents. Costs are in $."""

    bucket: str
    samples: int
    passes: float
    """Number of planned training passes over the samples."""
    sample_bytes: float
    bytes_by_text_setting: dict[str, float]
    """Storage and width of text → bytes per sample."""
    stored_tb: float
    price_per_month: float
    encode_cost: float
    """Cost of precomputing the bucket, including captions."""
    storage_cost: float
    """Cost of storing the bucket for `storage.months`."""
    pays_from: float | None
    """Number of passes from which precomputing costs no more than encoding online; None: it always costs more, because
    GPUs are free and storage is not."""


@dataclass(frozen=True)
class Traffic:
    """Data read during training, and the cost of reading it across regions. Costs are in $."""

    read_tb: float
    """Amount of data read during training without a cache."""
    foreign_tb: float
    """Portion of `read_tb` that is read from other regions."""
    cost: float
    """Cost of reading `foreign_tb` across regions."""
    copy_cost: float
    """Cost of copying all data in other regions to the GPUs' region once instead, excluding storage of the copy."""


def precompute_hours(inputs: Inputs) -> float:
    """Return the GPU-hours needed to encode every caption once, and every image once for each of its buckets."""
    data = inputs.plan.data
    seconds = data.pictures / inputs.rates_of("text", None)[0].images_per_second_per_gpu
    for bucket, samples in data.samples.items():
        encoded = data.pictures if inputs.plan.every_size else samples
        seconds += encoded / inputs.rates_of("encode", bucket)[0].images_per_second_per_gpu
    return seconds / SECONDS_PER_HOUR


def bucket_report(inputs: Inputs, bucket: str) -> BucketReport:
    """Compute the size and cost of a bucket's latents, and the break-even with online encoding."""
    plan = inputs.plan
    samples = plan.data.samples[bucket]
    stored = samples * inputs.sample_bytes(bucket) / TERA
    pass_cost = samples * inputs.encode_seconds(bucket) / SECONDS_PER_HOUR * plan.gpu.price_per_hour
    encoded_passes = plan.data.pictures / samples if plan.every_size else 1.0
    storage_cost = stored * plan.storage.price_per_tb_month * plan.storage.months
    pays_from = None if storage_cost else encoded_passes
    if pass_cost:
        pays_from = encoded_passes + storage_cost / pass_cost
    images = sum(phase.num_images for phase in plan.phases if phase.bucket == bucket)
    return BucketReport(
        bucket=bucket,
        samples=samples,
        passes=images / samples,
        sample_bytes=inputs.sample_bytes(bucket),
        bytes_by_text_setting=bytes_by_text_setting(inputs, bucket),
        stored_tb=stored,
        price_per_month=stored * plan.storage.price_per_tb_month,
        encode_cost=encoded_passes * pass_cost,
        storage_cost=storage_cost,
        pays_from=pays_from,
    )


def bytes_by_text_setting(inputs: Inputs, bucket: str) -> dict[str, float]:
    """Return the size of one sample of `bucket` in bytes, by storage and width of text."""
    found = {}
    for storage, width in TEXT_SETTINGS:
        towers = {}
        for name, tower in inputs.texts.items():
            full = inputs.work.texts[name].width
            towers[name] = tower.model_copy(update={"storage": storage, "width": min(width or full, full)})
        found[f"{storage}, {f'width {width}' if width else 'full width'}"] = inputs.sample_bytes(bucket, towers)
    return found


def training_traffic(inputs: Inputs) -> Traffic:
    """Compute the data read during training and the cost of the portion from other regions."""
    plan = inputs.plan
    online = plan.encoding == "online"
    read = sum(phase.num_images * inputs.step(phase, online=online).sample_bytes for phase in plan.phases)
    kept = sum(count * inputs.sample_bytes(bucket) for bucket, count in plan.data.samples.items())
    kept = plan.data.pictures * plan.data.picture_bytes if online else kept
    foreign = sum(share for region, share in plan.regions.data.items() if region != plan.regions.gpus)
    price = plan.regions.egress_per_gb / GIGA
    return Traffic(read / TERA, foreign * read / TERA, foreign * read * price, foreign * kept * price)


@dataclass(frozen=True)
class Row:
    """Estimates for one GPU count. Costs are in $ and cover only GPUs."""

    gpus: int
    phases: list[PhaseRow]
    training_days: float
    precompute_days: float
    training_hours: float
    precompute_hours: float
    cost: float
    """Cost without checkpoints and failures."""
    expected_days: float
    """Days including checkpoints and failures. Precompute time is not adjusted, because a failure repeats at most one
    tar per worker."""
    expected_cost: float
    """Cost including checkpoints and failures."""
    lost: float
    """Time added by checkpoints and failures, as a fraction of the training time."""
    online_days: float
    """Training days when encoding online."""
    online_ratio: float
    """Training time when encoding online, divided by the time on precomputed latents."""
    online_cost: float
    speedup: float | None
    """Training speedup per doubling of the GPUs, relative to the previous row."""
    bottleneck: str
    """Bottleneck that all phases share, or, if they differ, the bottleneck of each phase with its bucket."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of training and precomputing, without checkpoints and failures."""
        return self.training_hours + self.precompute_hours


@dataclass(frozen=True)
class Report:
    """A plan and all results for it, with the inputs that they depend on."""

    plan: Plan
    sharding: str
    """How the training config shards weights; empty: it does not."""
    rows: list[Row]
    buckets: list[BucketReport]
    stored_tb: float
    price_per_month: float
    checkpoint_gb: list[float]
    """Size of one checkpoint in each phase."""
    checkpoints_kept_tb: float
    traffic: Traffic
    facts: list[Fact]
    rates: dict[str, Rate]
    """Rate used for each stage, keyed by `stage bucket`."""
    notes: list[str]


def make_report(plan: Plan, work: Work | None = None) -> Report:
    """Compute the report on `plan`. Pass `work` to skip counting FLOPs, which takes several seconds.

    Raises:
        RequestError: the plan, its config files or its measurements are inconsistent.
    """
    plan.check()
    rates = read_rates(plan.measured, plan.gpu.kind)
    work = work or cached_work(plan.networks, plan.data.samples)
    inputs = Inputs(plan, work, rates)
    rows: list[Row] = []
    for gpus in possible_counts(inputs):
        rows.append(_row(inputs, gpus, rows[-1] if rows else None))
    buckets = [bucket_report(inputs, bucket) for bucket in plan.data.samples]
    sizes = [inputs.checkpoint_bytes(phase) for phase in plan.phases]
    return Report(
        plan=plan,
        sharding=describe_sharding(inputs.training),
        rows=rows,
        buckets=buckets,
        stored_tb=sum(bucket.stored_tb for bucket in buckets),
        price_per_month=sum(bucket.price_per_month for bucket in buckets),
        checkpoint_gb=[size / GIGA for size in sizes],
        checkpoints_kept_tb=sum(sizes) * plan.checkpoints.keep / TERA,
        traffic=training_traffic(inputs),
        facts=_used_facts(inputs),
        rates=_used_rates(inputs),
        notes=_notes(inputs, rows),
    )


def possible_counts(inputs: Inputs) -> list[int]:
    """Return the plan's GPU counts on which the trainer can form sharding groups.

    Raises:
        RequestError: the requested GPU count, or all of the counts, cannot be divided into sharding groups.
    """
    plan, training = inputs.plan, inputs.training
    possible = [gpus for gpus in plan.counts if training.can_group(gpus)]
    required = [plan.gpus] if plan.gpus else [] if possible else plan.counts
    if refused := [str(gpus) for gpus in required if gpus not in possible]:
        raise RequestError(
            f"{plan.networks.backbone} sets sharding_group to {training.sharding_group}, so the trainer cannot run on "
            f"{' or '.join(refused)} GPUs. Choose a multiple of {training.sharding_group}, or change sharding_group."
        )
    return possible


def describe_sharding(training: Training) -> str:
    """Describe how weights are sharded; empty: they are not."""
    if training.sharding == "none":
        return ""
    where = "across all GPUs"
    if training.sharding_group is not None:
        where = f"within groups of {training.sharding_group} GPUs"
    return f"sharding {training.sharding} {where}"


def _row(inputs: Inputs, gpus: int, previous: Row | None) -> Row:
    plan, price = inputs.plan, inputs.plan.gpu.price_per_hour
    is_online = plan.encoding == "online"
    latents, online = ([phase_row(inputs, phase, gpus, on) for phase in plan.phases] for on in (False, True))
    chosen = online if is_online else latents
    days, latent_days, online_days = (sum(phase.days for phase in phases) for phases in (chosen, latents, online))
    expected = sum(phase.expected_days for phase in chosen)
    encode_hours = 0.0 if is_online else precompute_hours(inputs)
    hours, is_same = days * 24 * gpus, len({phase.bottleneck for phase in chosen}) == 1
    return Row(
        gpus=gpus,
        phases=chosen,
        training_days=days,
        precompute_days=encode_hours / gpus / 24,
        training_hours=hours,
        precompute_hours=encode_hours,
        cost=(hours + encode_hours) * price,
        expected_days=expected + encode_hours / gpus / 24,
        expected_cost=(expected * 24 * gpus + encode_hours) * price,
        lost=expected / days - 1,
        online_days=online_days,
        online_ratio=online_days / latent_days,
        online_cost=online_days * 24 * gpus * price,
        speedup=(previous.training_days / days) ** (1 / math.log2(gpus / previous.gpus)) if previous else None,
        bottleneck=chosen[0].bottleneck if is_same else ", ".join(f"{p.bottleneck} ({p.bucket})" for p in chosen),
    )


def _used_rates(inputs: Inputs) -> dict[str, Rate]:
    rates = {f"train {phase.bucket}": inputs.rates_of("train", phase.bucket)[0] for phase in inputs.plan.phases}
    rates |= {f"encode {bucket}": inputs.rates_of("encode", bucket)[0] for bucket in inputs.plan.data.samples}
    return rates | {"encode captions": inputs.rates_of("text", None)[0]}


def _used_facts(inputs: Inputs) -> list[Fact]:
    """Return the plan's numeric inputs, except those that do not affect its results."""
    used = _used_rates(inputs).items()
    assumed = {stage.split()[0] for stage, rate in used if rate.assumed}
    unused = {
        "gpu.train_utilisation": "train" not in assumed,
        "gpu.encode_utilisation": "encode" not in assumed,
        "gpu.peak_tflops": not assumed,
        "text.tokens": not any(tower.trim for tower in inputs.texts.values()),
        "regions.egress_per_gb": set(inputs.plan.regions.data) == {inputs.plan.regions.gpus},
    }
    return [fact for fact in inputs.plan.facts() if not unused.get(fact.field)]


def _notes(inputs: Inputs, rows: list[Row]) -> list[str]:
    notes = [f"Skipped {file}; the plan is for {inputs.plan.gpu.kind}." for file in inputs.rates.skipped_files]
    dropped = [str(gpus) for gpus in sorted(inputs.plan.gpu_counts) if gpus not in inputs.plan.counts]
    if dropped:
        notes.append(f"Omitted GPU counts that do not divide the global batch sizes evenly: {', '.join(dropped)}.")
    group = inputs.training.sharding_group
    if ungrouped := [str(gpus) for gpus in inputs.plan.counts if not inputs.training.can_group(gpus)]:
        notes.append(f"Omitted GPU counts that are not a multiple of sharding_group, {group}: {', '.join(ungrouped)}.")
    for row in rows:
        for phase in row.phases:
            gap = 1 - phase.images_per_second / phase.predicted_images_per_second
            if phase.basis == "measured" and gap > MAX_UNEXPLAINED_GAP:
                notes.append(
                    f"{counted(row.gpus, 'GPU')}, {phase.bucket}: the measured rate is {gap:.0%} below the prediction "
                    f"from a different GPU count. The given bandwidths do not explain the gap, so the bottleneck is "
                    f"uncertain."
                )
    per_node = inputs.plan.gpu.gpus_per_node
    sharding_gains = [
        f"{phase.bucket} on {row.gpus} GPUs by {phase.split_speedup - 1:.0%}"
        for row in rows
        for phase in row.phases
        if phase.split_speedup > MIN_SHARDING_SPEEDUP and row.gpus % min(row.gpus, per_node) == 0
    ]
    if sharding_gains:
        within = f"`sharding: full` and `sharding_group: {per_node}`"
        notes.append(
            f"Sharding weights within each node ({within}), instead of what the training config sets, would speed up "
            f"training: {'; '.join(sharding_gains)}."
        )
    notes += _decoding_notes(inputs)
    underfilled = [row for row in rows if any(phase.images_per_gpu < MIN_IMAGES_PER_GPU for phase in row.phases)]
    if underfilled:
        notes.append(
            f"With {underfilled[0].gpus} or more GPUs, each GPU has fewer than {MIN_IMAGES_PER_GPU} images per step. "
            f"Kernels this small run below the calibrated rate, so these rows are lower bounds on days and cost."
        )
    return notes


def _decoding_notes(inputs: Inputs) -> list[str]:
    """Describe the CPU cores needed to keep a GPU's encoders busy, if the decoding rate was measured."""
    on_core, on_gpu = (inputs.rates.of(stage, None) for stage in ("decode", "decode_on_gpu"))
    if not on_core or inputs.plan.encoding == "online":
        return []
    images_per_second = inputs.plan.data.pictures / (precompute_hours(inputs) * SECONDS_PER_HOUR)
    cores = images_per_second / on_core[0].images_per_second_per_gpu
    note = (
        f"One GPU encodes {images_per_second:,.0f} images/s. Decoding them takes {cores:.1f} CPU cores "
        f"({on_core[0].source})."
    )
    if on_gpu:
        share = images_per_second / on_gpu[0].images_per_second_per_gpu
        note += f" Decoding on the GPU would take {share:.0%} of its time and produce different pixels."
    return [note]
