"""Networks that extract features from images. Each is loaded from a local path and identified by a hash of its files.

Each extractor resizes images in its own way, so the resizing is part of a metric's id.
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
from evaluation.features.open_clip import Preprocessing
from evaluation.metrics.table import ExtractorName
from shards.base.config import Config
from shards.base.durable import canonical_json, read_json, sha256_file
from shards.base.errors import RequestError
from shards.base.store import LocalPath
from shards.format.models import FILES, OTHER_VOCABULARIES, TOKENIZER_FILES

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
DINOV2_PREPROCESSING = Preprocessing(224, False, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
BILINEAR, CROPPED, SQUASHED = "bilinear as TensorFlow 1", "bicubic antialias, center", "bicubic antialias"
"""Descriptions of the extractors' resizing methods. They are hashed into metric ids, so they must not change."""
TOY_CELLS = 4
"""Number of cells along each side of the toy extractor's grid. Its features are the cells' mean colours."""
WEIGHTS_NAME = "model.safetensors"

Pixels = np.ndarray
"""Images, (N, height, width, 3) uint8."""
Extractor = Callable[[Pixels], Tensor]
"""Function that maps images to (N, D) float32 features."""


class ExtractorConfig(Config):
    """A feature extractor, loaded from a local path. Nothing is downloaded."""

    weights: LocalPath | None = None
    """Local path of the weights. `inception` needs torch-fidelity's weights file; `clip`, a folder in transformers' or
    open_clip's format; `dinov2`, a folder in transformers' format. null: the extractor is not used."""
    sha256: str | None = None
    """Expected SHA-256 of the weights. null: any weights are accepted. Metric ids contain the hash in either case."""


class ExtractorsConfig(Config):
    """The feature extractors that metrics use."""

    inception: ExtractorConfig = ExtractorConfig()
    """Inception, for `fid`, `fid_infinity`, `kid`, `precision` and `recall`."""
    clip: ExtractorConfig = ExtractorConfig()
    """CLIP, for `clip_fid`, `cmmd` and `clip_score`."""
    dinov2: ExtractorConfig = ExtractorConfig()
    """DINOv2, for `fd_dinov2`."""
    toy: bool = Field(False)
    """Use the mean colours of 4 × 4 cells as features, for `toy_fid` and `toy_kid`. Meant for demos without weights."""
    batch_size: int = Field(64, ge=1)
    """Number of images per batch."""


def describe_extractor(kind: ExtractorName, config: ExtractorsConfig) -> dict[str, Any]:
    """Return everything that an extractor's features depend on: its kind, the hash of its weights, and its resizing.

    Raises:
        RequestError: the weights are not set, do not exist, belong to a different model, or have an unexpected hash.
    """
    if kind == "toy":
        return {"kind": kind, "resize": f"area {TOY_CELLS}"}
    given: ExtractorConfig = getattr(config, kind)
    option = f"extractors.{kind}.weights"
    if given.weights is None or not given.weights.exists():
        state = "are not set" if given.weights is None else f"do not exist at {given.weights}"
        raise RequestError(
            f"The weights of {kind} {state}. Set {option} to a local path. Nothing is downloaded automatically; "
            f"docs/evaluation.md lists where to download the weights."
        )
    open_clip_weights = open_clip.weights_file(given.weights) if kind == "clip" else None
    _check_files(kind, given.weights, open_clip_weights, option)
    sha256 = _hash(given.weights, open_clip_weights)
    if given.sha256 is not None and sha256 != given.sha256:
        raise RequestError(
            f"{given.weights} has the SHA-256 {sha256}, but extractors.{kind}.sha256 is {given.sha256}. Different "
            f"weights, configs or tokenizers give different metrics. Restore the expected files, or remove "
            f"extractors.{kind}.sha256 from the config."
        )
    resize = {"inception": BILINEAR, "clip": CROPPED, "dinov2": SQUASHED}[kind]
    if open_clip_weights and not open_clip.read_preprocessing(given.weights).crop:
        resize = SQUASHED
    return {"kind": kind, "sha256": sha256, "resize": resize}


def count_features(kind: ExtractorName, config: ExtractorsConfig) -> int:
    """Return the number of components of an extractor's features, without loading its weights."""
    if kind == "toy":
        return 3 * TOY_CELLS**2
    if kind == "inception":
        return 2048
    weights: Path = getattr(config, kind).weights
    if kind == "clip" and open_clip.weights_file(weights):
        return open_clip.count_features(weights)
    from transformers import AutoConfig

    network = AutoConfig.from_pretrained(weights)
    return int(network.projection_dim if kind == "clip" else network.hidden_size)


def _check_files(kind: ExtractorName, weights: Path, open_clip_weights: Path | None, option: str) -> None:
    """Check that `weights`, a path that exists, has a format from which the extractor `kind` can be loaded."""
    file = open_clip_weights or (weights if kind == "inception" else weights / WEIGHTS_NAME)
    if not file.is_file():
        expected = f"a transformers folder with config.json and {WEIGHTS_NAME}"
        if kind == "inception":
            expected = "torch-fidelity's weights file"
        elif kind == "clip":
            expected += f", or an open_clip folder with {open_clip.CONFIG_NAME} and its weights"
        raise RequestError(f"{weights} does not contain the weights of {kind}. Set {option} to {expected}.")
    if kind != "inception" and open_clip_weights is None:
        found = read_json(weights / "config.json").get("model_type")
        if found != kind:  # transformers would load none of the weights, and silently initialise the model at random
            raise RequestError(
                f"{weights} contains a model of type {found!r} instead of {kind!r}. Set {option} to a {kind} model."
            )


def extractor_id(description: dict[str, Any]) -> str:
    """Return a short id of an extractor, used as a folder name."""
    return f"{description['kind']}-{hashlib.sha256(canonical_json(description)).hexdigest()[:12]}"


def load_extractor(kind: ExtractorName, weights: Path | None, device: str) -> Extractor:
    """Load an extractor onto `device`, in float32."""
    if kind == "toy":
        return lambda pixels: adaptive_avg_pool2d(_to_floats(pixels, device), TOY_CELLS).flatten(1)
    assert weights is not None
    if kind == "inception":
        return _inception(weights, device)
    encode, preprocessing = _load_encoder(kind, weights, device)

    @torch.inference_mode()
    def extract(pixels: Pixels) -> Tensor:
        return encode(_preprocess(_to_floats(pixels, device), preprocessing)).float()

    return extract


def load_text_features(weights: Path, device: str) -> Callable[[list[str]], Tensor]:
    """Load CLIP's text encoder, a function from prompts to (N, D) float32 features.

    The features are comparable with the image features from the `clip` extractor. Prompts are truncated to the
    tokenizer's maximum length.
    """
    from transformers import AutoTokenizer, CLIPModel

    if open_clip.weights_file(weights):
        return open_clip.load_text_features(weights, device)
    model = CLIPModel.from_pretrained(weights, use_safetensors=True, dtype=torch.float32).eval().to(device)
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

    try:
        # torch-fidelity loads the file without weights_only, so a malicious pickle would be executed
        torch.load(weights, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise RequestError(
            f"{weights} cannot be loaded as a weights-only file ({type(error).__name__}). Use "
            f"torch-fidelity's weights-inception-2015-12-05-6726825d.pth."
        ) from error
    model = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(weights))
    model = model.eval().to(device)

    @torch.inference_mode()
    def extract(pixels: Pixels) -> Tensor:
        features: Tensor = model(torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device))[0]
        return features.float()

    return extract


def _load_encoder(kind: ExtractorName, weights: Path, device: str) -> tuple[Callable[[Tensor], Tensor], Preprocessing]:
    """Return a network that maps (N, 3, side, side) normalised images to (N, D) features, and its preprocessing."""
    from transformers import CLIPModel, Dinov2Model

    model: Any
    if kind == "dinov2":
        model = Dinov2Model.from_pretrained(weights, use_safetensors=True, dtype=torch.float32).eval().to(device)
        return lambda pictures: model(pixel_values=pictures).pooler_output, DINOV2_PREPROCESSING
    if open_clip.weights_file(weights):
        return open_clip.load_model(weights, device).encode_image, open_clip.read_preprocessing(weights)
    model = CLIPModel.from_pretrained(weights, use_safetensors=True, dtype=torch.float32).eval().to(device)
    preprocessing = Preprocessing(model.config.vision_config.image_size, True, CLIP_MEAN, CLIP_STD)
    return lambda pictures: model.visual_projection(model.vision_model(pictures).pooler_output), preprocessing


def _to_floats(pixels: Pixels, device: str) -> Tensor:
    """Convert images to (N, 3, height, width) float32 in [0, 1] on `device`."""
    return torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() / 255


def _preprocess(pictures: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Resize, center-crop and normalise: (N, 3, height, width) in [0, 1] → (N, 3, side, side)."""
    (height, width), side = pictures.shape[-2:], preprocessing.side
    size = (side, side)
    if preprocessing.crop:
        scale = side / min(height, width)
        size = (max(side, round(height * scale)), max(side, round(width * scale)))
    if size != (height, width):
        pictures = interpolate(pictures, size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    pictures = pictures[:, :, top : top + side, left : left + side]
    mean = pictures.new_tensor(preprocessing.mean)[:, None, None]
    std = pictures.new_tensor(preprocessing.std)[:, None, None]
    return (pictures - mean) / std


def _hash(weights: Path, open_clip_weights: Path | None) -> str:
    """Hash a weights file, or the config, weights and tokenizer in a folder."""
    if weights.is_file():
        return sha256_file(weights)
    names: tuple[str, ...] = FILES
    if open_clip_weights is not None:
        names = (open_clip.CONFIG_NAME, open_clip_weights.name, *TOKENIZER_FILES)
    vocabularies = () if (weights / "vocab.json").is_file() else OTHER_VOCABULARIES
    digest = hashlib.sha256()
    for name in (*names, *vocabularies):
        if (weights / name).is_file():
            digest.update(f"{name} {sha256_file(weights / name)}\n".encode())
    return digest.hexdigest()
