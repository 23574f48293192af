"""The latents as goods: what they take to make, to keep and to move, and when making them beforehand pays."""

from dataclasses import dataclass

from plan.arithmetic.costs import GIGA, SECONDS_PER_HOUR, TERA, break_even_passes, egress_bytes
from plan.config import Phase
from plan.rows import Inputs


@dataclass(frozen=True)
class BucketReport:
    """What one phase's samples are. Costs in $."""

    bucket: str
    samples: int
    passes: float
    """Over the samples, in the plan."""
    sample_bytes: float
    stored_tb: float
    price_per_month: float
    encode_cost: float
    """Encoding the bucket beforehand, captions included."""
    storage_cost: float
    """Over `storage.months`."""
    pays_from: float
    """Passes from which encoding beforehand is no dearer than online."""


@dataclass(frozen=True)
class Traffic:
    """Latents across regions. Costs in $."""

    read_tb: float
    """By the whole training, if nothing is cached."""
    foreign_tb: float
    """Of these, from other regions."""
    cost: float
    copy_cost: float
    """Copying the foreign share into the GPUs' region once instead, without its second storage."""


def precompute_hours(inputs: Inputs) -> float:
    """GPU-hours to encode every picture for its buckets and every caption once."""
    data = inputs.plan.data
    seconds = data.pictures / inputs.rates_of("text", None)[0].images_per_second_per_gpu
    for bucket, samples in data.samples.items():
        encoded = data.pictures if inputs.plan.every_size else samples
        seconds += encoded / inputs.rates_of("encode", bucket)[0].images_per_second_per_gpu
    return seconds / SECONDS_PER_HOUR


def bucket_report(inputs: Inputs, bucket: str) -> BucketReport:
    """Size and price of `bucket`, and when encoding it beforehand pays."""
    plan = inputs.plan
    samples = plan.data.samples[bucket]
    stored = samples * inputs.sample_bytes(bucket) / TERA
    pass_cost = samples * inputs.encode_seconds(bucket) / SECONDS_PER_HOUR * plan.gpu.price_per_hour
    encode_cost = pass_cost * (plan.data.pictures / samples if plan.every_size else 1)
    storage_cost = stored * plan.storage.price_per_tb_month * plan.storage.months
    images = sum(_num_images(phase) for phase in plan.phases if phase.bucket == bucket)
    return BucketReport(
        bucket=bucket,
        samples=samples,
        passes=images / samples,
        sample_bytes=inputs.sample_bytes(bucket),
        stored_tb=stored,
        price_per_month=stored * plan.storage.price_per_tb_month,
        encode_cost=encode_cost,
        storage_cost=storage_cost,
        pays_from=break_even_passes(encode_cost, storage_cost, pass_cost),
    )


def _num_images(phase: Phase) -> int:
    return phase.steps * phase.global_batch_size


def traffic_of(inputs: Inputs) -> Traffic:
    """What the whole training reads, and what comes from another region."""
    plan = inputs.plan
    online = plan.encoding == "online"
    read = sum(_num_images(phase) * inputs.step(phase, online=online).sample_bytes for phase in plan.phases)
    kept = sum(count * inputs.sample_bytes(bucket) for bucket, count in plan.data.samples.items())
    kept = plan.data.pictures * plan.data.picture_bytes if online else kept
    foreign = egress_bytes(read, plan.regions.data, plan.regions.gpus)
    copied = egress_bytes(kept, plan.regions.data, plan.regions.gpus)
    price = plan.regions.egress_per_gb / GIGA
    return Traffic(read / TERA, foreign / TERA, foreign * price, copied * price)
