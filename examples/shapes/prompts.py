"""The fixed prompts that the demo samples: what was asked for is known, so that a judge can say whether it is there."""

from dataclasses import dataclass

import numpy as np

from examples.shapes.captions import write_caption
from examples.shapes.scenes import HELD_OUT, SEEN, Scene, sample_scene

PROMPT_SEED = 7


@dataclass(frozen=True)
class Prompt:
    """A caption to sample and the scene it asks for."""

    text: str
    scene: Scene


def seen_prompts(num_prompts: int = 78) -> list[Prompt]:
    """Prompts over all (colour, shape) pairs of the training pictures in turn."""
    return _prompts(SEEN, num_prompts, stream=0)


def held_out_prompts(num_prompts: int = 48) -> list[Prompt]:
    """Prompts over all (colour, shape) pairs that no training picture shows and no training caption names."""
    return _prompts(tuple(sorted(HELD_OUT)), num_prompts, stream=1)


def _prompts(combinations: tuple[tuple[str, str], ...], num_prompts: int, stream: int) -> list[Prompt]:
    rng = np.random.default_rng([PROMPT_SEED, stream])
    scenes = [sample_scene(rng, (combinations[i % len(combinations)],)) for i in range(num_prompts)]
    return [Prompt(write_caption(scene, rng), scene) for scene in scenes]
