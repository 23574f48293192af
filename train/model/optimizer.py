"""The learning rate as a pure function of the step, so that nothing of it needs to be saved or prepared."""

import math

from train.config import ScheduleConfig


def learning_rate(step: int, base: float, config: ScheduleConfig, max_steps: int) -> float:
    """The learning rate of optimizer step `step` (the first is 0): linear warm-up, then constant or half a cosine."""
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return base
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    return base * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
