"""Config for the towers, and their records for encoding.json.

Records are derived from the model folders alone, without loading weights.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
from pydantic import AfterValidator, Field, model_validator

from precompute.encode.networks import model_class, vision_options
from precompute.encode.quantised import quantise
from shards.base.config import Config
from shards.base.durable import read_json
from shards.base.errors import RequestError
from shards.base.store import Place, absolute_place
from shards.format.buckets import Bucket
from shards.format.models import hash_weights, model_folder, probe_autoencoder
from shards.format.normalisation import normalisation
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
"""Alternative sets of files, each of which contains a tokenizer's vocabulary."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation for vision models without a preprocessor_config.json."""
PIXELS_PER_TOKEN = 16
"""Default side, in pixels, of the square image area that one feature token represents."""
MAX_EXTRA_TOKENS = 32
"""Maximum number of tokens (class token and registers) before a vision model's patch tokens."""
NORMALISED_BY_CONFIG = ("AutoencoderKL", "AutoencoderDC", "AutoencoderKLHunyuanImage")
"""Autoencoder classes whose diffusers pipelines normalise latents using only the config fields that `normalisation`
reads. Check the pipelines' `vae.decode` calls before adding a class."""
UNSUITABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""Exceptions that an unsuitable model raises when it is built or run without weights."""


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(
            f"{name!r} is not a valid tower name: use only a-z, 0-9 and _, because column names contain the tower name"
        )
    return name


TowerName = Annotated[str, AfterValidator(_check_name)]


def _absolute_folder(name: str) -> str:
    return str(Path(name).absolute()) if name and Path(name).exists() else name


FolderOrName = Annotated[str, AfterValidator(_absolute_folder)]
"""A local folder or file, hub name or URL. The path of an existing one is made absolute, because a Ray worker has a
different working directory than the driver."""


Root = Annotated[Place, AfterValidator(absolute_place)]


class TextConfig(Config):
    """Storage of text latents. `storage`, `trim` and `width` are defaults for all text towers."""

    storage: TextStorage = "float8"
    """`float16` is exact; `float8` halves the size, with a relative error of 2.7 %."""
    trim: bool = False
    """Store only real tokens, without padding. Training then passes a cross-attention mask to the backbone."""
    width: int | None = Field(None, ge=1)
    """Project hidden states onto this many dimensions, chosen from a subset of the input's captions. Networks are
    trained with this text width, and the export restores the encoder's width. Encoders that are no wider, and pooled
    outputs, are not projected. null: no projection."""
    joint: list[list[TowerName]] = Field([])
    """Text towers to project jointly, in the form of `towers` in `backbone.inputs`. Required if the network
    concatenates towers along the tokens, as SD3 does with CLIP and T5, because one linear layer then reads all of
    them."""
    projection: Root | None = None
    """Latents root whose projections are reused instead of computing new ones. Its widths are the defaults. All
    training and validation roots of a run must have the same projection."""
    deduplicate: bool = False
    """Store identical text latents only once per MDS file. Useful if captions are class names or come from templates;
    `python -m shards stats` shows how many repeat. Other readers of MDS files find empty text columns in the
    duplicates."""


class ImageConfig(Config):
    """Storage of image latents."""

    storage: ImageStorage = "int8"
    """`float16` is exact; `int8` halves the size, with an error of at most 0.4 % of a channel's largest value."""


class TextTowerConfig(Config):
    """A frozen text encoder."""

    model: FolderOrName
    """Local folder or hub name of a transformers text model."""
    tokenizer: FolderOrName
    """Local folder or hub name of its tokenizer."""
    class_name: str | None = None
    """Class in transformers, or MODULE.CLASS for a class in diffusers.pipelines.MODULE; null uses the first entry of
    `architectures` in the model's config.json."""
    template: str = "{}"
    """Prompt template, in which `{}` stands for the caption."""
    lower: bool = False
    """Convert captions to lower case first, as some pipelines do with prompts."""
    empty: str | None = None
    """Prompt that replaces a dropped caption; null uses the template with an empty caption."""
    max_tokens: int | None = Field(None, ge=1)
    """Number of tokens including padding; null uses CLIP's number of positions (77), and other models need a number."""
    beyond_template: bool = False
    """Add the number of the template's own tokens, including special tokens, to `max_tokens`."""
    masked: bool = False
    """Mask padding in the encoder's attention. Training then masks the padding too."""
    layer: Literal["last"] | int = "last"
    """Hidden states to store: `last`, or an index into `hidden_states` such as -2."""
    states: bool = True
    """Store hidden states."""
    pooled: bool = False
    """Store the pooled output, one vector per caption."""
    keep: list[Slice] = Field([(None, None)], min_length=1)
    """Tokens to store, as slices: [[0, 1], [-299, null]] stores the first token and the last 299."""
    storage: TextStorage | None = None
    """Overrides `text.storage` for this tower."""
    trim: bool | None = None
    """Overrides `text.trim` for this tower."""
    width: int | None = Field(None, ge=1)
    """Overrides `text.width` for this tower. Towers that are no wider are not projected."""
    weights: Literal["as_stored"] | Quantised = "as_stored"
    """`int8` or `float8` quantises the weights of linear layers to one byte each, to save GPU memory. `float8` also
    quantises the layers' inputs, and multiplies in float8, which needs `precision: bfloat16` and GPUs of compute
    capability 8.9 or higher (Ada, Hopper, Blackwell), or a CPU, where it is slow. The outputs differ slightly, so the
    root gets a different encoding id."""
    batch_size: int | None = Field(None, ge=1)
    """Number of captions per batch; overrides `workers.batch_size`."""

    @model_validator(mode="after")
    def _check(self) -> "TextTowerConfig":
        if not (self.states or self.pooled):
            raise ValueError(
                "a text tower with neither `states` nor `pooled` would store nothing; set one of them to true"
            )
        if "{}" not in self.template:
            raise ValueError(f"the template {self.template!r} must contain {{}} as the placeholder for the caption")
        return self


class FeatureTowerConfig(Config):
    """A frozen vision encoder. Its per-patch features of each image are stored as a target for training (REPA)."""

    model: FolderOrName
    """Local folder or hub name of a transformers vision model with one token per patch: DINOv2, DINOv3, ViT or I-JEPA;
    with `class_name`, also the vision models of CLIP (CLIPVisionModel) and SigLIP."""
    class_name: str | None = None
    """Class in transformers; null uses the first entry of `architectures` in the model's config.json."""
    resize: float | None = Field(None, gt=0)
    """Ratio of the vision model's input side to the bucket's side; null gives one token per 16 × 16 pixels of the
    bucket."""
    storage: TextStorage = "float16"
    """Storage of the features; see `text.storage`."""
    batch_size: int | None = Field(None, ge=1)
    """Number of images per batch; overrides `workers.batch_size`."""


def describe_image(name: str, posterior: Literal["moments", "mean"] | None, **settings: Any) -> ImageTower:
    """Build the record of an autoencoder for encoding.json.

    Args:
        name: local folder, hub name or URL.
        posterior: the part of the posterior to store. None stores the moments or, for an autoencoder without a
            posterior, the latents.
        settings: crop, resampling, decoder, resampler, color and storage, which are recorded unchanged.

    Raises:
        RequestError: The model is missing, is not an image autoencoder, has an unknown normalisation, or lacks the
            requested posterior.
    """
    folder = model_folder(name)
    config = read_json(folder / "config.json")
    class_name = str(config.get("_class_name"))
    supported = f"{', '.join(NORMALISED_BY_CONFIG[:-1])} or {NORMALISED_BY_CONFIG[-1]}"
    if class_name not in NORMALISED_BY_CONFIG:
        problem = f"names the class {class_name}" if "_class_name" in config else "has no `_class_name`"
        raise RequestError(
            f"vae: {folder}/config.json {problem}, so the scale and shift of latents in a diffusion pipeline are "
            f"unknown. Training on wrongly normalised latents would not fail, but it would produce bad images. Use "
            f"the folder of an {supported}."
        )
    try:
        vae, has_posterior, channels, downsampling = probe_autoencoder(class_name, config)
    except UNSUITABLE as error:
        import diffusers

        raise RequestError(
            f"vae: diffusers {diffusers.__version__} cannot build an image autoencoder ({class_name}) from "
            f"{folder}/config.json: {type(error).__name__}: {error}. Use the folder of an {supported}."
        ) from error
    if not has_posterior and posterior is not None:
        raise RequestError(
            f"{class_name} has no posterior, because its latents are deterministic. Remove `posterior` from the config."
        )
    return ImageTower(
        class_name=class_name,
        weights=hash_weights(name, folder),
        posterior=(posterior or "moments") if has_posterior else "deterministic",
        channels=channels,
        downsampling=downsampling,
        **normalisation(vae.config, channels, f"vae: {folder}/config.json"),
        **settings,
    )


def describe_text(name: str, config: TextTowerConfig, default: TextConfig) -> TextTower:
    """Build the record of a text encoder and its tokenizer for encoding.json.

    Raises:
        RequestError: The model or the tokenizer is missing or unsuitable, they do not belong together, or the
            requested output cannot be stored.
    """
    folder, tokenizer_folder = model_folder(config.model), model_folder(config.tokenizer)
    class_name = _transformers_class(folder, config.class_name)
    model_config: Any = transformers.AutoConfig.from_pretrained(folder)
    text_config = getattr(model_config, "encoder", None) or model_config.get_text_config()
    num_positions = getattr(text_config, "max_position_embeddings", None)
    is_clip = text_config.model_type == "clip_text_model"
    max_tokens = config.max_tokens or (num_positions if is_clip else None)
    if max_tokens is None:
        raise RequestError(
            f"texts.{name}.max_tokens: {class_name} accepts captions of any length, so max_tokens has no default. Set "
            f"it to the number of tokens, including padding."
        )
    _check_text_outputs(name, folder, class_name, text_config, config)
    quantised = None if config.weights == "as_stored" else config.weights
    tokenizer = _load_tokenizer(
        name, tokenizer_folder, num_positions if is_clip else None, getattr(text_config, "vocab_size", None)
    )
    if config.beyond_template:
        max_tokens += len(tokenizer(config.template.replace("{}", "")).input_ids)
    if num_positions is not None and max_tokens > num_positions:
        with_template = ", including those of the template" if config.beyond_template else ""
        raise RequestError(
            f"texts.{name}.max_tokens: {class_name} in {folder} has {num_positions} positions, fewer than the "
            f"{max_tokens} tokens requested{with_template}. Use at most {num_positions}."
        )
    trim = default.trim if config.trim is None else config.trim
    if trim and config.states and not config.masked and not CAUSAL.fullmatch(class_name):
        raise RequestError(
            f"texts.{name}.trim: without `masked`, every token's state in {class_name} depends on the padding after "
            f"the caption, so trimmed states would differ from what a pipeline computes. Set trim to false, or set "
            f"masked to true if the model family masks padding."
        )
    length = _num_kept(name, config.keep, max_tokens)
    pooled = _pooled_width(name, class_name, text_config) if config.pooled else 0
    return TextTower(
        class_name=class_name,
        weights=hash_weights(config.model, folder),
        tokenizer=hash_weights(config.tokenizer, tokenizer_folder),
        template=config.template,
        lower=config.lower,
        empty=config.empty,
        max_tokens=max_tokens,
        masked=config.masked,
        layer=config.layer,
        states=config.states,
        keep=tuple(config.keep),
        length=length,
        width=int(text_config.hidden_size),
        pooled=pooled,
        storage=config.storage or default.storage,
        trim=trim and config.states,
        quantised=quantised,
    )


def _check_text_outputs(name: str, folder: Path, class_name: str, text_config: Any, config: TextTowerConfig) -> None:
    """Run the model without weights. Raises RequestError unless it needs only captions as input and has the requested
    layer."""
    try:
        with torch.device("meta"):
            model = model_class(class_name)(text_config)
            outputs = model(torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True)
        num_layers = len(outputs.hidden_states)
        if config.layer != "last":
            outputs.hidden_states[config.layer]
        elif config.states:
            outputs.last_hidden_state  # noqa: B018
    except UNSUITABLE as error:
        if _fails_only_on_meta(error):
            return  # an unsuitable model will fail on the first caption instead
        if isinstance(error, IndexError):
            raise RequestError(
                f"texts.{name}.layer: {class_name} in {folder} has no hidden state at index {config.layer}. Use an "
                f"index from {-num_layers} to {num_layers - 1}."
            ) from error
        raise RequestError(
            f"texts.{name}: {class_name} in {folder} does not return hidden states when its only input is a caption "
            f"({error}). Set `class_name` to an encoder, such as T5EncoderModel or Gemma2Model."
        ) from error
    if config.weights != "as_stored":
        _check_quantised(name, class_name, model)


def _check_quantised(name: str, class_name: str, model: Any) -> None:
    """Run the model with int8 weights on the meta device. Raises RequestError if it reads the weight of a
    layer, which quantised layers, int8 or float8, do not have."""
    try:
        quantise(model, "int8")(torch.zeros(1, 2, dtype=torch.long, device="meta"))
    except UNSUITABLE as error:
        if not _fails_only_on_meta(error):
            raise RequestError(
                f"texts.{name}.weights: {class_name} does not run with quantised weights ({error}). Remove `weights` "
                f"to use the model as stored. To save memory without quantisation, set workers.towers to one_by_one."
            ) from error


def _fails_only_on_meta(error: Exception) -> bool:
    """Return whether a model failed only because it ran on the meta device: it inspects values, which these tensors
    lack, or it sets autocast for their device, which torch before 2.12 cannot."""
    return "meta tensors" in str(error) or "unsupported scalarType" in str(error)


def _num_kept(name: str, keep: list[Slice], max_tokens: int) -> int:
    """Return the number of tokens that `keep` selects. Raises RequestError unless it selects at least one token,
    and all of them in increasing order, which keeps padding last."""
    kept = [token for bounds in keep for token in range(max_tokens)[slice(*bounds)]]
    if not kept or sorted(set(kept)) != kept:
        raise RequestError(
            f"texts.{name}.keep: {keep} must select at least one of the {max_tokens} tokens, in increasing order and "
            f"without repeats."
        )
    return len(kept)


def _pooled_width(name: str, class_name: str, text_config: Any) -> int:
    """Return the width of the pooled output, or raise RequestError if the model has none."""
    if text_config.model_type != "clip_text_model":
        raise RequestError(
            f"texts.{name}.pooled: {class_name} has no pooled output; only CLIP text models have one. Set `pooled` to "
            f"false."
        )
    return int(text_config.projection_dim if class_name.endswith("WithProjection") else text_config.hidden_size)


def _transformers_class(folder: Path, class_name: str | None) -> str:
    """Return `class_name` or, if it is None, the first entry of `architectures` in a model's config. Raises
    RequestError if the class does not exist."""
    architectures = read_json(folder / "config.json").get("architectures") or ["-"]
    class_name = class_name or str(architectures[0])
    try:
        model_class(class_name)
    except (AttributeError, ImportError):
        raise RequestError(
            f"transformers {transformers.__version__} has no class {class_name!r}, which the model in {folder} needs. "
            f"Set `class_name`, or use a different model. Code shipped with a model is never executed."
        ) from None
    return class_name


def _load_tokenizer(name: str, folder: Path, length: int | None, num_embeddings: int | None) -> Any:
    """Load a tokenizer, and check that it fits a text model with `length` positions and `num_embeddings` token
    embeddings; None skips a check.

    A token without an embedding would crash the process on a GPU, so the number of embeddings is checked before any
    worker starts.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        raise RequestError(
            f"{folder} is not a tokenizer folder: it contains no tokenizer_config.json. Set "
            f"texts.{name}.tokenizer to the tokenizer that came with the text encoder."
        )
    if not any(all((folder / file).is_file() for file in files) for files in VOCABULARIES):
        known = ", or ".join(" and ".join(files) for files in VOCABULARIES)
        raise RequestError(
            f"{folder} is not a tokenizer folder: it contains no vocabulary file (looked for {known}). Use the "
            f"complete folder that came with the text encoder."
        )
    remedy = "Use the tokenizer that came with the text encoder."
    tokenizer_length = read_json(path).get("model_max_length", length)
    if length is not None and tokenizer_length != length:
        raise RequestError(
            f"The tokenizer in {folder} truncates captions to {tokenizer_length} tokens, but the text encoder expects "
            f"{length}. {remedy}"
        )
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # each tokenizer class raises its own exception types
        raise RequestError(
            f"texts.{name}.tokenizer: transformers cannot load {folder}: {error}. Use the complete folder that came "
            f"with the text encoder."
        ) from error
    if tokenizer.pad_token_id is None:
        raise RequestError(
            f"texts.{name}.tokenizer: {folder} defines no pad_token, which is needed to pad captions to `max_tokens`. "
            f"Add the model family's padding token to its tokenizer_config.json. If the model was trained without "
            f"padding, its end-of-sequence token will do, together with `masked: true`."
        )
    # added tokens, such as Gemma 3's for images, do not count, because text models may lack embeddings for them
    num_tokens = max(tokenizer.vocab_size, tokenizer.pad_token_id + 1)
    if num_embeddings is not None and num_tokens > num_embeddings:
        raise RequestError(
            f"The tokenizer in {folder} has {num_tokens} tokens, but the text encoder has only {num_embeddings} "
            f"embeddings. {remedy}"
        )
    return tokenizer


def describe_features(name: str, config: FeatureTowerConfig, buckets: Sequence[Bucket]) -> FeatureTower:
    """Build the record of a vision encoder for encoding.json.

    Raises:
        RequestError: The model is missing, is not a vision model with one token per patch, or does not fit a bucket.
    """
    folder = model_folder(config.model)
    class_name = _transformers_class(folder, config.class_name)
    model_config: Any = transformers.AutoConfig.from_pretrained(folder)
    vision_config = getattr(model_config, "vision_config", model_config)
    patch, width = getattr(vision_config, "patch_size", None), getattr(vision_config, "hidden_size", None)
    if not isinstance(patch, int) or not isinstance(width, int):
        raise RequestError(
            f"features.{name}: {folder} ({class_name}) is not a patch-based vision model. Use a model such as DINOv2."
        )
    mean, std = IMAGENET
    if (folder / "preprocessor_config.json").is_file():
        preprocessor = read_json(folder / "preprocessor_config.json")
        mean, std = preprocessor.get("image_mean", mean), preprocessor.get("image_std", std)
    tower = FeatureTower(
        class_name=class_name,
        weights=hash_weights(config.model, folder),
        resize=config.resize or patch / PIXELS_PER_TOKEN,
        mean=tuple(mean),
        std=tuple(std),
        patch=patch,
        width=width,
        storage=config.storage,
    )
    try:
        grids = [tower.grid(bucket) for bucket in buckets]
    except ValueError as error:
        raise RequestError(
            f"features.{name}: {error}. Use multiples of {patch / tower.resize:g} for bucket sides and aspect.step, or "
            f"change features.{name}.resize."
        ) from None
    _check_feature_outputs(name, folder, tower, vision_config, grids[0])
    return tower


def _check_feature_outputs(
    name: str, folder: Path, tower: FeatureTower, vision_config: Any, grid: tuple[int, int]
) -> None:
    """Run the model without weights on an image of `grid` (rows, columns) patches, and check that it returns one token
    per patch, preceded by at most MAX_EXTRA_TOKENS other tokens."""
    height, width = (side * tower.patch for side in grid)
    num_patches = grid[0] * grid[1]
    cause: Exception | None = None
    try:
        with torch.device("meta"):
            model = model_class(tower.class_name)(vision_config)
            outputs = model(torch.zeros(1, 3, height, width), **vision_options(model))
        _, num_tokens, token_width = outputs.last_hidden_state.shape
        if num_patches <= num_tokens <= num_patches + MAX_EXTRA_TOKENS and token_width == tower.width:
            return
        found = f"{num_tokens} tokens of {token_width} numbers"
    except UNSUITABLE as error:
        if _fails_only_on_meta(error):
            return  # an unsuitable model will fail on the first batch instead
        cause, found = error, f"no hidden states ({error})"
    raise RequestError(
        f"features.{name}: for a {width}x{height} image ({num_patches} patches), {tower.class_name} in {folder} "
        f"returns {found} instead of {tower.width} numbers per patch. Set `class_name` to a model class with one token "
        f"per patch, such as Dinov2Model, ViTModel or CLIPVisionModel."
    ) from cause
