"""Samples of the fixed prompts from an exported pipeline, and how many show what was asked for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from examples.shapes.judge import judge
from examples.shapes.prompts import Prompt, held_out_prompts, seen_prompts
from shards.base.progress import tracked

SEED = 0
BATCH_SIZE = 26
SIDES = {"phase1": 64, "phase2": 128}


def sample_phases(folder: Path) -> None:
    """Write FOLDER/samples-PHASE.npz (pictures of both prompt lists) and FOLDER/adherence.json."""
    adherence = {}
    for phase, side in SIDES.items():
        pipeline = StableDiffusionPipeline.from_pretrained(folder / phase / "export")
        pipeline.set_progress_bar_config(disable=True)
        pictures: dict[str, Any] = {name: sample(pipeline, prompts, side) for name, prompts in prompt_lists().items()}
        np.savez_compressed(folder / f"samples-{phase}.npz", **pictures)
        adherence[phase] = {name: score(pictures[name], prompts) for name, prompts in prompt_lists().items()}
        print(f"{phase}: {json.dumps(adherence[phase])}", flush=True)
    (folder / "adherence.json").write_text(json.dumps(adherence, indent=2) + "\n")


def prompt_lists() -> dict[str, list[Prompt]]:
    """The two fixed lists: combinations that training showed, and those that it never did."""
    return {"seen": seen_prompts(), "held_out": held_out_prompts()}


def sample(pipeline: StableDiffusionPipeline, prompts: list[Prompt], side: int) -> np.ndarray:
    """(N, side, side, 3) uint8, one picture per prompt, from one fixed seed."""
    generator = torch.Generator().manual_seed(SEED)
    pictures = [
        pipeline(
            [prompt.text for prompt in part],
            height=side,
            width=side,
            num_inference_steps=25,
            guidance_scale=4.0,
            generator=generator,
            output_type="np",
        ).images
        for part in tracked(batches(prompts), "sample")
    ]
    return (np.concatenate(pictures) * 255).round().astype(np.uint8)


def batches(prompts: list[Prompt]) -> list[list[Prompt]]:
    """Prompts in lists of `BATCH_SIZE`."""
    return [prompts[start : start + BATCH_SIZE] for start in range(0, len(prompts), BATCH_SIZE)]


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
