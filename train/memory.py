"""Check that a run's training step fits into the memory of its GPUs."""

from dataclasses import replace
from typing import Any

from shards.base.errors import RequestError
from shards.format.encoding import EncodingRecord
from train.config import TrainConfig
from train.data.spec import DataSpec
from train.model.backbone import BackboneConfig
from train.model.ema import make_averages
from train.model.memory import GIB, StepSettings, largest_microbatch, step_memory, usable


def microbatch_size(config: TrainConfig, num_processes: int) -> int:
    """Return the microbatch size to use. A compiled step fills its last microbatch, so it uses the smallest size that
    takes no more microbatches than the configured one."""
    share = config.global_batch_size // num_processes
    size = min(config.microbatch_size, share)
    return -(-share // -(-share // size)) if config.compile else size


def step_settings(config: TrainConfig, num_processes: int) -> StepSettings:
    """Return the settings of a run on GPUs that determine its memory."""
    averages = [average.config.start_step for average in make_averages(config.ema).values()]
    return StepSettings(
        precision="bfloat16" if config.precision == "auto" else config.precision,
        microbatch_size=microbatch_size(config, num_processes),
        images=config.global_batch_size // num_processes,
        optimizer_bytes=config.optimizer.state_bytes,
        num_averages=sum(start is not None and start < config.max_steps for start in averages),
        compile=config.compile,
        gradient_checkpointing=config.gradient_checkpointing,
        low_precision_norms=config.low_precision_norms,
        sharding=config.sharding,
        num_processes=min(config.sharding_group or num_processes, num_processes),
    )


def largest_shape(shapes: set[tuple[int, int]]) -> tuple[int, int]:
    """Return the latent shape (h, w) with the most positions, which needs the most memory."""
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def check_memory(
    network: Any,
    backbone: BackboneConfig,
    data: DataSpec | EncodingRecord,
    latent_hw: tuple[int, int],
    settings: StepSettings,
    capacity: int,
) -> None:
    """Check that a step fits on a GPU with `capacity` bytes, and print a warning if it might not.

    Without compilation, a step needs more memory, and its trace takes seconds instead of a minute. So the compiled step
    is traced only if the step might not fit without compilation.

    Raises:
        RequestError: the step does not fit.
    """
    if step_memory(network, backbone, data, latent_hw, replace(settings, compile=False)).total <= usable(capacity):
        return
    memory = step_memory(network, backbone, data, latent_hw, settings)
    if memory.total <= usable(capacity):
        return
    # between two sizes, linear interpolation is an upper bound, because the peak is convex in the size
    other = replace(settings, microbatch_size=1 if settings.microbatch_size > 1 else 2)
    low = (other.microbatch_size, step_memory(network, backbone, data, latent_hw, other))
    size = largest_microbatch(low, (settings.microbatch_size, memory), capacity)
    remedies = [f"set `microbatch_size` to {size}, which does not change the losses"] if size else []
    remedies += [] if settings.gradient_checkpointing else ["set `gradient_checkpointing` to true"]
    remedies += [] if settings.sharding == "full" else ["shard the weights of several GPUs with `sharding: full`"]
    message = (
        f"A step with microbatches of {settings.microbatch_size} needs about {memory} on each GPU, which has "
        f"{capacity / GIB:.1f} GiB. To save memory, {', or '.join(remedies or ['train on more GPUs'])}."
    )
    if memory.total > capacity:
        raise RequestError(message)
    print(f"warning: {message}", flush=True)
