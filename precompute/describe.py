"""The towers that a config asks for, as encoding.json will say of them: from their folders alone, without weights."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

import diffusers
import torch
import transformers
from pydantic import AfterValidator, Field, model_validator

from precompute.encode.networks import model_class, vision_options
from shards.base.config import Config
from shards.base.errors import RequestError
from shards.format.buckets import Bucket
from shards.format.models import hash_weights, model_folder, read_model_config
from shards.format.towers import (
    CAUSAL,
    FeatureTower,
    ImageStorage,
    ImageTower,
    Quantised,
    Slice,
    TextStorage,
    TextTower,
)

VOCABULARIES = (("vocab.json", "merges.txt"), ("tokenizer.json",), ("spiece.model",), ("tokenizer.model",))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PIXELS_PER_TOKEN = 16
MOST_OTHER_TOKENS = 32
"""Of a vision model, besides those of patches: for the class, and registers."""
PROBE_SIDE = 256
NORMALISED_BY_CONFIG = ("AutoencoderKL", "AutoencoderDC", "AutoencoderKLHunyuanImage")
"""Autoencoder classes whose diffusers pipelines normalise latents by the config fields that `_normalisation` reads, and
by nothing else. Check the pipelines' `vae.decode` calls before adding a class."""


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(f"a tower's name is made of a-z, 0-9 and _, as columns are named after it, not {name!r}")
    return name


TowerName = Annotated[str, AfterValidator(_check_name)]


class TextConfig(Config):
    """How text latents are stored."""

    storage: TextStorage = "float8"
    """`float16` is exact; `float8` halves the bytes at 2.6 % relative error."""
    trim: bool = False
    """Store the real tokens alone; the U-Net then gets a cross-attention mask."""


class ImageConfig(Config):
    """How image latents are stored."""

    storage: ImageStorage = "int8"
    """`float16` is exact; `int8` halves the bytes, at an error of at most 0.4 % of a channel's largest number."""


class TextTowerConfig(Config):
    """One frozen text model, where there are several or one is not used as Stable Diffusion uses its own."""

    model: str
    """Folder, or hub name, of a transformers text model."""
    tokenizer: str
    """Folder, or hub name, of its tokenizer."""
    class_name: str | None = None
    """Of the transformers model, or of one in diffusers.pipelines, as MODULE.CLASS; null: the first of `architectures`
    in its config.json."""
    template: str = "{}"
    """What the tower is given, with the caption in place of `{}`."""
    lower: bool = False
    """Put captions into small letters first, as some pipelines do with prompts."""
    empty: str | None = None
    """What the tower is given for a caption that is dropped, in place of the template without a caption."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that it is given, padding included; null: as many as the model has positions (CLIP's 77)."""
    beyond_template: bool = False
    """`max_tokens` come on top of the template's own, special tokens included."""
    masked: bool = False
    """Hide padding from the tower; a model in training is then not shown it either."""
    layer: Literal["last"] | int = "last"
    """Hidden states to store: the last, or an index into `hidden_states`, such as -2."""
    states: bool = True
    """Store hidden states."""
    pooled: bool = False
    """Store the pooled output, one vector for a whole caption."""
    keep: list[Slice] = Field([(None, None)], min_length=1)
    """Which of the tower's tokens to store, as slices: [[0, 1], [-299, null]] is the first and the last 299."""
    storage: TextStorage | None = None
    """In place of `text.storage`."""
    trim: bool | None = None
    """In place of `text.trim`."""
    weights: Literal["as_stored"] | Quantised = "as_stored"
    """`int8` or `float8`: the weights of its linear layers take a byte each on the device, by torchao. The root then
    holds what such a tower makes of captions, under an encoding id of its own."""
    batch_size: int | None = Field(None, ge=1)
    """Captions that it encodes together, in place of `workers.batch_size`."""

    @model_validator(mode="after")
    def _check(self) -> "TextTowerConfig":
        if not (self.states or self.pooled):
            raise ValueError("a text tower with neither `states` nor `pooled` would store nothing")
        if "{}" not in self.template:
            raise ValueError(f"the template {self.template!r} has no {{}}, where the caption would go")
        return self


class FeatureTowerConfig(Config):
    """One frozen vision model whose features of each picture are stored, for a model in training to be aligned with."""

    model: str
    """Folder, or hub name, of a transformers vision model that makes a token of each patch: DINOv2 and 3, ViT, I-JEPA;
    by `class_name` the CLIPVisionModel of a CLIP, or SigLIP's."""
    class_name: str | None = None
    """Of the transformers model; null: the first of `architectures` in its config.json."""
    resize: float | None = Field(None, gt=0)
    """Side of the picture that it is given / side of the bucket; null: so that a token stands for 16 × 16 pixels."""
    storage: TextStorage = "float16"
    """As `text.storage`."""
    batch_size: int | None = Field(None, ge=1)
    """Pictures that it encodes together, in place of `workers.batch_size`."""


def describe_image(name: str, posterior: Literal["moments", "mean"] | None, **how: Any) -> ImageTower:
    """The autoencoder `name`, a folder or on the hub.

    Args:
        posterior: what is stored of it; None: moments, or the latents of an autoencoder that has no posterior.
        how: crop, resampling, decoder, resampler, color, storage.

    Raises:
        RequestError: it is missing, or no autoencoder of pictures; its normalisation is unknown; or it has no
            posterior, which was asked for.
    """
    folder = model_folder(name)
    config = read_model_config(folder)
    class_name = str(config.get("_class_name"))
    known = f"{', '.join(NORMALISED_BY_CONFIG[:-1])} or {NORMALISED_BY_CONFIG[-1]}"
    if class_name not in NORMALISED_BY_CONFIG:
        what = f"names the class {class_name}" if "_class_name" in config else "has no `_class_name`"
        raise RequestError(
            f"vae: {folder}/config.json {what}, and this program does not know how a diffusion model's "
            f"pipeline scales and shifts its latents. Training on wrongly normalised latents would not fail, only give "
            f"bad pictures. Give the folder of an {known}."
        )
    try:
        with torch.device("meta"):
            vae: Any = getattr(diffusers, class_name).from_config(config)
            encoded = vae.encode(torch.empty(1, 3, PROBE_SIDE, PROBE_SIDE))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"{folder} is no autoencoder of pictures that this diffusers can build: {class_name}, "
            f"{type(error).__name__}: {error}. Give the folder of an {known}."
        ) from error
    has_posterior = hasattr(encoded, "latent_dist")
    if not has_posterior and posterior is not None:
        raise RequestError(f"{class_name} has no posterior: leave `posterior` out, its latents are deterministic.")
    mode = encoded.latent_dist.mode() if has_posterior else encoded.latent
    channels, side = int(mode.shape[1]), int(mode.shape[-1])
    return ImageTower(
        class_name=class_name,
        weights=hash_weights(name, folder),
        posterior=(posterior or "moments") if has_posterior else "deterministic",
        channels=channels,
        downsampling=PROBE_SIDE // side,
        **_normalisation(vae.config, channels, f"vae: {folder}/config.json"),
        **how,
    )


def _normalisation(config: Mapping[str, Any], channels: int, where: str) -> dict[str, tuple[float, ...]]:
    """Read the per-channel scale and shift that diffusers' pipelines take from a VAE's config.

    Args:
        config: of the built model, so that a field missing from its file has the class's own default.
        where: the file it came from, for errors.

    Raises:
        RequestError: the config states no scale, half of a per-channel normalisation, or two kinds of shift.
    """
    scale, shift = config.get("scaling_factor"), config.get("shift_factor")
    mean, std = config.get("latents_mean"), config.get("latents_std")
    remedy = "Take config.json from the model's publisher."
    if not _is_number(scale) or scale <= 0:
        raise RequestError(
            f"{where} has scaling_factor {scale}, so the scale of the latents is unknown: it must be a number above 0. "
            f"{remedy}"
        )
    if mean is None and std is None:
        if shift is not None and not _is_number(shift):
            raise RequestError(f"{where} has shift_factor {shift}, which is not a number. {remedy}")
        return {"scale": (float(scale),) * channels, "shift": (float(shift or 0),) * channels}
    if mean is None or std is None:
        here, missing = ("latents_std", "latents_mean") if mean is None else ("latents_mean", "latents_std")
        raise RequestError(f"{where} has {here} but no {missing}; pipelines need both to normalise latents. {remedy}")
    if shift:
        raise RequestError(
            f"{where} has both shift_factor and latents_mean, and no pipeline of diffusers applies both. {remedy}"
        )
    if len(mean) != channels or len(std) != channels or not all(map(_is_number, [*mean, *std])) or min(std) <= 0:
        raise RequestError(
            f"{where}: latents_mean and latents_std must have {channels} numbers each, one per channel, those of "
            f"latents_std above 0. {remedy}"
        )
    # StableDiffusionXLImg2ImgPipeline.prepare_latents: (latents - mean) · scaling_factor / std
    return {"scale": tuple(float(scale) / float(value) for value in std), "shift": tuple(map(float, mean))}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def describe_text(name: str, asked: TextTowerConfig, default: TextConfig) -> TextTower:
    """A text tower and its tokenizer.

    Raises:
        RequestError: one is missing, of another kind, not the other's, or cannot be stored as asked.
    """
    folder, tokenizer = model_folder(asked.model), model_folder(asked.tokenizer)
    config = read_model_config(folder)
    class_name = _transformers_class(folder, config, asked.class_name)
    described: Any = transformers.AutoConfig.from_pretrained(folder)
    architecture = getattr(described, "encoder", None) or described.get_text_config()
    longest = getattr(architecture, "max_position_embeddings", None)
    is_clip = architecture.model_type == "clip_text_model"
    max_tokens = asked.max_tokens or (longest if is_clip else None)
    if max_tokens is None:
        raise RequestError(f"texts.{name}.max_tokens: {class_name} takes captions of any length; say how many tokens.")
    if longest is not None and max_tokens > longest:
        raise RequestError(f"texts.{name}.max_tokens: {class_name} in {folder} takes {longest}, not {max_tokens}.")
    _try_text(name, folder, class_name, architecture, asked)
    quantised = None if asked.weights == "as_stored" else asked.weights
    if quantised and find_spec("torchao") is None:
        raise RequestError(
            f"texts.{name}.weights: {quantised} weights are made by torchao, which is not installed. Install it here "
            f"and on the workers (pip install 'latentmill[quantised]'), or leave `weights` out: the tower is then used "
            f"as it is stored, and workers.towers: one_by_one saves memory without rounding."
        )
    loaded = _tokenizer(name, tokenizer, longest if is_clip else None, getattr(architecture, "vocab_size", None))
    if asked.beyond_template:
        max_tokens += len(loaded(asked.template.replace("{}", "")).input_ids)
    trim = default.trim if asked.trim is None else asked.trim
    if trim and asked.states and not asked.masked and not CAUSAL.fullmatch(class_name):
        raise RequestError(
            f"texts.{name}.trim: {class_name} sees the padding behind a caption, and without `masked` every token's "
            f"state depends on it; trimmed ones would not be what the pipeline computes. Set trim to false, or masked "
            f"to true where the model family hides padding."
        )
    pooled = 0
    if asked.pooled:
        if not is_clip:
            raise RequestError(f"texts.{name}.pooled: {class_name} has no pooled output; CLIP's text models have.")
        projected = class_name.endswith("WithProjection")
        pooled = int(architecture.projection_dim if projected else architecture.hidden_size)
    return TextTower(
        class_name=class_name,
        weights=hash_weights(asked.model, folder),
        tokenizer=hash_weights(asked.tokenizer, tokenizer),
        template=asked.template,
        lower=asked.lower,
        empty=asked.empty,
        max_tokens=max_tokens,
        masked=asked.masked,
        layer=asked.layer,
        states=asked.states,
        keep=tuple(asked.keep),
        length=_num_kept(name, asked.keep, max_tokens),
        width=int(architecture.hidden_size),
        pooled=pooled,
        storage=asked.storage or default.storage,
        trim=trim and asked.states,
        quantised=quantised,
    )


def _try_text(name: str, folder: Path, class_name: str, architecture: Any, asked: TextTowerConfig) -> None:
    """Run the model without weights: what it makes of tokens must have what is to be stored.

    Raises:
        RequestError: it makes nothing of a caption alone, or has no such states.
    """
    kind: Any = model_class(class_name)
    try:
        with torch.device("meta"):
            outputs = kind(architecture)(torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True)
        num_layers = len(outputs.hidden_states)
        if asked.layer != "last":
            outputs.hidden_states[asked.layer]
        elif asked.states:
            outputs.last_hidden_state  # noqa: B018
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if "meta tensors" in str(error):
            return  # it looks at numbers, of which there are none: its first caption will tell
        if isinstance(error, IndexError):
            raise RequestError(
                f"texts.{name}.layer: {class_name} in {folder} has hidden states {-num_layers} to {num_layers - 1}, "
                f"not {asked.layer}."
            ) from error
        raise RequestError(
            f"texts.{name}: {class_name} in {folder} has no hidden states of a caption alone ({error}). Give the "
            f"`class_name` of an encoder, such as T5EncoderModel or Gemma2Model."
        ) from error


def _num_kept(name: str, keep: list[Slice], max_tokens: int) -> int:
    """Tokens that the slices keep of `max_tokens`; real ones must come before padding in what they keep."""
    places = [place for bounds in keep for place in range(max_tokens)[slice(*bounds)]]
    if not places or sorted(set(places)) != places:
        raise RequestError(f"texts.{name}.keep: {keep} of {max_tokens} tokens is none, or one twice, or out of order.")
    return len(places)


def _transformers_class(folder: Path, config: dict[str, Any], asked: str | None) -> str:
    class_name = asked or str((config.get("architectures") or ["-"])[0])
    try:
        model_class(class_name)
    except (AttributeError, ImportError):
        raise RequestError(
            f"{folder}/config.json is of a {class_name!r}, which this transformers ({transformers.__version__}) does "
            f"not have. Give `class_name`, or another folder; code that comes with a model is not run."
        ) from None
    return class_name


def _tokenizer(name: str, folder: Path, length: int | None, vocabulary: int | None) -> Any:
    """The tokenizer, which must go with a text model.

    Args:
        length: of the model's positions, where a tokenizer that cuts elsewhere is not its own.
        vocabulary: how many tokens the model knows, where it says so.

    Raises:
        RequestError: it cannot be loaded, is of another model, or has no token to fill captions with.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        raise RequestError(f"{folder} is not a tokenizer folder: it has no tokenizer_config.json.")
    if not any(all((folder / file).is_file() for file in files) for files in VOCABULARIES):
        known = ", or ".join(" and ".join(files) for files in VOCABULARIES)
        raise RequestError(f"{folder} is not a tokenizer folder: it has no vocabulary, {known}.")
    not_a_pair = "They are not a pair: give the tokenizer that came with the text encoder."
    tokenizer_length = json.loads(path.read_text()).get("model_max_length", length)
    if length is not None and tokenizer_length != length:
        raise RequestError(
            f"The tokenizer in {folder} cuts captions at {tokenizer_length} tokens, but the text encoder takes "
            f"{length}. {not_a_pair}"
        )
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of whatever its kind of tokenizer makes of such files
        raise RequestError(
            f"texts.{name}.tokenizer: transformers cannot load {folder}: {error}. Give the whole folder that came with "
            f"the text encoder."
        ) from error
    if tokenizer.pad_token_id is None:
        raise RequestError(
            f"texts.{name}.tokenizer: {folder} names no pad_token, with which captions are filled up to `max_tokens`. "
            f"Put the one that the model family pads with into its tokenizer_config.json; where it was trained without "
            f"padding, its end token will do, with `masked: true`."
        )
    # without tokens that were added to a vocabulary, as Gemma 3's of pictures, of which text models may know nothing
    tokens = max(tokenizer.vocab_size, tokenizer.pad_token_id + 1)
    if vocabulary is not None and tokens > vocabulary:
        raise RequestError(
            f"The tokenizer in {folder} has {tokens} tokens, and the text encoder knows {vocabulary}. {not_a_pair}"
        )
    return tokenizer


def describe_features(name: str, asked: FeatureTowerConfig, buckets: Sequence[Bucket]) -> FeatureTower:
    """A feature tower, for pictures of these buckets.

    Raises:
        RequestError: it is missing, or no vision model that makes a token of each patch; or a bucket does not fit it.
    """
    folder = model_folder(asked.model)
    config = read_model_config(folder)
    class_name = _transformers_class(folder, config, asked.class_name)
    architecture: Any = transformers.AutoConfig.from_pretrained(folder)
    architecture = getattr(architecture, "vision_config", architecture)
    patch, width = getattr(architecture, "patch_size", None), getattr(architecture, "hidden_size", None)
    if not isinstance(patch, int) or not isinstance(width, int):
        raise RequestError(f"features.{name}: {folder} is no vision model of patches ({class_name}), such as DINOv2.")
    mean, std = IMAGENET
    if (folder / "preprocessor_config.json").is_file():
        given = json.loads((folder / "preprocessor_config.json").read_text())
        mean, std = given.get("image_mean", mean), given.get("image_std", std)
    tower = FeatureTower(
        class_name=class_name,
        weights=hash_weights(asked.model, folder),
        resize=asked.resize or patch / PIXELS_PER_TOKEN,
        mean=tuple(mean),
        std=tuple(std),
        patch=patch,
        width=width,
        storage=asked.storage,
    )
    try:
        grids = [tower.grid(bucket) for bucket in buckets]
    except ValueError as error:
        raise RequestError(
            f"features.{name}: {error}. Choose sides, or aspect.step, in steps of {patch / tower.resize:g}; or another "
            f"features.{name}.resize."
        ) from None
    _try_features(name, folder, tower, architecture, grids[0])
    return tower


def _try_features(name: str, folder: Path, tower: FeatureTower, architecture: Any, grid: tuple[int, int]) -> None:
    """Run the model without weights: of a picture it must make its patches' tokens, and before them few others.

    Raises:
        RequestError: it does not.
    """
    kind: Any = model_class(tower.class_name)
    pixels, patches = [side * tower.patch for side in grid], grid[0] * grid[1]
    wrong: Exception | None = None
    try:
        with torch.device("meta"):
            model = kind(architecture)
            _, tokens, width = model(torch.zeros(1, 3, *pixels), **vision_options(model)).last_hidden_state.shape
        found = f"{tokens} tokens of {width} numbers"
        if patches <= tokens <= patches + MOST_OTHER_TOKENS and width == tower.width:
            return
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if "meta tensors" in str(error):
            return  # it looks at numbers, of which there are none: its first batch will tell
        wrong, found = error, "no hidden states"
    raise RequestError(
        f"features.{name}: {tower.class_name} in {folder} makes {found} of a picture of {pixels[1]}x{pixels[0]}, which "
        f"has {patches} patches, and should make {tower.width} numbers of each"
        f"{f' ({wrong})' if wrong else ''}. Give the `class_name` of a model that does, such as Dinov2Model, ViTModel "
        f"or CLIPVisionModel."
    ) from wrong
