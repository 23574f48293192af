"""Networks that turn pictures into features, each from a local file or folder, known by its content.

A picture of any size is brought to the network's own as the extractor says: that is part of the metric's id.
"""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from evaluation.features import open_clip
from evaluation.features.open_clip import View
from evaluation.metrics.table import ExtractorName
from shards.base.config import Config
from shards.base.durable import canonical_json, sha256_file
from shards.base.errors import RequestError
from shards.format.models import FILES, OTHER_VOCABULARIES, TOKENIZER_FILES, read_model_config

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
DINOV2_VIEW = View(224, False, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
BILINEAR, CROPPED, SQUASHED = "bilinear as TensorFlow 1", "bicubic antialias, center", "bicubic antialias"
TOY_CELLS = 4
WEIGHTS_NAME = "model.safetensors"

Pixels = np.ndarray
"""(N, height, width, 3) uint8."""
Extractor = Callable[[Pixels], Tensor]
"""→ (N, D) float32."""


class ExtractorConfig(Config):
    """A network by its local path; nothing is fetched."""

    weights: Path | None = None
    """inception: torch-fidelity's file; clip: a folder of transformers or open_clip; dinov2: of transformers; null: not
    used."""
    sha256: str | None = None
    """What the weights must hash to; null: whatever is there, and it is in the metric's id."""


class ExtractorsConfig(Config):
    """The networks that metrics are taken over."""

    inception: ExtractorConfig = ExtractorConfig()
    """For fid, fid_infinity, kid, precision and recall."""
    clip: ExtractorConfig = ExtractorConfig()
    """For clip_fid, cmmd and clip_score."""
    dinov2: ExtractorConfig = ExtractorConfig()
    """For fd_dinov2."""
    toy: bool = Field(False)
    """Mean colours of 4 × 4 cells, for toy_fid and toy_kid: for demos, where no weights are at hand."""
    batch_size: int = Field(64, ge=1)
    """Pictures at a time."""


def describe_extractor(kind: ExtractorName, config: ExtractorsConfig) -> dict[str, Any]:
    """What its features depend on, by content.

    Raises:
        RequestError: no weights are given for it, they are not there, or they hash to something else.
    """
    if kind == "toy":
        return {"kind": kind, "resize": f"area {TOY_CELLS}"}
    given: ExtractorConfig = getattr(config, kind)
    option = f"extractors.{kind}.weights"
    if given.weights is None or not given.weights.exists():
        what = "are not given" if given.weights is None else f"are not at {given.weights}"
        raise RequestError(
            f"The weights of {kind} {what}. Give their local path as {option}; nothing is downloaded here "
            f"(docs/evaluation.md says where others have them from)."
        )
    of_open_clip = open_clip.weights_file(given.weights) if kind == "clip" else None
    if not (of_open_clip or (given.weights if kind == "inception" else given.weights / WEIGHTS_NAME)).is_file():
        what = (
            "torch-fidelity's file"
            if kind == "inception"
            else f"a transformers folder with config.json and {WEIGHTS_NAME}"
        )
        other = f", or open_clip's with {open_clip.CONFIG_NAME} and its weights" if kind == "clip" else ""
        raise RequestError(
            f"{given.weights} is not what {kind} is read from, {what}{other}. Give its path as {option}."
        )
    if kind != "inception" and of_open_clip is None:
        found = read_model_config(given.weights).get("model_type")
        if found != kind:  # transformers would load none of its weights, and go on with random ones
            raise RequestError(
                f"{given.weights} holds a model of type {found!r}, and not {kind}. Give its path as {option}."
            )
    sha256 = _hash(given.weights, of_open_clip)
    if given.sha256 is not None and sha256 != given.sha256:
        raise RequestError(
            f"{given.weights} hashes to {sha256}, and extractors.{kind}.sha256 asks for {given.sha256}: other "
            f"weights, config or tokenizer give other numbers. Put the right files there, or drop the sha256."
        )
    resize = {"inception": BILINEAR, "clip": CROPPED, "dinov2": SQUASHED}[kind]
    if of_open_clip and not open_clip.read_view(given.weights).crop:
        resize = SQUASHED
    return {"kind": kind, "sha256": sha256, "resize": resize}


def extractor_id(description: dict[str, Any]) -> str:
    """For folders."""
    return f"{description['kind']}-{hashlib.sha256(canonical_json(description)).hexdigest()[:12]}"


def load_extractor(kind: ExtractorName, weights: Path | None, device: str) -> Extractor:
    """The network on `device`, in float32."""
    if kind == "toy":
        return lambda pixels: adaptive_avg_pool2d(_floats(pixels, device), TOY_CELLS).flatten(1)
    assert weights is not None
    clip = _open_clip if open_clip.weights_file(weights) else _clip
    return {"inception": _inception, "clip": clip, "dinov2": _dinov2}[kind](weights, device)


def load_text_features(weights: Path, device: str) -> Callable[[list[str]], Tensor]:
    """Prompts → (N, D) float32, in the space of `clip`'s features. Prompts are cut where the tokenizer ends."""
    from transformers import AutoTokenizer, CLIPModel

    if open_clip.weights_file(weights):
        return open_clip.load_text_features(weights, device)
    model = CLIPModel.from_pretrained(weights, use_safetensors=True).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    length = model.config.text_config.max_position_embeddings

    @torch.inference_mode()
    def encode(texts: list[str]) -> Tensor:
        tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        embeds: Tensor = model.text_projection(model.text_model(**tokens.to(device)).pooler_output)
        return embeds.float()

    return encode


def _inception(weights: Path, device: str) -> Extractor:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    try:  # torch-fidelity itself would run what a pickle asks for
        torch.load(weights, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise RequestError(
            f"{weights} cannot be read as weights alone ({type(error).__name__}). Give torch-fidelity's file "
            f"weights-inception-2015-12-05-6726825d.pth."
        ) from error
    model = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(weights))
    model = model.eval().to(device)

    @torch.inference_mode()
    def extract(pixels: Pixels) -> Tensor:
        features: Tensor = model(torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device))[0]
        return features.float()

    return extract


def _clip(weights: Path, device: str) -> Extractor:
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(weights, use_safetensors=True).eval().to(device)
    view = View(model.config.vision_config.image_size, True, CLIP_MEAN, CLIP_STD)
    return _shown_to(lambda x: model.visual_projection(model.vision_model(pixel_values=x).pooler_output), view, device)


def _open_clip(weights: Path, device: str) -> Extractor:
    return _shown_to(open_clip.load_model(weights, device).encode_image, open_clip.read_view(weights), device)


def _dinov2(weights: Path, device: str) -> Extractor:
    from transformers import Dinov2Model

    model = Dinov2Model.from_pretrained(weights, use_safetensors=True).eval().to(device)
    return _shown_to(lambda x: model(pixel_values=x).pooler_output, DINOV2_VIEW, device)


def _shown_to(encode: Callable[[Tensor], Tensor], view: View, device: str) -> Extractor:
    """`encode`: (N, 3, side, side), normalised → (N, D)."""

    @torch.inference_mode()
    def extract(pixels: Pixels) -> Tensor:
        return encode(_shown(_floats(pixels, device), view)).float()

    return extract


def _floats(pixels: Pixels, device: str) -> Tensor:
    """(N, 3, height, width) in [0, 1]."""
    return torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() / 255


def _shown(pictures: Tensor, view: View) -> Tensor:
    """(N, 3, side, side): the shorter side resized and the middle cut, or both sides resized; normalised."""
    (height, width), side = pictures.shape[-2:], view.side
    scale = side / min(height, width)
    size = (max(side, round(height * scale)), max(side, round(width * scale))) if view.crop else (side, side)
    if size != (height, width):
        pictures = interpolate(pictures, size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    pictures = pictures[:, :, top : top + side, left : left + side]
    return (pictures - pictures.new_tensor(view.mean)[:, None, None]) / pictures.new_tensor(view.std)[:, None, None]


def _hash(weights: Path, of_open_clip: Path | None) -> str:
    """Of a file; of a folder's config, weights and tokenizer."""
    if weights.is_file():
        return sha256_file(weights)
    names = FILES if of_open_clip is None else (open_clip.CONFIG_NAME, of_open_clip.name, *TOKENIZER_FILES)
    vocabularies = () if (weights / "vocab.json").is_file() else OTHER_VOCABULARIES
    digest = hashlib.sha256()
    for name in (*names, *vocabularies):
        if (weights / name).is_file():
            digest.update(f"{name} {sha256_file(weights / name)}\n".encode())
    return digest.hexdigest()
