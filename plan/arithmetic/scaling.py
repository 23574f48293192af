"""A training step as a few resources, each of which can be the bottleneck. Pure arithmetic.

A step computes on b = global_batch_size / n images per GPU, sums the gradients over all GPUs, and reads its samples.
Reading goes on beside everything else. The gradients of the last microbatch travel during its backward pass, in buckets
one after the other, each once the backward pass has come past its weights; what is left then is exposed:

    step = max(data, compute + exposed)

With one GPU per process and whole copies of the model on each (DDP); or weights, gradients and optimizer split over the
GPUs of a node and equal between nodes (HSDP). Small kernels that run below the calibrated rate, stragglers and the
host's own time are not in it.
"""

import functools
import math
from dataclasses import dataclass

BACKWARD_SHARE = 2 / 3
"""Of a training step's arithmetic: the backward pass is two of its three products."""
ADAMW_BYTES = 28
"""Per parameter and step, in float32: AdamW reads weight, gradient and two moments and writes all but the gradient."""
GATHERED_BYTES = 2
"""Per parameter of split weights, which are gathered as bfloat16: once for the forward pass, and once more backward."""
SCATTERED_BYTES = 4
"""Per parameter of split gradients, which are summed as float32 after each microbatch."""


@dataclass(frozen=True)
class Machine:
    """Bandwidths in B/s, after their efficiency."""

    gpus_per_node: int
    link: float
    """Of one GPU, within its node."""
    network: float
    """Of one node, for gradients."""
    memory: float
    """Of one GPU."""
    data_per_node: float
    """From the store into one node."""
    data_total: float
    """From the store in all."""


@dataclass(frozen=True)
class Step:
    """What a step does, whatever the GPUs."""

    global_batch_size: int
    microbatch_size: int
    num_parameters: int
    gradient_bytes: int
    """Per parameter, as the all-reduce sends them."""
    sample_bytes: float
    """Read per image."""
    bucket_bytes: float = 25e6
    """Of gradients that travel together."""
    backward: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """Shares of the weights and of the backward pass's time, block by block, as the backward pass comes past them."""

    @property
    def num_buckets(self) -> int:
        """That the gradients travel in."""
        return max(1, math.ceil(self.num_parameters * self.gradient_bytes / self.bucket_bytes))


@dataclass(frozen=True)
class StepTime:
    """Seconds that each resource is busy in one step."""

    compute: float
    gradients: float
    exposed: float
    """Of the traffic's time: what is left when the backward pass ends."""
    data: float

    @property
    def total(self) -> float:
        """Seconds from step to step."""
        return max(self.data, self.compute + self.exposed)

    @property
    def bottleneck(self) -> str:
        """The resource that is busy longest: with perfect overlap, the step would take as long as it."""
        busy = {"compute": self.compute, "gradient traffic": self.gradients, "data rate": self.data}
        return max(busy, key=lambda name: busy[name])


def all_reduce_seconds(num_bytes: float, gpus: int, machine: Machine) -> float:
    """2 (n − 1) / n × bytes ÷ bandwidth of the slowest link, for a ring over n GPUs.

    The factor is the nccl-tests' (PERFORMANCE.md, "AllReduce"). Across nodes the rings share each node's network, so
    the bandwidth is the node's, or one GPU's link where that is slower.
    """
    bandwidth = machine.link if gpus <= machine.gpus_per_node else min(machine.link, machine.network)
    return 2 * (gpus - 1) / gpus * num_bytes / bandwidth


def data_seconds(step: Step, gpus: int, machine: Machine) -> float:
    """Seconds to read a step's samples: into the fullest node, or out of the store."""
    on_one_node = step.global_batch_size / gpus * min(gpus, machine.gpus_per_node)
    return step.sample_bytes * max(on_one_node / machine.data_per_node, step.global_batch_size / machine.data_total)


def exposed_seconds(backward_seconds: float, gradient_seconds: float, step: Step) -> float:
    """What is left of the gradients' traffic when the backward pass ends: each bucket goes once it is ready, and the
    one before it has gone."""
    each, ends = gradient_seconds / step.num_buckets, 0.0
    for ready in buckets_ready(step.backward, step.num_buckets):
        ends = max(ends, backward_seconds * ready) + each
    return max(0.0, ends - backward_seconds)


@functools.cache
def buckets_ready(blocks: tuple[tuple[float, float], ...], num_buckets: int) -> tuple[float, ...]:
    """Share of the backward pass's time after which each bucket of gradients is ready. A plan asks thousands of times
    for the same few networks, while `calibrate` bisects."""
    return tuple(passed_at(blocks, number / num_buckets) for number in range(1, num_buckets + 1))


def passed_at(blocks: tuple[tuple[float, float], ...], share: float) -> float:
    """Share of the backward pass's time by which it has come past `share` of the weights; within a block evenly."""
    weights = seconds = 0.0
    for of_weights, of_time in blocks:
        if share <= weights + of_weights * (1 + 1e-9):
            return seconds + of_time * ((share - weights) / of_weights if of_weights else 1.0)
        weights, seconds = weights + of_weights, seconds + of_time
    return 1.0


def step_time(
    seconds_per_image: float,
    step: Step,
    gpus: int,
    machine: Machine,
    encode_seconds: float = 0.0,
    *,
    is_split: bool = False,
) -> StepTime:
    """The times of one step on `gpus`, where one image trains one GPU for `seconds_per_image`.

    Args:
        encode_seconds: per image, before its training step: VAE and text encoder, where encoding is online.
        is_split: weights, gradients and optimizer over the GPUs of a node (HSDP).
    """
    images = step.global_batch_size / gpus
    microbatches = math.ceil(images / step.microbatch_size)
    training, local = images * seconds_per_image, min(gpus, machine.gpus_per_node)
    gradients = all_reduce_seconds(step.num_parameters * step.gradient_bytes, gpus, machine)
    optimizer, further = step.num_parameters * ADAMW_BYTES / machine.memory, 0.0
    if is_split:
        optimizer /= local
        # within the node for each microbatch, beside its arithmetic; between nodes as without
        within = microbatches * split_seconds(step.num_parameters, local, machine)
        gradients, further = gradients if gpus > local else 0.0, max(0.0, within - training)
    exposed = exposed_seconds(BACKWARD_SHARE * training / microbatches, gradients, step)
    return StepTime(
        compute=training + images * encode_seconds + optimizer,
        gradients=gradients,
        exposed=exposed + further,
        data=data_seconds(step, gpus, machine),
    )


def split_seconds(num_parameters: int, gpus: int, machine: Machine) -> float:
    """Seconds that a microbatch's gathers of weights and sums of gradients take on the links within a node."""
    return (gpus - 1) / gpus * num_parameters * (2 * GATHERED_BYTES + SCATTERED_BYTES) / machine.link


def calibrate(images_per_second_per_gpu: float, step: Step, gpus: int, machine: Machine) -> float:
    """Seconds per image for which `step_time` on `gpus` gives back the measured rate, where data does not bound it.

    Raises:
        ValueError: no such time: the stated bandwidths alone make a step slower than it was measured.
    """
    images = step.global_batch_size / gpus
    measured = images / images_per_second_per_gpu
    at_once = step_time(0.0, step, gpus, machine)
    if at_once.compute + at_once.exposed >= measured:
        raise ValueError(
            f"a step of {step.global_batch_size} images on {gpus} GPUs was measured at {measured:.3f} s, and by the "
            f"stated bandwidths gradients take {at_once.gradients:.3f} s and the optimizer {at_once.compute:.3f} s, "
            f"which leaves no time to compute"
        )
    low, high = 0.0, measured / images
    while low < (middle := (low + high) / 2) < high:
        time = step_time(middle, step, gpus, machine)
        low, high = (middle, high) if time.compute + time.exposed < measured else (low, middle)
    return high
