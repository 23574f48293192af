"""The demo's prompts, and the judgement of the images drawn for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageOps

from evaluation.parts import commit_part
from evaluation.sampling.prompts import PromptsConfig, prompts_sha256, read_prompts
from examples.shapes.adherence import MIN_SHARES, check_adherence, newest_pictures, prompt_lists, score, write_prompts
from examples.shapes.scenes import draw_scene
from shards.base.durable import sealed_json
from shards.open import open_store


def test_images_are_judged_by_their_own_prompts(tmp_path: Path) -> None:
    """Images are perfect, except that every tenth one belongs to another prompt."""
    write_prompts(tmp_path / "prompts.json")
    prompts = read_prompts(PromptsConfig(file=tmp_path / "prompts.json"))
    assert {prompt.category for prompt in prompts[:6]} == {"seen", "held_out"}
    lists = prompt_lists()
    scenes = {f"{name}-{i:02d}": prompt.scene for name, its in lists.items() for i, prompt in enumerate(its)}
    assert len(prompts) == len(scenes) == 126 and len(prompts_sha256(prompts)) == 64

    place = tmp_path / "phase" / "evaluations" / "step-00000100-auto" / "g4-s10-own"
    store = open_store(place)
    listed = [vars(prompt) for prompt in prompts]
    drawing = {"images_per_prompt": 1, "codec": "png"}
    store.create("sampling.json", sealed_json({"drawing": drawing, "part_size": 200, "prompts": listed}))

    def draw(folder: Path) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        for number, prompt in enumerate(prompts):
            wrong = number % 10 == 0
            scene = scenes[prompts[number - 1].id if wrong else prompt.id]
            ImageOps.fit(draw_scene(scene, 128, 128, rng), (64, 64)).save(folder / f"{number:07d}.png")
        return {}

    commit_part(store, "pictures", "00000", draw)
    found = newest_pictures(tmp_path / "phase")
    scores = {name: score(found[name], lists[name]) for name in lists}
    right = sum(round(s["colour"] * s["samples"]) for s in scores.values())
    assert [s["samples"] for s in scores.values()] == [78, 48] and 126 - 13 - 4 <= right <= 126 - 6


def test_the_demo_fails_if_images_do_not_follow_their_prompts(tmp_path: Path) -> None:
    found = {"phase1": {"seen": {"colour": 0.0, "shape": 0.0}}, "phase2": {"seen": MIN_SHARES}}
    (tmp_path / "adherence.json").write_text(json.dumps(found))
    check_adherence(tmp_path)
    found["phase2"]["seen"] = {"colour": 1.0, "shape": 0.79}
    (tmp_path / "adherence.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match=r"shape 79.0% instead of at least 80%\."):
        check_adherence(tmp_path)
