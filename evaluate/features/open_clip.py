"""CLIP from open_clip's own files: a folder with open_clip_config.json and one file of weights.

open_clip computes; which file it reads, and how a picture is brought to the network's size, is decided here.
"""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from shards.base.errors import RequestError

CONFIG_NAME = "open_clip_config.json"
WEIGHTS_NAMES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""As open_clip's `push_to_hf_hub` names them."""
CROPS = {"shortest": True, "squash": False}
"""open_clip's `resize_mode` → whether the shorter side is brought to the size and the middle cut."""


@dataclass(frozen=True)
class View:
    """How pictures are shown to a network."""

    side: int
    crop: bool
    """The shorter side is resized and the middle cut; else both sides are resized."""
    mean: tuple[float, ...]
    std: tuple[float, ...]


def weights_file(folder: Path) -> Path | None:
    """The weights of a folder of open_clip's; None where it is none, or is a transformers folder as well."""
    found = [folder / name for name in WEIGHTS_NAMES if (folder / name).is_file()]
    is_one = (folder / CONFIG_NAME).is_file() and not (folder / "model.safetensors").is_file()
    return found[0] if found and is_one else None


def read_view(folder: Path) -> View:
    """As the folder's `preprocess_cfg` has it, and where that is silent, as open_clip has it.

    Raises:
        RequestError: the config cannot be read, or asks for a resize that is not done here.
    """
    from open_clip.transform import PreprocessCfg

    try:
        given = json.loads((folder / CONFIG_NAME).read_text())
        side = given["model_cfg"]["vision_cfg"]["image_size"]
        asked = PreprocessCfg(**given.get("preprocess_cfg", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{folder / CONFIG_NAME} cannot be read as open_clip's config ({type(error).__name__}: {error}). Give a "
            f"folder that open_clip wrote, or a transformers folder."
        ) from error
    if asked.interpolation != "bicubic" or asked.resize_mode not in CROPS or not isinstance(side, int):
        raise RequestError(
            f"{folder / CONFIG_NAME} asks for pictures of {side} by {asked.interpolation}, {asked.resize_mode}. Here "
            f"they become squares by bicubic, {' or '.join(CROPS)}. Give another model."
        )
    return View(side, CROPS[asked.resize_mode], tuple(asked.mean), tuple(asked.std))


def load_model(folder: Path, device: str) -> Any:
    """open_clip's model, in float32.

    Raises:
        RequestError: the weights are not those of its config.
    """
    import open_clip

    file = weights_file(folder)
    assert file is not None
    try:  # by that file's name: open_clip takes whatever weights it finds in the folder, or none
        model = open_clip.create_model(f"local-dir:{folder}", load_weights=False, pretrained_text=False)
        open_clip.load_checkpoint(model, str(file))
    except (RuntimeError, TypeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise RequestError(
            f"{file} is not what {CONFIG_NAME} beside it describes ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]}). Give a folder that open_clip wrote."
        ) from error
    return model.eval().to(device)


def load_text_features(folder: Path, device: str) -> Callable[[list[str]], Tensor]:
    """Prompts → (N, D) float32, in the space of the pictures' features. Prompts are cut where the tokenizer ends."""
    import open_clip

    model, tokenizer = load_model(folder, device), open_clip.get_tokenizer(f"local-dir:{folder}")

    @torch.inference_mode()
    def encode(texts: list[str]) -> Tensor:
        embeds: Tensor = model.encode_text(tokenizer(texts).to(device))
        return embeds.float()

    return encode
