"""CLIP from open_clip's own files: a folder with open_clip_config.json and one file of weights.

open_clip computes; which file it reads, and how a picture is brought to the network's size, is decided here.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.base.errors import RequestError
from shards.format.models import read_model_config

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
    """The weights of a folder of open_clip's; None where it is none, or is a folder of transformers' CLIP as well."""
    found = [folder / name for name in WEIGHTS_NAMES if (folder / name).is_file()]
    if not found or not (folder / CONFIG_NAME).is_file():
        return None
    # timm leaves a config.json and a model.safetensors of its own beside open_clip's
    has_both = (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()
    return None if has_both and read_model_config(folder).get("model_type") == "clip" else found[0]


def read_view(folder: Path) -> View:
    """As the folder's `preprocess_cfg` has it, and where that is silent, as open_clip has it.

    Raises:
        RequestError: the config cannot be read, asks for a resize that is not done here, or names what is elsewhere.
    """
    from open_clip.transform import PreprocessCfg, merge_preprocess_dict

    with readable(folder / CONFIG_NAME):
        given = json.loads((folder / CONFIG_NAME).read_text())
        side = given["model_cfg"]["vision_cfg"].get("image_size", 224)
        asked = PreprocessCfg(**merge_preprocess_dict(PreprocessCfg(), given.get("preprocess_cfg", {})))
        view = View(side, CROPS.get(asked.resize_mode, False), tuple(asked.mean), tuple(asked.std))
        of_hub = given["model_cfg"]["text_cfg"].get("hf_model_name")
    if asked.interpolation != "bicubic" or asked.resize_mode not in CROPS or not isinstance(side, int):
        raise RequestError(
            f"{folder / CONFIG_NAME} asks for pictures of {side} by {asked.interpolation}, {asked.resize_mode}. Here "
            f"they become squares by bicubic, {' or '.join(CROPS)}. Give another model."
        )
    if of_hub is not None:
        raise RequestError(
            f"{folder / CONFIG_NAME} takes its text model from the hub ({of_hub}), and nothing is downloaded here. "
            f"Give another model."
        )
    return view


def load_model(folder: Path, device: str) -> Any:
    """open_clip's model, in float32.

    Raises:
        RequestError: the weights are not those of its config.
    """
    import open_clip

    file = weights_file(folder)
    assert file is not None
    with readable(file):  # by that file's name: open_clip takes whatever weights it finds in the folder, or none
        model = open_clip.create_model(f"local-dir:{folder}", load_weights=False, pretrained_text=False)
        open_clip.load_checkpoint(model, str(file))
    return model.eval().to(device)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Whatever open_clip raises over a file is the file's fault."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RequestError(
            f"{file} cannot be read by open_clip ({type(error).__name__}: {reason}). Give a folder that open_clip "
            f"wrote, or a transformers folder."
        ) from error


def load_text_features(folder: Path, device: str) -> Callable[[list[str]], Tensor]:
    """Prompts → (N, D) float32, in the space of the pictures' features. Prompts are cut where the tokenizer ends."""
    import open_clip

    model = load_model(folder, device)
    with readable(folder / CONFIG_NAME):
        tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")

    @torch.inference_mode()
    def encode(texts: list[str]) -> Tensor:
        embeds: Tensor = model.encode_text(tokenizer(texts).to(device))
        return embeds.float()

    return encode
