"""Check that a run's training step fits into the memory of its GPUs."""

from collections.abc import Callable
from dataclasses import replace

from shards.base.errors import RequestError
from train.config import TrainConfig
from train.model.ema import make_averages
from train.model.memory import GIB, RESERVED, StepMemory, StepSettings, largest_microbatch, usable

MAX_ERROR = 0.05
"""Relative error of the estimates that were compared with measurements."""


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
        num_averages=sum(start is not None and start <= config.max_steps for start in averages),
        compile=config.compile,
        gradient_checkpointing=config.gradient_checkpointing,
        low_precision_norms=config.low_precision_norms,
        sharding=config.sharding,
        num_processes=min(config.active_group or num_processes, num_processes),
    )


def largest_shape(shapes: set[tuple[int, int]]) -> tuple[int, int]:
    """Return the latent shape (h, w) with the most positions, which needs the most memory."""
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def check_memory(estimate: Callable[[StepSettings], StepMemory], settings: StepSettings, capacity: int) -> None:
    """Refuse a step that cannot fit on a GPU with `capacity` bytes, and print a warning if it might not fit.

    Args:
        estimate: `step_memory` with its arguments other than the settings.

    Raises:
        RequestError: the step cannot fit.
    """
    try:
        estimates = estimate_sizes(estimate, settings, capacity)
    except Exception as error:  # such as an operation that cannot be traced; training itself may well work
        print(f"warning: the memory of a step cannot be estimated: {type(error).__name__}: {error}", flush=True)
        return
    memory = estimates[settings.microbatch_size]
    if memory.total <= usable(capacity):
        return
    size = largest_microbatch(estimates, capacity)
    remedies = [f"lower microbatch_size to {size}, which changes the losses only by rounding"] if size else []
    if settings.gradient_checkpointing is not True:
        share = "a larger share" if settings.gradient_checkpointing else "0.5"
        remedies.append(f"set gradient_checkpointing to {share} or true")
    remedies += [] if settings.sharding == "full" else ["shard the weights across several GPUs (`sharding: full`)"]
    message = (
        f"A step with microbatches of {settings.microbatch_size} needs about {memory} on each GPU. The GPU has "
        f"{capacity / GIB:.1f} GiB, of which about {RESERVED:.0%} is needed for other purposes. To save memory, "
        f"{', or '.join(remedies or ['shard the weights across more GPUs'])}."
    )
    if (1 - MAX_ERROR) * memory.total > capacity:
        raise RequestError(message)
    print(f"warning: {message}", flush=True)


def estimate_sizes(
    estimate: Callable[[StepSettings], StepMemory], settings: StepSettings, capacity: int
) -> dict[int, StepMemory]:
    """Estimate the memory of a step with the configured microbatch size and, if that might not fit, with one image.

    Without compilation, a step usually needs more memory, and its trace takes seconds instead of a minute. So a
    compiled step is traced only if it might not fit without compilation, or if torch chooses what to recompute, which
    can save less memory than recomputing the same share of blocks.

    Returns:
        Microbatch size → memory.
    """
    quick = settings if 0 < settings.gradient_checkpointing < 1 else replace(settings, compile=False)
    size, memory = settings.microbatch_size, estimate(quick)
    if memory.total > usable(capacity) and quick != settings:
        memory = estimate(settings)
    if memory.total <= usable(capacity) or size == 1:
        return {size: memory}
    return {1: estimate(replace(settings, microbatch_size=1)), size: memory}
