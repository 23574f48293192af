"""The report on a plan: time and cost per GPU count, storage, online encoding, inputs and notes."""

from dataclasses import dataclass

from plan.arithmetic.costs import GIGA, SECONDS_PER_HOUR, TERA, checkpoint_bytes, gpu_hours, speedup_per_doubling
from plan.arithmetic.counted import cached_work
from plan.arithmetic.work import Work
from plan.config import Plan
from plan.facts import Fact
from plan.latents import BucketReport, Traffic, bucket_report, precompute_hours, training_traffic
from plan.measured import Rate, read_rates
from plan.rows import Inputs, PhaseRow, phase_row
from train.model.config import optimizer_class

MAX_UNEXPLAINED_GAP = 0.1
"""Relative shortfall of a measurement against its prediction above which the report adds a note."""
MIN_SHARDING_SPEEDUP = 1.05
"""Speedup from sharding (HSDP) above which the report adds a note."""
MIN_IMAGES_PER_GPU = 8
"""Images per GPU and step below which kernels are too small to keep a GPU busy."""


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
    """Bottleneck of all phases, or of each phase and its bucket if they differ."""


@dataclass(frozen=True)
class Report:
    """All results of a plan, with the inputs they depend on."""

    title: str
    gpu: str
    encoding: str
    highlighted: int | None
    least_speedup: float
    months: float
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
    """Compute the report of `plan`. Pass `work` to skip counting FLOPs, which takes several seconds.

    Raises:
        RequestError: the plan, its config files or its measurements are inconsistent.
    """
    plan.check()
    rates = read_rates(plan.measured, plan.gpu.kind)
    work = work or cached_work(plan.networks, plan.data.samples)
    inputs = Inputs(plan, work, rates)
    rows: list[Row] = []
    for gpus in plan.counts:
        rows.append(_row(inputs, gpus, rows[-1] if rows else None))
    buckets = [bucket_report(inputs, bucket) for bucket in plan.data.samples]
    state_bytes = optimizer_class(plan.optimizer).state_bytes
    sizes = [checkpoint_bytes(work.num_parameters, phase.ema, state_bytes) for phase in plan.phases]
    return Report(
        title=plan.title,
        gpu=plan.gpu.kind,
        encoding=plan.encoding,
        highlighted=plan.gpus,
        least_speedup=plan.least_speedup,
        months=plan.storage.months,
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


def _row(inputs: Inputs, gpus: int, previous: Row | None) -> Row:
    plan, price = inputs.plan, inputs.plan.gpu.price_per_hour
    latents, online = ([phase_row(inputs, phase, gpus, online) for phase in plan.phases] for online in (False, True))
    chosen = online if plan.encoding == "online" else latents
    days, latent_days, online_days = (sum(phase.days for phase in phases) for phases in (chosen, latents, online))
    expected = sum(phase.expected_days for phase in chosen)
    encode_hours = 0.0 if plan.encoding == "online" else precompute_hours(inputs)
    hours = gpu_hours(days, gpus)
    return Row(
        gpus=gpus,
        phases=chosen,
        training_days=days,
        precompute_days=encode_hours / gpus / 24,
        training_hours=hours,
        precompute_hours=encode_hours,
        cost=(hours + encode_hours) * price,
        expected_days=expected + encode_hours / gpus / 24,
        expected_cost=(gpu_hours(expected, gpus) + encode_hours) * price,
        lost=expected / days - 1,
        online_days=online_days,
        online_ratio=online_days / latent_days,
        online_cost=gpu_hours(online_days, gpus) * price,
        speedup=speedup_per_doubling(previous.training_days, days, previous.gpus, gpus) if previous else None,
        bottleneck=_bottleneck(chosen),
    )


def _bottleneck(phases: list[PhaseRow]) -> str:
    if len({phase.bottleneck for phase in phases}) == 1:
        return phases[0].bottleneck
    return ", ".join(f"{phase.bottleneck} ({phase.bucket})" for phase in phases)


def _used_rates(inputs: Inputs) -> dict[str, Rate]:
    rates = {f"train {phase.bucket}": inputs.rates_of("train", phase.bucket)[0] for phase in inputs.plan.phases}
    rates |= {f"encode {bucket}": inputs.rates_of("encode", bucket)[0] for bucket in inputs.plan.data.samples}
    return rates | {"encode captions": inputs.rates_of("text", None)[0]}


def _used_facts(inputs: Inputs) -> list[Fact]:
    """Return the plan's numeric inputs, except those that do not affect its results."""
    used = _used_rates(inputs).items()
    assumed = {stage.split()[0] for stage, rate in used if rate.assumed and not rate.modelled}
    unused = {
        "gpu.train_utilisation": "train" not in assumed,
        "gpu.encode_utilisation": "encode" not in assumed,
        "gpu.peak_tflops": not assumed,
        "text.tokens": not any(tower.trim for tower in inputs.texts),
        "regions.egress_per_gb": set(inputs.plan.regions.data) == {inputs.plan.regions.gpus},
    }
    return [fact for fact in inputs.plan.facts() if not unused.get(fact.field)]


def _notes(inputs: Inputs, rows: list[Row]) -> list[str]:
    notes = [f"Skipped {file}; the plan is for {inputs.plan.gpu.kind}." for file in inputs.rates.skipped_files]
    dropped = [str(gpus) for gpus in sorted(inputs.plan.gpu_counts) if gpus not in inputs.plan.counts]
    if dropped:
        notes.append(f"Omitted {', '.join(dropped)} GPUs, which do not divide the global batch sizes evenly.")
    for row in rows:
        for phase in row.phases:
            gap = 1 - phase.images_per_second / phase.predicted_images_per_second
            if phase.basis == "measured" and gap > MAX_UNEXPLAINED_GAP:
                notes.append(
                    f"{row.gpus} GPUs, {phase.bucket}: the measured rate is {gap:.0%} below the prediction from a "
                    f"different GPU count. The given bandwidths do not explain the gap, so the bottleneck is uncertain."
                )
    sharding_gains = [
        f"{phase.bucket} on {row.gpus} GPUs by {phase.split_speedup - 1:.0%}"
        for row in rows
        for phase in row.phases
        if phase.split_speedup > MIN_SHARDING_SPEEDUP
    ]
    if sharding_gains:
        notes.append(
            f"Sharding weights within each node (HSDP), which the trainer does not support, would speed up "
            f"{'; '.join(sharding_gains)}."
        )
    notes += _decoding_notes(inputs)
    underfilled = [row for row in rows if any(phase.images_per_gpu < MIN_IMAGES_PER_GPU for phase in row.phases)]
    if underfilled:
        notes.append(
            f"From {underfilled[0].gpus} GPUs, each GPU has fewer than {MIN_IMAGES_PER_GPU} images per step. Kernels "
            f"this small run below the calibrated rate, so these rows are lower bounds on days and cost."
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
