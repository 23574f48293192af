"""Performance model of a training step with three potential bottlenecks: compute, traffic between GPUs and data reads.

In a step on n GPUs, each GPU computes on global_batch_size / n images, averages the gradients with the others and
reads its samples. Reads overlap with everything else. Gradients are divided into buckets. During the backward pass of
the last microbatch, the buckets are all-reduced one after another, each as soon as it is complete. The communication
left after the backward pass is exposed:

    step = max(data, compute + exposed)

Each GPU holds the whole model (DDP), or the GPUs of a group divide its weights, gradients and optimizer state among
them (FSDP, or HSDP with several groups). For every microbatch, a group gathers the weights and averages the gradients,
which overlaps with its compute; the groups all-reduce gradients once per step. Not modelled: the first gather and the
last averaging of a group, which overlap with nothing; small kernels that run below the calibrated rate; stragglers; and
host overhead.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards.base.table import counted
from train.model.config import AdamWConfig, Sharding

BACKWARD_SHARE = 2 / 3
"""Share of a training step's FLOPs in the backward pass, which computes two of the three matrix products."""
ALL_GATHER_BYTES = 2
"""Bytes per parameter in a bfloat16 all-gather of sharded weights."""
ALL_GATHERS: dict[Sharding, int] = {"none": 0, "grad_op": 1, "full": 2}
"""Number of all-gathers of the weights per microbatch: before the forward pass and, with `full`, also before the
backward pass."""
FLOAT32_BYTES = 4
"""Bytes per parameter in the reduce-scatter of sharded gradients, once per microbatch, and in a gradient bucket."""


@dataclass(frozen=True)
class Machine:
    """Effective bandwidths of the hardware, in B/s."""

    gpus_per_node: int
    link: float
    """Bandwidth between one GPU and the other GPUs in its node."""
    network: float
    """Bandwidth between one node and other nodes."""
    memory: float
    """Memory bandwidth of one GPU."""
    data_per_node: float
    """Bandwidth at which one node reads from the store."""
    data_total: float
    """Total read bandwidth of the store."""

    def bandwidth(self, gpus: int) -> float:
        """Return the bandwidth of a collective over `gpus` GPUs."""
        return self.link if gpus <= self.gpus_per_node else min(self.link, self.network)


@dataclass(frozen=True)
class Step:
    """Work in one training step, independent of the hardware."""

    global_batch_size: int
    microbatch_size: int
    num_parameters: int
    gradient_bytes: int
    """Bytes per gradient element when gradients are all-reduced."""
    sample_bytes: float
    """Bytes read for each image."""
    bucket_bytes: float = 25e6
    """Size of a float32 gradient bucket, without sharding; torch's default is 25 MB. With sharding, the gradients of
    each block are all-reduced together."""
    backward: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """(share of the weights, share of the backward time) of each block, in the order of the backward pass."""
    optimizer_bytes: int = AdamWConfig.step_bytes()
    """Bytes per parameter that the optimizer moves through memory."""
    sharding: Sharding = "none"
    """Sharding as in the training config. With `grad_op`, each GPU of a group holds a part of the gradients and of the
    optimizer state; with `full`, also a part of the weights."""
    group: int | None = None
    """Number of GPUs per group, if sharded; None: all."""

    @property
    def num_buckets(self) -> int:
        """Number of gradient buckets, without sharding."""
        return max(1, math.ceil(self.num_parameters * FLOAT32_BYTES / self.bucket_bytes))

    def group_size(self, gpus: int) -> int:
        """Return the number of GPUs that share one copy of the model."""
        return 1 if self.sharding == "none" else min(gpus, self.group or gpus)


@dataclass(frozen=True)
class StepTime:
    """Seconds that each resource is busy in one step."""

    compute: float
    traffic: float
    """Traffic between GPUs."""
    exposed: float
    """Traffic that does not overlap with the forward and backward passes."""
    data: float

    @property
    def total(self) -> float:
        """Duration of the step in seconds."""
        return max(self.data, self.compute + self.exposed)

    @property
    def bottleneck(self) -> str:
        """Name of the resource that is busy longest, and would limit the step time even if everything overlapped."""
        busy = {"compute": self.compute, "traffic between GPUs": self.traffic, "data rate": self.data}
        return max(busy, key=lambda name: busy[name])


def all_reduce_seconds(num_bytes: float, gpus: int, machine: Machine, group: int = 1) -> float:
    """Return the seconds to all-reduce gradients across groups, in each of which every GPU holds an equal share.

    A ring all-reduce over m groups sends 2 (m − 1) / m times the bytes (nccl-tests, PERFORMANCE.md, "AllReduce").
    Across nodes, all rings of a node share its network, but no byte has to leave a node more than once.
    """
    groups = gpus / group
    sent = 2 * (groups - 1) / groups * num_bytes
    per_node = machine.gpus_per_node
    if gpus <= per_node:
        return sent / group / machine.link
    return max(sent / group / machine.link, sent * min(1.0, per_node / group) / machine.network)


def data_seconds(step: Step, gpus: int, machine: Machine) -> float:
    """Return the seconds to read a step's samples, limited by the busiest node or by the store."""
    on_one_node = step.global_batch_size / gpus * min(gpus, machine.gpus_per_node)
    return step.sample_bytes * max(on_one_node / machine.data_per_node, step.global_batch_size / machine.data_total)


def exposed_seconds(backward_seconds: float, gradient_seconds: float, step: Step) -> float:
    """Return the seconds of gradient traffic that remain after the backward pass.

    Buckets are sent in sequence, each as soon as it is ready. The last transfer therefore ends at the maximum, over all
    buckets, of the time at which a bucket is ready plus the time to send that bucket and all later ones.
    """
    if step.sharding == "none":
        ready = bucket_ready_times(step.backward, step.num_buckets)
        remaining = np.arange(step.num_buckets, 0, -1) / step.num_buckets
    else:  # each block is a bucket
        weights, seconds = np.array(step.backward, np.float64).T
        ready, remaining = np.cumsum(seconds), np.cumsum(weights[::-1])[::-1]
    last = float((backward_seconds * ready + gradient_seconds * remaining).max())
    return max(0.0, last - backward_seconds)


@functools.lru_cache(maxsize=64)
def bucket_ready_times(blocks: tuple[tuple[float, float], ...], num_buckets: int) -> NDArray[np.float64]:
    """Return the time at which each gradient bucket is complete, as a share of the backward time, (num_buckets,).

    Buckets have equal shares of the weights. Within a block, gradients are assumed to complete at a constant rate.
    """
    weights, seconds = np.array([*blocks, (0.0, 0.0)], np.float64).T  # sentinel block: rounded shares may sum to < 1
    shares = np.arange(1, num_buckets + 1) / num_buckets
    before, start = np.cumsum(weights) - weights, np.append(np.cumsum(seconds[:-1]) - seconds[:-1], 1.0)
    # tolerance, so that rounding does not push a bucket that ends exactly at a block boundary into the next block
    block = np.searchsorted(np.cumsum(weights)[:-1] * (1 + 1e-9), shares)
    within = np.divide(shares - before[block], weights[block], out=np.ones(num_buckets), where=weights[block] > 0)
    ready: NDArray[np.float64] = start[block] + seconds[block] * within
    return ready


def step_time(
    seconds_per_image: float, step: Step, gpus: int, machine: Machine, encode_seconds: float = 0.0
) -> StepTime:
    """Return the time of one step on `gpus` GPUs.

    Args:
        seconds_per_image: time of the forward and backward pass for one image on one GPU.
        encode_seconds: time of the VAE and the text encoders for one image on one GPU, if encoding online.
    """
    images = step.global_batch_size / gpus
    microbatches = math.ceil(images / step.microbatch_size)
    training, group = images * seconds_per_image, step.group_size(gpus)
    gradients = all_reduce_seconds(step.num_parameters * step.gradient_bytes, gpus, machine, group)
    num_bytes = step.num_parameters * (ALL_GATHERS[step.sharding] * ALL_GATHER_BYTES + FLOAT32_BYTES)
    within = microbatches * (group - 1) / group * num_bytes / machine.bandwidth(group)
    other_links = group <= machine.gpus_per_node < gpus  # only traffic between groups uses the network
    traffic = max(gradients, within) if other_links else gradients + within
    exposed = exposed_seconds(BACKWARD_SHARE * training / microbatches, gradients, step)
    optimizer = step.num_parameters * step.optimizer_bytes / machine.memory / group
    return StepTime(
        compute=training + images * encode_seconds + optimizer,
        traffic=traffic,
        exposed=max(exposed, traffic - training),
        data=data_seconds(step, gpus, machine),
    )


def calibrate(images_per_second_per_gpu: float, step: Step, gpus: int, machine: Machine) -> float:
    """Return the `seconds_per_image` with which `step_time` reproduces a measured rate, ignoring data reads.

    Raises:
        ValueError: at the given bandwidths, the traffic and the optimizer alone take longer than the measured step.
    """
    images = step.global_batch_size / gpus
    measured = images / images_per_second_per_gpu
    overhead = step_time(0.0, step, gpus, machine)
    if overhead.compute + overhead.exposed >= measured:
        raise ValueError(
            f"a step of {step.global_batch_size} images on {counted(gpus, 'GPU')} was measured at {measured:.3f} s, "
            f"but at the given bandwidths the traffic between GPUs takes {overhead.traffic:.3f} s and the optimizer "
            f"takes {overhead.compute:.3f} s, which leaves no time for the forward and backward passes"
        )
    low, high = 0.0, measured / images
    while low < (middle := (low + high) / 2) < high:
        time = step_time(middle, step, gpus, machine)
        low, high = (middle, high) if time.compute + time.exposed < measured else (low, middle)
    return high
