"""The model card of an export: what was trained, on what, and how to sample from it. Its Markdown is card.md."""

import inspect
from pathlib import Path
from typing import Any

import diffusers

from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.towers import TextTower
from train.config import TrainConfig
from train.data.selection import FilterConfig
from train.export.components import default_size, trained_sizes
from train.model.backbone import PipelineConfig
from train.model.inputs import Guidance
from train.model.unet import class_name
from train.objective.config import ObjectiveConfig

CARD = Path(__file__).with_name("card.md")
SIZES = ("block_out_channels", "cross_attention_dim", "num_layers", "num_attention_heads", "depth", "hidden_size")
"""Fields of a network's config that the card shows, where it has them."""
GUIDANCE = 5.0
"""Scale of true classifier-free guidance in the card's code, where the pipeline's default is none."""


def model_card(
    run_dir: Path,
    target: Path,
    config: TrainConfig,
    checkpoint: dict[str, Any],
    encoding: EncodingRecord,
    texts: list[TextTower],
    weights: str,
    scheduler: Any,
    trimmed: bool = False,
) -> str:
    """README.md of the export of a checkpoint, whose state.json holds `checkpoint`.

    Args:
        target: where the export will be, for the card's own code.
        texts: the pipeline's, in its order.
        weights: the checkpoint's folder that was exported: `unet`, or `ema` for the moving average.
        trimmed: it is the pipeline of trimmed_pipeline.py.
    """
    fingerprint, pipeline = checkpoint["fingerprint"], config.backbone.pipeline.class_name
    sizes = trained_sizes(fingerprint)
    stock = pipeline == PipelineConfig().class_name
    own = "trust_remote_code=True"
    hashes = [sha256 for name, sha256 in checkpoint["files"].items() if name.startswith(f"{weights}/diffusion")]
    streams = zip(fingerprint["streams"], config.data.streams, strict=True)
    return CARD.read_text().format(
        title=run_dir.resolve().name,
        checkpoint=checkpoint,
        fingerprint=fingerprint,
        config=config,
        encoding=encoding,
        texts="\n".join(map(_describe_text, texts)),
        pipeline_class="DiffusionPipeline" if trimmed else pipeline,
        arguments=", ".join(["folder", *([own] if trimmed else ["safety_checker=None"] if stock else [])]),
        folder=str(target),
        guidance=_guidance_arguments(config),
        size=sizes[0],
        sizes=", ".join(sorted(str(size) for size in sizes)),
        default=_describe_default(default_size(fingerprint, class_name(fingerprint["unet"]))),
        start=config.init_from or config.init_unet or f"random weights of seed {config.seed}",
        weights=_describe_weights(config, weights),
        objective=_describe_objective(config.objective),
        scheduler=type(scheduler).__name__,
        streams="\n".join(_describe_stream(stream, its.filter or config.data.filter) for stream, its in streams),
        network=", ".join(f"{key} {value}" for key, value in fingerprint["unet"].items() if key in SIZES),
        weights_sha256=hashes[0] if hashes else "unknown",
    )


def _guidance_arguments(config: TrainConfig) -> str:
    """Write the further arguments of the card's code where the pipeline's own defaults would not guide.

    Pipelines whose `guidance_scale` is an input of the network need the trained value there, and do true
    classifier-free guidance only if they get a negative prompt and a scale for it.
    """
    accepted = inspect.signature(getattr(diffusers, config.backbone.pipeline.class_name).__call__).parameters
    scales = [item.scale for item in config.backbone.inputs.values() if isinstance(item, Guidance)]
    lines = [f"guidance_scale={scale:g},  # an input of the network; in training always this value" for scale in scales]
    if "true_cfg_scale" in accepted and config.objective.caption_dropout > 0:
        lines += ['negative_prompt="",', f"true_cfg_scale={GUIDANCE:g},"]
    return "".join(f"    {line}\n" for line in lines)


def _describe_default(size: Bucket | None) -> str:
    if size is None:
        return "Always pass `height` and `width`: the pipeline's own default may be a size that was not trained."
    return f"Without `height` and `width` the pipeline draws {size}."


def _describe_text(text: TextTower) -> str:
    named = f"{text.weights.name} (`{text.weights.sha256:.12}`)"
    tokenizer = f"{text.tokenizer.name} (`{text.tokenizer.sha256:.12}`)"
    stored = f"stored as {text.storage}, {'trimmed to their tokens' if text.trim else 'with their padding'}"
    return f"| text encoder | {named} |\n| tokenizer | {tokenizer} |\n| captions | {stored} |"


def _describe_weights(config: TrainConfig, weights: str) -> str:
    if weights == "unet":
        return "as the optimizer left them"
    ema = config.ema
    kind = f"decay {ema.decay}" if ema.kind == "constant" else f"power function of width {ema.sigma_rel}"
    return f"their moving average ({kind}, from step {ema.start_step} on)"


def _describe_objective(objective: ObjectiveConfig) -> str:
    if objective.prediction == "flow_matching":
        times = f"{objective.timestep_sampling} times"
        normal = f" of mean {objective.logit_mean:g} and deviation {objective.logit_std:g}"
        return f"flow matching, {times}" + normal * (objective.timestep_sampling == "logit_normal")
    words = [f"{objective.prediction}, {objective.num_train_timesteps} steps of {objective.beta_schedule} noise"]
    words += [f"min-SNR weights with γ = {objective.min_snr_gamma}"] * (objective.min_snr_gamma is not None)
    words += [f"offset noise of {objective.offset_noise}"] * (objective.offset_noise > 0)
    words += ["zero terminal SNR"] * objective.zero_terminal_snr
    return "; ".join(words)


def _describe_stream(stream: dict[str, Any], chosen_by: FilterConfig | None) -> str:
    of = f" with {chosen_by.describe()}" if chosen_by is not None and chosen_by.bounds else ""
    without = ", ".join(f"`{id[:20]}`" for id in stream.get("exclusions", ()))
    without = f"; without the samples that were excluded by {without}" if without else ""
    return (
        f"- {stream['samples']:,} samples at {stream['bucket']} px{of}, {stream['weight']:g} passes an epoch; encoding "
        f"`{stream['encoding_id']}`, index `{stream['index_sha256'][:12]}`{without}"
    )
