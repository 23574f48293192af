"""The whole answer of a plan: a row for each number of GPUs, the bytes, online or beforehand, the numbers behind."""

from dataclasses import dataclass

from plan.arithmetic.costs import GIGA, SECONDS_PER_HOUR, TERA, checkpoint_bytes, gpu_hours_of, speedup_per_doubling
from plan.arithmetic.counted import counted_work
from plan.arithmetic.work import Work
from plan.config import Plan
from plan.facts import Fact
from plan.latents import BucketReport, Traffic, bucket_report, precompute_hours, traffic_of
from plan.measured import Rate, read_rates
from plan.rows import Inputs, PhaseRow, phase_row

UNEXPLAINED = 0.1
"""A measurement this far below the prediction from fewer GPUs is pointed out."""
SPLITTING_PAYS = 1.05
"""A step faster by more than this is pointed out."""
FEW_IMAGES = 8
"""Per GPU and step: with fewer, the arithmetic no longer keeps a GPU busy."""


@dataclass(frozen=True)
class Row:
    """The training on one number of GPUs. Costs in $, of GPUs alone."""

    gpus: int
    phases: list[PhaseRow]
    training_days: float
    precompute_days: float
    training_hours: float
    precompute_hours: float
    cost: float
    """Uninterrupted."""
    expected_days: float
    """With checkpoints and failures; precompute repeats one shard at most and is taken as it is."""
    expected_cost: float
    lost: float
    """Share of the training time that checkpoints and failures add."""
    online_days: float
    """Of a training that encodes online."""
    online_ratio: float
    """Its time ÷ that of training on latents."""
    online_cost: float
    speedup: float | None
    """Of training, per doubling of the GPUs from the row before."""
    bottleneck: str
    """Of the phases, each by its bucket where they differ."""


@dataclass(frozen=True)
class Report:
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
    """Size of one, for each phase."""
    checkpoints_kept_tb: float
    traffic: Traffic
    facts: list[Fact]
    rates: dict[str, Rate]
    """What each stage's speed rests on, by `stage bucket`."""
    notes: list[str]


def make_report(plan: Plan, work: Work | None = None) -> Report:
    """Work `plan` out. Counting the networks' work takes seconds, and so may be handed over.

    Raises:
        RequestError: the plan's parts, files or measurements do not fit each other.
    """
    plan.check()
    rates = read_rates(plan.measured, plan.gpu.kind)
    work = work or counted_work(plan.networks, plan.data.samples)
    inputs = Inputs(plan, work, rates)
    rows: list[Row] = []
    for gpus in plan.counts:
        rows.append(_row(inputs, gpus, rows[-1] if rows else None))
    buckets = [bucket_report(inputs, bucket) for bucket in plan.data.samples]
    sizes = [checkpoint_bytes(work.num_parameters, phase.ema) for phase in plan.phases]
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
        traffic=traffic_of(inputs),
        facts=_used_facts(inputs),
        rates=_used_rates(inputs),
        notes=_notes(inputs, rows),
    )


def _row(inputs: Inputs, gpus: int, before: Row | None) -> Row:
    plan, price = inputs.plan, inputs.plan.gpu.price_per_hour
    latents, online = ([phase_row(inputs, phase, gpus, online) for phase in plan.phases] for online in (False, True))
    chosen = online if plan.encoding == "online" else latents
    days, latent_days, online_days = (sum(phase.days for phase in phases) for phases in (chosen, latents, online))
    expected = sum(phase.expected_days for phase in chosen)
    encode_hours = 0.0 if plan.encoding == "online" else precompute_hours(inputs)
    hours = gpu_hours_of(days, gpus)
    return Row(
        gpus=gpus,
        phases=chosen,
        training_days=days,
        precompute_days=encode_hours / gpus / 24,
        training_hours=hours,
        precompute_hours=encode_hours,
        cost=(hours + encode_hours) * price,
        expected_days=expected + encode_hours / gpus / 24,
        expected_cost=(gpu_hours_of(expected, gpus) + encode_hours) * price,
        lost=expected / days - 1,
        online_days=online_days,
        online_ratio=online_days / latent_days,
        online_cost=gpu_hours_of(online_days, gpus) * price,
        speedup=speedup_per_doubling(before.training_days, days, before.gpus, gpus) if before else None,
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
    """The plan's facts, without those that nothing in this plan depends on."""
    used = _used_rates(inputs).items()
    assumed = {stage.split()[0] for stage, rate in used if rate.assumed and not rate.modelled}
    idle = {
        "gpu.train_utilisation": "train" not in assumed,
        "gpu.encode_utilisation": "encode" not in assumed,
        "gpu.peak_tflops": not assumed,
        "text.tokens": not any(tower.trim for tower in inputs.texts),
        "regions.egress_per_gb": set(inputs.plan.regions.data) == {inputs.plan.regions.gpus},
    }
    return [fact for fact in inputs.plan.facts() if not idle.get(fact.field)]


def _notes(inputs: Inputs, rows: list[Row]) -> list[str]:
    notes = [f"Not used: {left}; the plan is for {inputs.plan.gpu.kind}." for left in inputs.rates.left_aside]
    left_out = [str(gpus) for gpus in sorted(inputs.plan.gpu_counts) if gpus not in inputs.plan.counts]
    if left_out:
        notes.append(f"Left out: {', '.join(left_out)} GPUs, which do not divide the global batches.")
    for row in rows:
        for phase in row.phases:
            gap = 1 - phase.images_per_second / phase.predicted_images_per_second
            if phase.basis == "measured" and gap > UNEXPLAINED:
                notes.append(
                    f"{row.gpus} GPUs, {phase.bucket}: measured {gap:.0%} below what another number of GPUs predicts; "
                    f"the stated bandwidths do not explain it, so what bounds it is uncertain."
                )
    split = [
        f"{phase.bucket} on {row.gpus} GPUs by {phase.split_speedup - 1:.0%}"
        for row in rows
        for phase in row.phases
        if phase.split_speedup > SPLITTING_PAYS
    ]
    if split:
        notes.append(
            f"Weights split within each node (HSDP), which the trainer has not, would speed up {'; '.join(split)}."
        )
    notes += _decoding(inputs)
    thin = [row for row in rows if any(phase.images_per_gpu < FEW_IMAGES for phase in row.phases)]
    if thin:
        notes.append(
            f"From {thin[0].gpus} GPUs on, a GPU has fewer than {FEW_IMAGES} images per step: kernels this small run "
            f"below the calibrated rate, so these rows are bounds from below on days and cost."
        )
    return notes


def _decoding(inputs: Inputs) -> list[str]:
    """What keeps a GPU's encoders fed, where somebody measured it."""
    on_core, on_gpu = (inputs.rates.of(stage, None) for stage in ("decode", "decode_on_gpu"))
    if not on_core or inputs.plan.encoding == "online":
        return []
    wanted = inputs.plan.data.pictures / (precompute_hours(inputs) * SECONDS_PER_HOUR)
    cores = wanted / on_core[0].images_per_second_per_gpu
    said = f"A GPU encodes {wanted:,.0f} pictures/s, which take {cores:.1f} cores to decode ({on_core[0].source})."
    if on_gpu:
        share = wanted / on_gpu[0].images_per_second_per_gpu
        said += f" Decoding them itself would take {share:.0%} of the GPU's time, and give other pixels."
    return [said]
