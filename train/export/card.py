"""The model card of an exported pipeline: how and on which data it was trained, and how to sample from it.

The template is card.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shards.base.durable import DamagedFile, read_sealed_json, sha256_file
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.models import DISABLED_OPTIONS
from shards.format.towers import TextTower
from train.config import TrainConfig
from train.data.selection import FilterConfig
from train.export.components import call_parameters, default_size, trained_sizes
from train.export.evidence import describe_evaluations, describe_samples, evaluations, gpu_hours
from train.export.posthoc import RECORD
from train.export.prompts import prompt_arguments
from train.model.backbone import PipelineConfig
from train.model.inputs import Guidance
from train.model.network import class_name
from train.objective.config import ObjectiveConfig
from train.run.checkpoints.checkpoint import WEIGHTS_NAME, Checkpoint

CARD = Path(__file__).with_name("card.md")
SIZES = ("block_out_channels", "cross_attention_dim", "num_layers", "num_attention_heads", "depth", "hidden_size")
"""Fields of a network's config that the card lists if the network has them."""
WEIGHT_FILES = f"{Path(WEIGHTS_NAME).stem}*.safetensors"
"""Pattern of the names of weight files, which may be shards."""
GUIDANCE = 5.0
"""Guidance scale in the card's code for pipelines that do not use classifier-free guidance by default."""


@dataclass(frozen=True)
class ExportedWeights:
    """Description of the exported weights for the model card."""

    name: str
    """`unet`, `ema`, or empty if they are not from the checkpoint."""
    description: str
    step: int
    sha256: list[str]
    """SHA-256 of each of its files; several if the weights are sharded."""


def exported_weights(config: TrainConfig, checkpoint: Checkpoint, folder: Path) -> ExportedWeights:
    """Describe the weights in a folder: those of a checkpoint, an average that `train ema` rebuilt, or others.

    Raises:
        DamagedFile: the files of a rebuilt average do not match its record.
    """
    step, hashes = checkpoint.state.step, checkpoint.content["files"]
    if folder.parent.resolve() == checkpoint.folder.resolve():
        names = [name for name in sorted(hashes) if fnmatch(name, f"{folder.name}/{WEIGHT_FILES}")]
        own = [hashes[name] for name in names]
        return ExportedWeights(folder.name, _describe_weights(config, folder.name), step, own)
    if not (folder / RECORD).is_file():
        own = list(map(sha256_file, sorted(folder.glob(WEIGHT_FILES))))
        return ExportedWeights("", f"weights from {folder}", step, own)
    record = read_sealed_json(folder / RECORD)
    for name, sha256 in record["files"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            raise DamagedFile(
                f"{folder / name} does not match its SHA-256 in {RECORD}, so it was changed or damaged. Rebuild the "
                f"average with `python -m train ema`."
            )
    description = (
        f"moving average of the weights (width {record['std']:g}, rebuilt from {len(record['made_of'])} averages)"
    )
    return ExportedWeights("", description, record["step"], [record["files"][WEIGHTS_NAME]])


def model_card(
    run_dir: Path,
    target: Path,
    config: TrainConfig,
    checkpoint: dict[str, Any],
    encoding: EncodingRecord,
    texts: list[TextTower],
    weights: ExportedWeights,
    scheduler: Any,
    trimmed: bool = False,
    samples: Sequence[str] = (),
    funnel: str = "",
    text_widths: tuple[int, int] | None = None,
) -> str:
    """Return the text of an export's README.md.

    Args:
        target: folder of the export, used in the card's code.
        checkpoint: content of the checkpoint's state.json.
        texts: the pipeline's text towers, in the pipeline's order.
        trimmed: whether the pipeline is the one in trimmed_pipeline.py.
        samples: names of images in the export.
        funnel: description of the data, from `describe_funnels`.
        text_widths: (full width, width in training) of the text if it was projected; None: it was not.
    """
    fingerprint, pipeline = checkpoint["fingerprint"], config.backbone.pipeline.class_name
    sizes = trained_sizes(fingerprint)
    stock = pipeline == PipelineConfig().class_name
    trust = "trust_remote_code=True"
    streams = [
        _describe_stream(stream, stream_config.filter or config.data.filter)
        for stream, stream_config in zip(fingerprint["streams"], config.data.streams, strict=True)
    ]
    return CARD.read_text().format(
        title=run_dir.resolve().name,
        fingerprint=fingerprint,
        config=config,
        encoding=encoding,
        texts="\n".join(map(_describe_text, texts)),
        pipeline_class="DiffusionPipeline" if trimmed else pipeline,
        arguments=", ".join(["folder", *([trust] if trimmed else ["safety_checker=None"] if stock else [])]),
        folder=str(target),
        call_arguments=_call_arguments(config, texts),
        size=sizes[0],
        sizes=", ".join(sorted(str(size) for size in sizes)),
        default=_describe_default(default_size(fingerprint, class_name(fingerprint["unet"]))),
        start=config.init_from or config.init_unet or f"random weights (seed {config.seed})",
        weights=weights,
        hashes=", ".join(f"`{sha256}`" for sha256 in weights.sha256),
        objective=_describe_objective(config.objective),
        scheduler=type(scheduler).__name__,
        streams="\n".join(streams),
        network=_describe_network(fingerprint["unet"], text_widths),
        samples=describe_samples(list(samples)),
        evaluation=describe_evaluations(evaluations(run_dir, checkpoint, weights.name)),
        cost=_describe_cost(run_dir, weights.step, fingerprint["global_batch_size"]),
        funnel=funnel,
    )


def _describe_network(fields: dict[str, Any], text_widths: tuple[int, int] | None) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in fields.items() if key in SIZES)
    if text_widths is None:
        return sizes
    return (
        f"{sizes} in training, on text projected from {text_widths[0]} onto {text_widths[1]} dimensions; this export "
        f"reads full-width text"
    )


def _describe_cost(run_dir: Path, step: int, global_batch_size: int) -> str:
    hours = gpu_hours(run_dir, step, global_batch_size)
    if hours is None:
        return "The run's metrics do not say how long training took. Its energy was not measured."
    return (
        f"Training took {hours:,.3g} GPU-hours (process-hours on CPUs), not counting earlier phases. Its energy was "
        f"not measured."
    )


def _call_arguments(config: TrainConfig, texts: list[TextTower]) -> str:
    """Return extra arguments for the card's code where the pipeline's defaults do not match training.

    Pipelines whose `guidance_scale` is an input of the network need the value that was used in training. They apply
    classifier-free guidance only if they are given a negative prompt and `true_cfg_scale`.
    """
    accepted = call_parameters(config.backbone.pipeline)
    scales = [item.scale for item in config.backbone.inputs.values() if isinstance(item, Guidance)]
    lines = [f"guidance_scale={scale:g},  # an input of the network, constant in training" for scale in scales]
    if "true_cfg_scale" in accepted and config.objective.caption_dropout > 0:
        lines += ['negative_prompt="",', f"true_cfg_scale={GUIDANCE:g},"]
    lines += [f"{name}=False," for name in DISABLED_OPTIONS if name in accepted]
    lines += [f"{name}={value!r}," for name, value in prompt_arguments(config.backbone.pipeline, texts).items()]
    return "".join(f"    {line}\n" for line in lines)


def _describe_default(size: Bucket | None) -> str:
    if size is None:
        return "Always pass `height` and `width`: the pipeline's default may be a size that it was not trained on."
    return f"Without `height` and `width`, images have {size} pixels."


def _describe_text(text: TextTower) -> str:
    named = f"{text.weights.name} (`{text.weights.sha256:.12}`)"
    tokenizer = f"{text.tokenizer.name} (`{text.tokenizer.sha256:.12}`)"
    stored = f"stored as {text.storage}, {'without padding tokens' if text.trim else 'with padding tokens'}"
    return f"| text encoder | {named} |\n| tokenizer | {tokenizer} |\n| captions | {stored} |"


def _describe_weights(config: TrainConfig, weights: str) -> str:
    if weights == "unet":
        return "raw weights"
    ema = config.ema
    kind = f"decay {ema.decay}" if ema.kind == "constant" else f"power function of width {ema.sigma_rel}"
    return f"moving average of the weights ({kind}, starting at step {ema.start_step})"


def _describe_objective(objective: ObjectiveConfig) -> str:
    if objective.prediction == "flow_matching":
        sampling = f"flow matching with {objective.timestep_sampling} timesteps"
        if objective.timestep_sampling == "logit_normal":
            sampling += f" (mean {objective.logit_mean:g}, standard deviation {objective.logit_std:g})"
        return sampling
    parts = [f"{objective.prediction} with {objective.num_train_timesteps} steps of {objective.beta_schedule} noise"]
    if objective.min_snr_gamma is not None:
        parts.append(f"min-SNR weighting with γ = {objective.min_snr_gamma}")
    if objective.offset_noise > 0:
        parts.append(f"offset noise of {objective.offset_noise}")
    if objective.zero_terminal_snr:
        parts.append("zero terminal SNR")
    return "; ".join(parts)


def _describe_stream(stream: dict[str, Any], filter: FilterConfig | None) -> str:
    bounds = f" with {filter.describe()}" if filter is not None and filter.bounds else ""
    lists = ", ".join(f"`{id[:20]}`" for id in stream.get("exclusions", ()))
    excluded = f"; without the samples excluded by {lists}" if lists else ""
    return (
        f"- {stream['samples']:,} samples at {stream['bucket']} px{bounds}, {stream['weight']:g} passes per epoch; "
        f"encoding `{stream['encoding_id']}`, index `{stream['index_sha256'][:12]}`{excluded}"
    )
