"""How long a training step takes on n GPUs: three resources, each of which can be the bottleneck. Pure arithmetic.

A step computes on b = global_batch_size / n images per GPU, sums the gradients over all GPUs, and reads its samples.
Reading goes on beside everything else. The gradients of the last microbatch travel during its backward pass, two
thirds of its time; what does not fit into that is exposed:

    step = max(data, compute + max(0, gradients − hidden))

With one GPU per process and whole copies of the model on each (DDP), not sharded. Small kernels that run below the
calibrated rate, stragglers and the host's own time are not in it.
"""

import math
from dataclasses import dataclass

BACKWARD_SHARE = 2 / 3
"""Of a training step's arithmetic: the backward pass is two of its three products."""
ADAMW_BYTES = 28
"""Per parameter and step, in float32: AdamW reads weight, gradient and two moments and writes all but the gradient."""


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


@dataclass(frozen=True)
class StepTime:
    """Seconds that each resource is busy in one step."""

    compute: float
    gradients: float
    hidden: float
    """Of the gradients' time: how much the last microbatch's backward pass can cover."""
    data: float

    @property
    def total(self) -> float:
        """Seconds from step to step."""
        return max(self.data, self.compute + max(0.0, self.gradients - self.hidden))

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


def step_time(
    seconds_per_image: float, step: Step, gpus: int, machine: Machine, encode_seconds: float = 0.0
) -> StepTime:
    """The times of one step on `gpus`, where one image trains one GPU for `seconds_per_image`.

    Args:
        encode_seconds: per image, before its training step: VAE and text encoder, where encoding is online.
    """
    images = step.global_batch_size / gpus
    return StepTime(
        compute=images * (seconds_per_image + encode_seconds) + _optimizer_seconds(step, machine),
        gradients=all_reduce_seconds(step.num_parameters * step.gradient_bytes, gpus, machine),
        hidden=BACKWARD_SHARE * images * seconds_per_image / _num_microbatches(step, gpus),
        data=data_seconds(step, gpus, machine),
    )


def calibrate(images_per_second_per_gpu: float, step: Step, gpus: int, machine: Machine) -> float:
    """Seconds per image for which `step_time` on `gpus` gives back the measured rate, where data does not bound it.

    Raises:
        ValueError: no such time: the stated bandwidths alone make a step slower than it was measured.
    """
    images = step.global_batch_size / gpus
    measured = images / images_per_second_per_gpu
    gradients = all_reduce_seconds(step.num_parameters * step.gradient_bytes, gpus, machine)
    rest = measured - _optimizer_seconds(step, machine)
    covered = BACKWARD_SHARE / _num_microbatches(step, gpus)
    # Gradients wholly hidden, or else the part that is not.
    busy = rest if gradients <= covered * rest else (rest - gradients) / (1 - covered)
    if busy <= 0:
        raise ValueError(
            f"a step of {step.global_batch_size} images on {gpus} GPUs was measured at {measured:.3f} s, and by the "
            f"stated bandwidths gradients take {gradients:.3f} s and the optimizer {measured - rest:.3f} s, which "
            f"leaves no time to compute"
        )
    return busy / images


def _optimizer_seconds(step: Step, machine: Machine) -> float:
    return step.num_parameters * ADAMW_BYTES / machine.memory


def _num_microbatches(step: Step, gpus: int) -> int:
    return math.ceil(step.global_batch_size / gpus / step.microbatch_size)
