"""Calls of each family's pipeline."""

from typing import Any

import numpy as np
import torch

from tests.families.small import TEMPLATE, TOKENS

OWN: dict[str, dict[str, Any]] = {
    "sd2": {"guidance_scale": 2.0},
    "sd15": {"guidance_scale": 2.0},
    "sdxl": {"guidance_scale": 2.0, "original_size": (64, 80), "crops_coords_top_left": (0, 8)},
    "pixart-sigma": {"guidance_scale": 2.0, "use_resolution_binning": False, "max_sequence_length": TOKENS},
    "sd3": {"guidance_scale": 2.0, "max_sequence_length": TOKENS},
    "flux1": {"guidance_scale": 3.5, "true_cfg_scale": 2.0, "negative_prompt": "", "max_sequence_length": TOKENS},
    "sana": {
        "guidance_scale": 2.0,
        "use_resolution_binning": False,
        "max_sequence_length": TOKENS,
        "complex_human_instruction": [TEMPLATE.removesuffix("{}")],
    },
    "prx": {
        "guidance_scale": 2.0,
        "use_resolution_binning": False,
        "tokenizer_max_length": TOKENS,
    },
}


def arguments(name: str, prompts: list[str], steps: int = 3) -> dict[str, Any]:
    """Return arguments with guidance, so that the pipeline encodes both the prompt and the unconditional input."""
    common: dict[str, Any] = {"prompt": prompts, "num_inference_steps": steps, "height": 64, "width": 64}
    return common | OWN[name] | {"generator": torch.Generator().manual_seed(3)}


def picture(name: str, pipeline: Any) -> np.ndarray:
    """Draw one prompt: (64, 64, 3)."""
    pipeline.set_progress_bar_config(disable=True)
    drawn: np.ndarray = pipeline(**arguments(name, ["3 round blobs"], steps=2), output_type="np").images[0]
    return drawn
