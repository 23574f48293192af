"""CLIP in open_clip's format: a folder with open_clip_config.json and one weights file.

open_clip runs the model; this module decides which weights file is loaded and how images are resized.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.base.durable import read_json
from shards.base.errors import RequestError

CONFIG_NAME = "open_clip_config.json"
WEIGHTS_NAMES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""File names that open_clip's `push_to_hf_hub` writes, in order of preference."""
CROPS = {"shortest": True, "squash": False}
"""open_clip's `resize_mode` → value of `Preprocessing.crop`."""


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of images for a network with a square input: resizing and normalisation."""

    side: int
    """Side of the network's input, in pixels."""
    crop: bool
    """Whether to resize the shorter side and center-crop. If false, both sides are resized regardless of the aspect
    ratio."""
    mean: tuple[float, ...]
    std: tuple[float, ...]


def weights_file(folder: Path) -> Path | None:
    """Return the weights file of an open_clip folder.

    Returns:
        None if the folder is not in open_clip's format, or also contains a CLIP model in transformers' format.
    """
    found = [folder / name for name in WEIGHTS_NAMES if (folder / name).is_file()]
    if not found or not (folder / CONFIG_NAME).is_file():
        return None
    # config.json may be timm's config, which is written alongside open_clip's files
    has_both = (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()
    return None if has_both and read_json(folder / "config.json").get("model_type") == "clip" else found[0]


def read_preprocessing(folder: Path) -> Preprocessing:
    """Read the preprocessing from the folder's `preprocess_cfg`, with open_clip's defaults for missing fields.

    Raises:
        RequestError: the config cannot be read, asks for an unsupported resize, or needs a text model from the hub.
    """
    from open_clip.transform import PreprocessCfg, merge_preprocess_dict

    with open_clip_errors(folder / CONFIG_NAME):
        config = json.loads((folder / CONFIG_NAME).read_text())
        side = config["model_cfg"]["vision_cfg"].get("image_size", 224)
        given = PreprocessCfg(**merge_preprocess_dict(PreprocessCfg(), config.get("preprocess_cfg", {})))
        preprocessing = Preprocessing(side, CROPS.get(given.resize_mode, False), tuple(given.mean), tuple(given.std))
        hub_name = config["model_cfg"]["text_cfg"].get("hf_model_name")
    if given.interpolation != "bicubic" or given.resize_mode not in CROPS or not isinstance(side, int):
        raise RequestError(
            f"{folder / CONFIG_NAME} asks for {given.interpolation} interpolation, resize mode {given.resize_mode} and "
            f"image size {side}. Only bicubic interpolation, the resize modes {' and '.join(CROPS)}, and square images "
            f"are supported. Use a different model."
        )
    if hub_name is not None:
        raise RequestError(
            f"{folder / CONFIG_NAME} loads its text model from the hub ({hub_name}), but evaluation downloads nothing. "
            f"Use a different model."
        )
    return preprocessing


def count_features(folder: Path) -> int:
    """Return the number of components of the model's features. Raises RequestError if the config cannot be read."""
    with open_clip_errors(folder / CONFIG_NAME):
        return int(json.loads((folder / CONFIG_NAME).read_text())["model_cfg"]["embed_dim"])


def load_model(folder: Path, device: str) -> Any:
    """Load an open_clip model in float32.

    Raises:
        RequestError: the weights cannot be read or do not match the folder's config.
    """
    import open_clip

    file = weights_file(folder)
    assert file is not None
    with open_clip_errors(file):
        # without a file name, open_clip would load any weights it finds in the folder, or none
        model = open_clip.create_model(f"local-dir:{folder}", load_weights=False, pretrained_text=False)
        open_clip.load_checkpoint(model, str(file))
    return model.eval().to(device)


@contextmanager
def open_clip_errors(file: Path) -> Iterator[None]:
    """Turn any exception that open_clip raises about a file into a RequestError that names the file."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RequestError(
            f"open_clip cannot read {file} ({type(error).__name__}: {reason}). Use a folder that was written by "
            f"open_clip, or a transformers folder."
        ) from error


def load_text_features(folder: Path, device: str) -> Callable[[list[str]], Tensor]:
    """Load the text encoder, a function from prompts to (N, D) float32 features comparable with the image features.

    Prompts are truncated to the tokenizer's maximum length.
    """
    import open_clip

    model = load_model(folder, device)
    with open_clip_errors(folder / CONFIG_NAME):
        tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")

    @torch.inference_mode()
    def encode(texts: list[str]) -> Tensor:
        embeds: Tensor = model.encode_text(tokenizer(texts).to(device))
        return embeds.float()

    return encode
