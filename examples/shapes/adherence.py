"""The fixed prompts for `evaluation`, and how many of the pictures that it drew of them show what was asked for."""

import json
from pathlib import Path

import numpy as np

from evaluation.report.pictures import first_pictures
from evaluation.report.records import evaluations
from examples.shapes.judge import judge
from examples.shapes.prompts import PROMPT_SEED, Prompt, held_out_prompts, seen_prompts

PHASES = ("phase1", "phase2")
LEAST = {"colour": 0.9, "shape": 0.8}
"""Shares of phase 2's pictures of combinations that training showed, of a world in full size."""
LARGEST = 1024
"""Of the demo's pictures, none has so large a side: they are judged as they were drawn."""


def prompt_lists() -> dict[str, list[Prompt]]:
    """The two fixed lists: combinations that training showed, and those that it never did."""
    return {"seen": seen_prompts(), "held_out": held_out_prompts()}


def write_prompts(path: Path) -> None:
    """Both lists as MJHQ's JSON, shuffled: whoever shows the first few shows some of each, and so does each group that
    an interval leaves out."""
    entries = [
        (f"{name}-{i:02d}", {"prompt": prompt.text, "category": name})
        for name, prompts in prompt_lists().items()
        for i, prompt in enumerate(prompts)
    ]
    order = np.random.default_rng(PROMPT_SEED).permutation(len(entries))
    path.write_text(json.dumps(dict(entries[i] for i in order), indent=1) + "\n")


def newest_pictures(run_dir: Path) -> dict[str, np.ndarray]:
    """List → (prompts, side, side, 3) uint8 in the list's order, of the newest checkpoint that was evaluated."""
    place = evaluations(run_dir)[-1].place
    lists = prompt_lists()
    shown = first_pictures(place, sum(map(len, lists.values())), LARGEST)
    found = {one.prompt.id: np.asarray(one.picture) for one in shown}
    return {name: np.stack([found[f"{name}-{i:02d}"] for i in range(len(its))]) for name, its in lists.items()}


def judge_phases(folder: Path) -> None:
    """Write FOLDER/adherence.json: each phase's shares, for each list."""
    adherence = {}
    for phase in PHASES:
        pictures = newest_pictures(folder / phase)
        adherence[phase] = {name: score(pictures[name], prompts) for name, prompts in prompt_lists().items()}
        print(f"{phase}: {json.dumps(adherence[phase])}", flush=True)
    (folder / "adherence.json").write_text(json.dumps(adherence, indent=2) + "\n")


def check_adherence(folder: Path) -> None:
    """Of a world in full size.

    Raises:
        SystemExit: phase 2 draws too few pictures as they were asked for.
    """
    found = json.loads((folder / "adherence.json").read_text())["phase2"]["seen"]
    short = [f"{name} {found[name]:.1%}, not {least:.0%}" for name, least in LEAST.items() if found[name] < least]
    if short:
        raise SystemExit(
            f"error: phase 2 draws too few pictures as they were asked for: {', '.join(short)}. The demo is the same "
            f"on every machine but for rounding, so something is broken. {folder}/report.html shows it."
        )


def score(pictures: np.ndarray, prompts: list[Prompt]) -> dict[str, float | int]:
    """Shares of pictures with the colour and with the shape that their prompt asks for."""
    seen = [judge(picture) for picture in pictures]
    colour = [found.colour == prompt.scene.colour for found, prompt in zip(seen, prompts, strict=True)]
    shape = [found.shape == prompt.scene.shape for found, prompt in zip(seen, prompts, strict=True)]
    return {
        "colour": round(float(np.mean(colour)), 4),
        "shape": round(float(np.mean(shape)), 4),
        "samples": len(prompts),
    }
