"""The model card of an export: what was trained, on what, and how to sample from it."""

from collections import Counter
from pathlib import Path
from typing import Any

from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from train.config import TrainConfig
from train.data.selection import FilterConfig
from train.objective.paths import ObjectiveConfig

CARD = """---
library_name: diffusers
pipeline_tag: text-to-image
# license: to be filled in by whoever publishes this; the licenses of the VAE, the text encoder and the data apply
---

# {title}

A text-to-image latent diffusion model, trained by latentmill on latents that were encoded beforehand. The U-Net was
trained; the VAE, the text encoder and the tokenizer are copies of those that made the latents.

**License:** to be filled in before this is published, as are intended use, limits, and where the pictures came from.

## Sample

```python
import torch
from diffusers import {pipeline_class}

folder = {folder!r}  # where this file is
pipeline = {load}
pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
picture = pipeline("a red circle on a blue ground", height={height}, width={width}, num_inference_steps=50).images[0]
picture.save("picture.png")
```

Sizes other than {sizes} were not trained.

## What was trained

| | |
| --- | --- |
| steps | {steps} of {global_batch_size} samples |
| starts from | {start} |
| weights here | {weights} |
| objective | {objective} |
| sampler | {scheduler} |
| U-Net | {unet} |
| AdamW | lr {lr}, betas {betas}, weight decay {weight_decay}, {schedule} schedule with {warmup} steps of warm-up |
| precision | {precision} |
| captions left out | {caption_dropout:.0%} |

## Data

{streams}

| | |
| --- | --- |
| VAE | {vae} |
| text encoder | {text_encoder} |
| tokenizer | {tokenizer} |
| pictures | {crop}; {resampling}; {decoder} |
| image latents | {posterior}, times {scaling_factor} in training |
| captions | {text} |

## Fingerprint

What the run was a function of is in its checkpoint (`state.json`); the SHA-256 of the exported weights there is
`{weights_sha256}`.
"""


def model_card(
    run_dir: Path,
    target: Path,
    config: TrainConfig,
    checkpoint: dict[str, Any],
    encoding: EncodingRecord,
    weights: str,
    scheduler: str,
) -> str:
    """README.md of the export of a checkpoint, whose state.json holds `checkpoint`.

    Args:
        target: where the export will be, for the card's own code.
        weights: the checkpoint's folder that was exported: `unet`, or `ema` for the moving average.
    """
    fingerprint, buckets = checkpoint["fingerprint"], Counter[str]()
    for stream in fingerprint["streams"]:
        buckets[stream["bucket"]] += stream["samples"]
    size = Bucket.parse(buckets.most_common(1)[0][0])
    arguments, trimmed = "folder, safety_checker=None", encoding.text.trim
    if trimmed:
        arguments = "folder, custom_pipeline=folder, trust_remote_code=True"
    pipeline_class = "DiffusionPipeline" if trimmed else "StableDiffusionPipeline"
    unet, schedule, optimizer = fingerprint["unet"], config.schedule, config.optimizer
    hashes = [sha256 for name, sha256 in checkpoint["files"].items() if name.startswith(f"{weights}/diffusion")]
    return CARD.format(
        title=run_dir.resolve().name,
        pipeline_class=pipeline_class,
        load=f"{pipeline_class}.from_pretrained({arguments})",
        folder=str(target),
        height=size.height,
        width=size.width,
        sizes=", ".join(sorted(buckets)),
        steps=checkpoint["state"]["step"],
        global_batch_size=fingerprint["global_batch_size"],
        start=config.init_from or config.init_unet or f"random weights of seed {config.seed}",
        weights=_describe_weights(config, weights),
        objective=_describe_objective(config.objective),
        scheduler=scheduler,
        unet=f"blocks of {unet['block_out_channels']}, cross-attention of width {unet['cross_attention_dim']}",
        lr=optimizer.lr,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        schedule=schedule.kind,
        warmup=schedule.warmup_steps,
        precision=f"{config.precision} autocast over float32 weights",
        caption_dropout=config.objective.caption_dropout,
        streams="\n".join(
            _describe_stream(stream, own.filter or config.data.filter)
            for stream, own in zip(fingerprint["streams"], config.data.streams, strict=True)
        ),
        vae=f"{encoding.vae.name} (`{encoding.vae.sha256[:12]}`)",
        text_encoder=f"{encoding.text_encoder.name} (`{encoding.text_encoder.sha256[:12]}`)",
        tokenizer=f"{encoding.tokenizer.name} (`{encoding.tokenizer.sha256[:12]}`)",
        crop=encoding.image.crop,
        resampling=encoding.image.resampling,
        decoder=encoding.image.decoder,
        posterior=encoding.image.posterior,
        scaling_factor=encoding.image.scaling_factor,
        text=f"stored as {encoding.text.storage}, {'trimmed to their tokens' if trimmed else 'with their padding'}",
        weights_sha256=hashes[0] if hashes else "unknown",
    )


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
    return (
        f"- {stream['samples']:,} samples at {stream['bucket']} px{of}, {stream['weight']:g} passes an epoch; encoding "
        f"`{stream['encoding_id']}`, index `{stream['index_sha256'][:12]}`"
    )
