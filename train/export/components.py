"""The components of a diffusers pipeline, as determined by its constructor's arguments, and its model_index.json."""

import difflib
import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import diffusers

from shards.base.errors import RequestError
from shards.base.table import counted
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.towers import ImageTower, TextTower, Weights
from train.config import TrainConfig
from train.data.spec import keep_towers
from train.model.backbone import PipelineConfig
from train.model.inputs import Pooled, States
from train.model.network import UNET

CLIP_TOKENS = 77
"""CLIP's maximum number of tokens."""
LENGTH = "max_sequence_length"
"""Argument of a pipeline's call with the number of tokens per prompt for text encoders other than CLIP."""
ZEROS = "force_zeros_for_empty_prompt"
"""Constructor argument of pipelines that can replace a missing negative prompt with zeros."""
OWN_PIPELINE = (
    "Name a matching pipeline in backbone.pipeline, or load the network in the checkpoint's folder into a pipeline of "
    "your own."
)


def pipeline_texts(encoding: EncodingRecord, config: TrainConfig) -> list[TextTower]:
    """Return the text towers that the pipeline uses, in the pipeline's order.

    Raises:
        RequestError: the root lacks one of the towers, or the pipeline would encode images or captions differently from
            the root.
    """
    pipeline = config.backbone.pipeline
    if pipeline.class_name == PipelineConfig().class_name:
        text = stock_text_tower(encoding, config.data.towers)
        if config.objective.caption_dropout and text.prompt(""):
            raise RequestError(
                f"StableDiffusionPipeline uses the empty prompt for guidance, but dropped captions were encoded as "
                f"{text.empty!r}, so its unconditional input would differ from that in training. {OWN_PIPELINE}"
            )
        return [text]
    if missing := [name for name in pipeline.towers if name not in encoding.texts]:
        raise RequestError(
            f"backbone.pipeline.towers names {', '.join(missing)}, but the latents have {', '.join(encoding.texts)}. "
            f"Choose from these."
        )
    return [encoding.texts[name] for name in pipeline.towers]


def stock_text_tower(encoding: EncodingRecord, towers: list[str] | None) -> TextTower:
    """Return the text tower for a StableDiffusionPipeline: the only tower that a run with these `data.towers` reads.

    Raises:
        RequestError: the run does not read exactly one, or the pipeline would encode images or captions differently
            from the root.
    """
    read = [tower for tower in keep_towers(encoding, towers).texts.values() if tower.states]
    stock = ("CLIPTextModel", "last", "{}", False, ((None, None),))
    if [(tower.class_name, tower.layer, tower.template, tower.masked, tower.keep) for tower in read] != [stock]:
        raise RequestError(
            f"StableDiffusionPipeline uses the unmasked last hidden states of a single CLIPTextModel, which does not "
            f"match this run's text towers ({', '.join(encoding.texts)}). {OWN_PIPELINE}"
        )
    (text,) = read
    if encoding.image.class_name != "AutoencoderKL" or any(encoding.image.shift):
        raise RequestError(
            f"StableDiffusionPipeline needs an AutoencoderKL without a shift, but this root was encoded with "
            f"{encoding.image.class_name} and shift {encoding.image.shift}. {OWN_PIPELINE}"
        )
    return text


def set_length(tokenizer: Path, tokens: int) -> None:
    """Make the tokenizer in a folder truncate and pad to the number of tokens with which stage 1 encoded captions."""
    path = tokenizer / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if config.get("model_max_length") != tokens:
        path.write_text(json.dumps(config | {"model_max_length": tokens}, indent=2) + "\n")


def check_length(tokenizer: Path, tokens: int) -> None:
    """Check that captions have the number of tokens to which user interfaces pad prompts: the encoder's maximum.

    Raises:
        RequestError: captions have fewer tokens.
    """
    length = json.loads((tokenizer / "tokenizer_config.json").read_text()).get("model_max_length", CLIP_TOKENS)
    if length != tokens:
        raise RequestError(
            f"ComfyUI and AUTOMATIC1111 pad prompts to the text encoder's {length} tokens, but captions were encoded "
            f"with max_tokens {tokens}, so the network's inputs would differ from those in training. Export it as a "
            f"folder for diffusers instead."
        )


def tokenizer_lengths(
    pipeline: PipelineConfig, recorded: Mapping[str, Weights], texts: Sequence[TextTower]
) -> dict[str, int]:
    """Return a dict from tokenizers whose `model_max_length` limits prompts to the number of tokens with which captions
    were encoded.

    These are CLIP's tokenizers, and all tokenizers of pipelines without the argument LENGTH.

    Args:
        recorded: the pipeline's components, from `recorded_components`.
        texts: the text towers, in the pipeline's order.
    """
    tokenizers = [name for name in recorded if name.startswith("tokenizer")]
    has_length = LENGTH in call_parameters(pipeline)
    towers = zip(tokenizers, texts, strict=True)
    return {name: text.max_tokens for name, text in towers if is_clip(text) or not has_length}


def is_clip(text: TextTower) -> bool:
    """Return whether a text tower is CLIP's."""
    return text.class_name.startswith("CLIPText")


def pipeline_class(pipeline: PipelineConfig) -> Any:
    """Return the pipeline's class.

    Raises:
        RequestError: diffusers has no such pipeline.
    """
    try:
        return getattr(diffusers, pipeline.class_name)
    except AttributeError as error:
        near = difflib.get_close_matches(pipeline.class_name, dir(diffusers), n=1)
        raise RequestError(
            f"backbone.pipeline.class_name is {pipeline.class_name}, but diffusers {diffusers.__version__} has no "
            f"class of this name{f' (did you mean {near[0]}?)' if near else ''}. Correct the name, or install a "
            f"version of diffusers that has the class."
        ) from error


def constructor(pipeline: PipelineConfig) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the pipeline's constructor. Raises RequestError if diffusers has no such pipeline."""
    return inspect.signature(pipeline_class(pipeline).__init__).parameters


def call_parameters(pipeline: PipelineConfig) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the pipeline's call. Raises RequestError if diffusers has no such pipeline."""
    return inspect.signature(pipeline_class(pipeline).__call__).parameters


def call_source(pipeline: PipelineConfig) -> str:
    """Return the source code of the pipeline's call, which contains the sampling loop."""
    return inspect.getsource(pipeline_class(pipeline).__call__)


def check_unconditional(config: TrainConfig) -> None:
    """Check that the pipeline's unconditional input is the input that replaces dropped captions in training.

    Raises:
        RequestError: one of these inputs is zeros, and the other is the empty caption.
    """
    pipeline, parameter = config.backbone.pipeline, constructor(config.backbone.pipeline).get(ZEROS)
    if config.objective.caption_dropout == 0:
        return
    feeds_zeros = bool(pipeline.settings.get(ZEROS, parameter.default)) if parameter else False
    trains_zeros = config.backbone.dropped == "zeros"
    if feeds_zeros == trains_zeros:
        return
    trained, sampled = ("zeros", "the empty caption") if trains_zeros else ("the empty caption", "zeros")
    remedy = f"backbone.dropped to {'zeros' if feeds_zeros else 'empty'}"
    if parameter:
        remedy += f", or {ZEROS} in backbone.pipeline.settings to {str(trains_zeros).lower()}"
    raise RequestError(
        f"backbone.dropped is {config.backbone.dropped}: {trained} would replace dropped captions in training, but "
        f"{pipeline.class_name} uses {sampled} as its unconditional input, so guidance would rely on an input that "
        f"the network has never seen. Set {remedy}."
    )


def check_same_encoders(encoding: EncodingRecord, config: TrainConfig) -> None:
    """Check that the network is trained on exactly the text towers with which the pipeline encodes prompts.

    With an extra or missing tower, or in a different order, the pipeline would feed the network inputs that it has
    never seen; some pipelines replace a missing encoder's output with zeros.

    Raises:
        RequestError: backbone.inputs and backbone.pipeline.towers name different towers, or in different orders.
    """
    pipeline = config.backbone.pipeline
    backbone = config.backbone.resolved(keep_towers(encoding, config.data.towers).texts)
    read = backbone.text_towers
    if unread := [name for name in pipeline.towers if name not in read]:
        raise RequestError(
            f"backbone.pipeline.towers names {', '.join(unread)}, which backbone.inputs does not read: "
            f"{pipeline.class_name} would feed the network text inputs that it has never seen. Add "
            f"{' and '.join(unread)} to backbone.inputs, or choose a pipeline without "
            f"{'it' if len(unread) == 1 else 'them'}."
        )
    if missing := [name for name in read if name not in pipeline.towers]:
        raise RequestError(
            f"backbone.inputs reads {', '.join(missing)}, which backbone.pipeline.towers does not name: an exported "
            f"{pipeline.class_name} could not feed the network all inputs that it was trained on. Add "
            f"{' and '.join(missing)} to backbone.pipeline.towers, or remove "
            f"{'it' if len(missing) == 1 else 'them'} from backbone.inputs."
        )
    for argument, item in backbone.inputs.items():
        names = item.names if isinstance(item, States | Pooled) else []
        ordered = sorted(names, key=pipeline.towers.index)
        if names != ordered:
            raise RequestError(
                f"backbone.inputs.{argument} reads {', '.join(names)} in this order, but {pipeline.class_name} would "
                f"feed the network {', '.join(ordered)}, the order of backbone.pipeline.towers. Name the towers in the "
                f"same order in both."
            )


def check_times(config: TrainConfig) -> None:
    """Check that the pipeline divides timesteps by the same number as training before the network receives them.

    Raises:
        RequestError: it divides them by a different number.
    """
    pipeline, trained = config.backbone.pipeline, config.backbone.time_divisor
    # `timesteps / …` are the noise levels of all steps, which the network does not receive
    found = re.search(r"(?<!timesteps) / (1000|self\.scheduler\.config\.num_train_timesteps)\b", call_source(pipeline))
    divisor = 1 if found is None else 1000 if found[1] == "1000" else config.objective.num_train_timesteps
    if trained != divisor:
        raise RequestError(
            f"backbone.time_divisor is {trained:g}, but {pipeline.class_name} divides timesteps by {divisor}, so "
            f"images would be drawn at times that the network was not trained for. Set backbone.time_divisor to "
            f"{divisor}."
        )


def check_normalisation(pipeline: PipelineConfig, image: ImageTower) -> None:
    """Check that the pipeline undoes the normalisation of latents before it decodes them.

    Raises:
        RequestError: latents are shifted, or scaled per channel, and the pipeline's call ignores the VAE's config field
            for that.
    """
    per_channel = len(set(image.scale)) > 1 or len(set(image.shift)) > 1
    fields = ["latents_mean", "latents_std"] if per_channel else ["shift_factor"] if any(image.shift) else []
    if ignored := [field for field in fields if field not in call_source(pipeline)]:
        raise RequestError(
            f"{pipeline.class_name} ignores {' and '.join(ignored)} in the VAE's config, but training normalises "
            f"latents with shift {image.shift} and scale {image.scale}, so every exported image would be decoded from "
            f"wrong latents. {OWN_PIPELINE}"
        )


def trained_sizes(fingerprint: Mapping[str, Any]) -> list[Bucket]:
    """Return the buckets on which a run was trained, in descending order of their numbers of samples."""
    counts = Counter[str]()
    for stream in fingerprint["streams"]:
        counts[stream["bucket"]] += stream["samples"]
    return [Bucket.parse(name) for name, _ in counts.most_common()]


def default_size(fingerprint: Mapping[str, Any], network_class: str) -> Bucket | None:
    """Return the exported pipeline's default image size, or None if it cannot be chosen.

    A U-Net's `sample_size` is only a default, which pipelines interpret as the side of a square. Other networks scale
    their position embeddings by it, or have a pipeline with a fixed default size.
    """
    squares = [bucket for bucket in trained_sizes(fingerprint) if bucket.width == bucket.height]
    return squares[0] if network_class == UNET and squares else None


def network_name(pipeline: PipelineConfig) -> str:
    """Return the name of the pipeline component that is the trained network."""
    return "unet" if "unet" in constructor(pipeline) else "transformer"


def check_network(pipeline: PipelineConfig, network_class: str) -> None:
    """Check that the pipeline's constructor accepts networks of this class.

    Raises:
        RequestError: it takes networks of a different class, so an exported pipeline could not generate images.
    """
    parameter = constructor(pipeline).get(network_name(pipeline))
    annotation = parameter.annotation if parameter else None
    classes = get_args(annotation) or (annotation,)
    accepted = [kind.__name__ for kind in classes if inspect.isclass(kind) and issubclass(kind, diffusers.ModelMixin)]
    if accepted and network_class not in accepted:
        raise RequestError(
            f"{pipeline.class_name} (backbone.pipeline.class_name) needs a network of class {' or '.join(accepted)}, "
            f"but this run's network is of class {network_class}. {OWN_PIPELINE}"
        )


def recorded_components(pipeline: PipelineConfig, image: ImageTower, texts: list[TextTower]) -> dict[str, Weights]:
    """Return a dict from each component (VAE, text encoders, tokenizers) to the model used for it in stage 1.

    Raises:
        RequestError: the number of text towers differs from the pipeline's number of text encoders.
    """
    arguments = constructor(pipeline)
    encoders = [name for name in arguments if re.fullmatch(r"text_encoder(_\d)?", name)]
    if len(encoders) != len(texts):
        raise RequestError(
            f"{pipeline.class_name} has {counted(len(encoders), 'text encoder')} "
            f"({', '.join(encoders)}), but backbone.pipeline.towers names {counted(len(texts), 'text tower')}. "
            f"Name one text tower for each encoder, in this order."
        )
    components = {"vae": image.weights}
    for name, text in zip(sorted(encoders), texts, strict=True):
        components |= {name: text.weights, name.replace("text_encoder", "tokenizer"): text.tokenizer}
    return components


def write_index(
    folder: Path, pipeline: PipelineConfig, vae: str, texts: list[TextTower], scheduler: str, own: list[str] | None
) -> None:
    """Write model_index.json, which lists the module and class of each component.

    Args:
        vae: class name of the VAE.
        scheduler: class name of the scheduler.
        own: module in the folder and class name, for a pipeline that is not part of diffusers. DiffusionPipeline loads
            such a class only with `trust_remote_code=True`.
    """
    arguments, network = constructor(pipeline), network_name(pipeline)
    optional = {name: [None, None] for name in getattr(diffusers, pipeline.class_name)._optional_components}
    settings = {"requires_safety_checker": False} if "requires_safety_checker" in arguments else {}
    network_class = json.loads((folder / network / "config.json").read_text()).get("_class_name", UNET)
    index = {
        "_class_name": own or pipeline.class_name,
        "_diffusers_version": diffusers.__version__,
        **{name: value for name, value in optional.items() if name in arguments},
        "vae": ["diffusers", vae],
        network: ["diffusers", network_class],
        "scheduler": ["diffusers", scheduler],
        **settings,
        **pipeline.settings,
    }
    for name, text in zip(sorted(name for name in arguments if name.startswith("text_encoder")), texts, strict=True):
        module, _, class_name = text.class_name.rpartition(".")
        tokenizer = name.replace("text_encoder", "tokenizer")
        described = json.loads((folder / tokenizer / "tokenizer_config.json").read_text())
        index |= {name: [module or "transformers", class_name]}
        index |= {tokenizer: ["transformers", described.get("tokenizer_class", "PreTrainedTokenizerFast")]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
