"""Cost of encoding, storing and transferring latents, and the break-even with online encoding."""

from dataclasses import dataclass

from plan.arithmetic.costs import GIGA, SECONDS_PER_HOUR, TERA, break_even_passes, egress_bytes
from plan.config import Phase
from plan.rows import Inputs


@dataclass(frozen=True)
class BucketReport:
    """Size and cost of one bucket's latents. Costs are in $."""

    bucket: str
    samples: int
    passes: float
    """Planned training passes over the samples."""
    sample_bytes: float
    stored_tb: float
    price_per_month: float
    encode_cost: float
    """Cost of precomputing the bucket, including captions."""
    storage_cost: float
    """Cost of storing the bucket for `storage.months`."""
    pays_from: float
    """Number of passes from which precomputing costs no more than encoding online."""


@dataclass(frozen=True)
class Traffic:
    """Data read during training, and the cost of reading it across regions. Costs are in $."""

    read_tb: float
    """Amount of data read during training without a cache."""
    foreign_tb: float
    """Portion of `read_tb` that comes from other regions."""
    cost: float
    """Cost of reading `foreign_tb` across regions."""
    copy_cost: float
    """Cost of copying the foreign data to the GPUs' region once instead, excluding the storage of the copy."""


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


def training_traffic(inputs: Inputs) -> Traffic:
    """Compute the data read during training and the cost of the portion from other regions."""
    plan = inputs.plan
    online = plan.encoding == "online"
    read = sum(_num_images(phase) * inputs.step(phase, online=online).sample_bytes for phase in plan.phases)
    kept = sum(count * inputs.sample_bytes(bucket) for bucket, count in plan.data.samples.items())
    kept = plan.data.pictures * plan.data.picture_bytes if online else kept
    foreign = egress_bytes(read, plan.regions.data, plan.regions.gpus)
    copied = egress_bytes(kept, plan.regions.data, plan.regions.gpus)
    price = plan.regions.egress_per_gb / GIGA
    return Traffic(read / TERA, foreign / TERA, foreign * price, copied * price)
