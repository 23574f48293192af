"""The demo's fixed prompts, each with the scene that it asks for, so that samples can be judged."""

from dataclasses import dataclass

import numpy as np

from examples.shapes.captions import write_caption
from examples.shapes.scenes import HELD_OUT, SEEN, Scene, sample_scene

PROMPT_SEED = 7


@dataclass(frozen=True)
class ScenePrompt:
    """A prompt and the scene that it asks for."""

    text: str
    scene: Scene


def seen_prompts(num_prompts: int = 78) -> list[ScenePrompt]:
    """Return prompts that cycle through all (colour, shape) pairs of the training images."""
    return _prompts(SEEN, num_prompts, stream=0)


def held_out_prompts(num_prompts: int = 48) -> list[ScenePrompt]:
    """Return prompts that cycle through the (colour, shape) pairs that no training image or caption contains."""
    return _prompts(tuple(sorted(HELD_OUT)), num_prompts, stream=1)


def _prompts(combinations: tuple[tuple[str, str], ...], num_prompts: int, stream: int) -> list[ScenePrompt]:
    rng = np.random.default_rng([PROMPT_SEED, stream])
    scenes = [sample_scene(rng, (combinations[i % len(combinations)],)) for i in range(num_prompts)]
    return [ScenePrompt(write_caption(scene, rng), scene) for scene in scenes]
