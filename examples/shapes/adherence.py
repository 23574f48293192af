"""The demo's fixed prompts and their scenes, and the share of samples that show the requested colour and shape."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.report.pictures import first_pictures
from evaluation.report.runs import evaluations
from examples.shapes.captions import write_caption
from examples.shapes.judge import judge
from examples.shapes.scenes import HELD_OUT, NUM_PROMPTS, SEEN, Scene, sample_scene

PHASES = ("phase1", "phase2")
PROMPT_SEED = 7
MIN_SHARES = {"colour": 0.9, "shape": 0.8}
"""Minimum shares of correct samples for seen combinations after phase 2, in a full-size demo."""
MAX_SIDE = 1024
"""Side length in pixels, larger than any image in the demo, so that all images are judged at their original size."""


@dataclass(frozen=True)
class ScenePrompt:
    """A prompt and the scene that it asks for."""

    text: str
    scene: Scene


def prompt_lists() -> dict[str, list[ScenePrompt]]:
    """Return the two fixed lists of prompts, `seen` and `held_out`. Each cycles through its (colour, shape) pairs.

    The pairs in `seen` occur in the training data. The pairs in `held_out` occur in no training image or caption.
    """
    return draw_prompts(NUM_PROMPTS, PROMPT_SEED)


def draw_prompts(counts: dict[str, int], seed: int) -> dict[str, list[ScenePrompt]]:
    """Draw lists of prompts.

    Args:
        counts: name of each list, `seen` or `held_out` → number of its prompts.
    """
    combinations = {"seen": SEEN, "held_out": tuple(sorted(HELD_OUT))}
    return {
        name: _prompts(combinations[name], count, np.random.default_rng([seed, list(combinations).index(name)]))
        for name, count in counts.items()
    }


def _prompts(
    combinations: tuple[tuple[str, str], ...], num_prompts: int, rng: np.random.Generator
) -> list[ScenePrompt]:
    scenes = [sample_scene(rng, (combinations[i % len(combinations)],)) for i in range(num_prompts)]
    return [ScenePrompt(write_caption(scene, rng), scene) for scene in scenes]


def write_prompts(path: Path) -> None:
    """Write both lists in MJHQ's JSON format, shuffled.

    After shuffling, the first few prompts come from both lists, and so do the prompts in each group that the jackknife
    leaves out to compute intervals.
    """
    entries = [
        (f"{name}-{i:02d}", {"prompt": prompt.text, "category": name})
        for name, prompts in prompt_lists().items()
        for i, prompt in enumerate(prompts)
    ]
    order = np.random.default_rng(PROMPT_SEED).permutation(len(entries))
    path.write_text(json.dumps(dict(entries[i] for i in order), indent=1) + "\n")


def newest_pictures(run_dir: Path) -> dict[str, np.ndarray]:
    """Load the images that were drawn from the newest evaluated checkpoint.

    Returns:
        Name of each list of prompts → its images, (prompts, side, side, 3) uint8, in the order of the list.
    """
    place = evaluations(run_dir)[-1].place
    lists = prompt_lists()
    shown = first_pictures(place, sum(map(len, lists.values())), MAX_SIDE)
    by_id = {prompt.id: np.asarray(picture) for prompt, picture in shown.items()}
    return {name: np.stack([by_id[f"{name}-{i:02d}"] for i in range(len(its))]) for name, its in lists.items()}


def judge_phases(folder: Path) -> None:
    """Judge the images from both phases, and write FOLDER/adherence.json with the shares for each list of prompts."""
    adherence = {}
    for phase in PHASES:
        pictures = newest_pictures(folder / phase)
        adherence[phase] = {name: score(pictures[name], prompts) for name, prompts in prompt_lists().items()}
        for name, shares in adherence[phase].items():
            print(
                f"{phase}, {name.replace('_', '-')} combinations: colour correct in {shares['colour']:.1%}, "
                f"shape correct in {shares['shape']:.1%} of {shares['samples']} images",
                flush=True,
            )
    (folder / "adherence.json").write_text(json.dumps(adherence, indent=2) + "\n")


def check_adherence(folder: Path) -> None:
    """Check that the model of a full-size demo has learned to follow its prompts.

    Raises:
        SystemExit: too few samples from phase 2 show what their prompts ask for.
    """
    found = json.loads((folder / "adherence.json").read_text())["phase2"]["seen"]
    short = [
        f"{name} {found[name]:.1%} instead of at least {least:.0%}"
        for name, least in MIN_SHARES.items()
        if found[name] < least
    ]
    if short:
        raise SystemExit(
            f"error: too few of phase 2's images show what their prompts ask for: {', '.join(short)}. Results "
            f"vary between runs, but these limits leave room for that, so this is probably a bug. See "
            f"{folder}/report.html."
        )


def score(pictures: np.ndarray, prompts: list[ScenePrompt]) -> dict[str, float | int]:
    """Compute the shares of images that have the requested colour, the requested shape, and both."""
    seen = [judge(picture) for picture in pictures]
    colour = [found.colour == prompt.scene.colour for found, prompt in zip(seen, prompts, strict=True)]
    shape = [found.shape == prompt.scene.shape for found, prompt in zip(seen, prompts, strict=True)]
    return {
        "colour": round(float(np.mean(colour)), 4),
        "shape": round(float(np.mean(shape)), 4),
        "both": round(float(np.mean(np.logical_and(colour, shape))), 4),
        "samples": len(prompts),
    }
