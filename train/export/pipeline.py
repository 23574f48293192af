"""Export a run as a diffusers pipeline, with the VAE and the text encoders that encoded its latents, or as a single
file for ComfyUI and AUTOMATIC1111.

examples:
  python -m train export runs/phase2
  python -m train export runs/phase2 --weights raw --output runs/phase2/raw
  python -m train export runs/phase2 --format single-file --dtype float16
  python -m train export runs/phase2 --step 100000 --output runs/phase2/export-100000
  python -m train export s3://bucket/phase2 --output runs/phase2/export
  python -m train export runs/phase2 --vae models/vae --text_encoder models/text_encoder --tokenizer models/tokenizer
"""

import json
import math
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator

from shards.base.config import Config, load_config, load_for_run
from shards.base.durable import DamagedFile, atomic_folder, fsync_folder, output_errors, read_json
from shards.base.errors import RequestError, WorkError
from shards.base.store import LocalPath, Place
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.models import (
    TRAINED_ARGUMENTS,
    TRAINED_GUIDANCE,
    hash_weights,
    model_folder,
    probe_autoencoder,
)
from shards.format.normalisation import normalisation
from shards.format.towers import ImageTower, TextTower, Weights
from shards.open import open_store
from train.config import TrainConfig
from train.data.spec import keep_towers
from train.export.card import ExportedWeights, exported_weights, model_card
from train.export.components import (
    check_length,
    check_network,
    check_normalisation,
    check_same_encoders,
    check_times,
    check_unconditional,
    default_size,
    network_name,
    pipeline_texts,
    recorded_components,
    set_length,
    tokenizer_lengths,
    trained_sizes,
    write_index,
)
from train.export.evidence import copy_samples, describe_funnels, evaluations
from train.export.fold import fold_text
from train.export.prompts import check_prompts, prompt_arguments
from train.export.scheduler import check_steps, scheduler_of
from train.export.single_file import (
    check_class,
    check_scale,
    check_text_encoders,
    is_single_file,
    modelspec,
    write_single_file,
)
from train.model.backbone import PipelineConfig
from train.model.inputs import Guidance
from train.model.network import class_name, class_of
from train.run.checkpoints.checkpoint import (
    Checkpoint,
    list_checkpoints,
    newest_checkpoint,
    step_folder,
    step_of,
    verify_checkpoint,
)
from train.run.checkpoints.local_copy import copied

PIPELINE_FILE = Path(__file__).with_name("trimmed_pipeline.py")
TRIMMED = "TrimmedStableDiffusionPipeline"
"""Name of the pipeline class in that file."""


class ExportConfig(Config):
    """Export a run as a diffusers pipeline, with the VAE and the text encoders that encoded its latents."""

    step: int | None = Field(None, ge=0)
    """Step of the checkpoint to export; null: the newest complete checkpoint."""
    weights: str = "auto"
    """Weights to export: raw, ema, auto (ema if the run has it, otherwise raw), or a folder from `train ema RUN`."""
    output: LocalPath | None = None
    """Folder or file to write; default: RUN/export or RUN/export.safetensors. Required if the run is at a URL."""
    format: Literal["folder", "single-file"] = "folder"
    """`folder`: a diffusers pipeline; `single-file`: a safetensors file with all weights, in the layout that ComfyUI
    and AUTOMATIC1111 load."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Data type of the weights in a single file."""
    vae: str | None = None
    """Folder or hub name of the VAE; default: the VAE recorded in the latents root. Its content must match the
    record."""
    text_encoder: str | None = None
    """Folder or hub name of the text encoder, as for `vae`."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, as for `vae`."""
    models: dict[str, str] = Field({})
    """Folders or hub names of other components, by component, such as {"text_encoder_2": FOLDER}."""

    @model_validator(mode="after")
    def _check(self) -> "ExportConfig":
        if self.format == "folder" and self.dtype != "float32":
            raise ValueError("dtype applies only to `format: single-file`; load a folder with `torch_dtype` instead")
        if self.format == "single-file" and self.output is not None and self.output.suffix != ".safetensors":
            raise ValueError(f"a single file must be named *.safetensors, but output is {self.output}")
        return self


def export(arguments: list[str]) -> Path:
    """Run `train export`: parse the command line, write the pipeline and return its folder or file."""
    return write_pipeline(*load_for_run(ExportConfig, arguments, "train export", __doc__))


def write_pipeline(run_dir: Place, options: ExportConfig) -> Path:
    """Write a checkpoint as a pipeline folder or a single file, which is never incomplete, and return its path.

    Raises:
        RequestError: the checkpoint does not exist, an encoder differs from the one that encoded the latents, or user
            interfaces could not generate the right images from the requested single file.
        WorkError: the checkpoint is damaged, or was removed during the export.
    """
    if isinstance(run_dir, str):
        if options.output is None:
            raise RequestError(
                f"{run_dir} is a URL, but a pipeline is written to a local folder. Choose one with --output."
            )
        _check_target(options.output, options)
        with copied(run_dir, options.step) as (copy, checkpoint):
            return _write(copy, checkpoint, options.output, options, None)
    if not run_dir.is_dir():
        raise RequestError(f"The run folder {run_dir} does not exist. Pass the run_dir of a training run.")
    target = options.output or run_dir / ("export" if options.format == "folder" else "export.safetensors")
    _check_target(target, options)
    checkpoint = _load_checkpoint(run_dir, options.step)
    written = datetime.fromtimestamp(round((checkpoint.folder / "state.json").stat().st_mtime), UTC)
    return _write(run_dir, checkpoint, target, options, written)


def _write(
    run_dir: Path, checkpoint: Checkpoint, target: Path, options: ExportConfig, written: datetime | None
) -> Path:
    """Write a checkpoint, which was written at a time that may be unknown."""
    config = load_config(TrainConfig, run_dir / "config.yaml", [], "train export")
    exported = exported_weights(config, checkpoint, checkpoint.weights(options.weights))
    if options.format == "folder":
        return _write_pipeline(run_dir, config, checkpoint, target, options, exported)
    encoding = EncodingRecord.load(open_store(config.data.streams[0].root))
    is_trimmed = config.backbone.pipeline.class_name == PipelineConfig().class_name
    is_trimmed = is_trimmed and pipeline_texts(encoding, config)[0].trim
    # fails before anything is copied
    check_class(TRIMMED if is_trimmed else config.backbone.pipeline.class_name, config.objective)
    check_scale(config.backbone.pipeline.class_name, encoding.image.scale, encoding.image.shift)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        pipeline = _write_pipeline(run_dir, config, checkpoint, Path(name) / "export", options, exported)
        fields = modelspec(
            pipeline,
            title=run_dir.resolve().name,
            resolution=str(
                max(trained_sizes(checkpoint.content["fingerprint"]), key=lambda size: size.width * size.height)
            ),
            prediction=config.objective.prediction,
            date=written,
            description=f"Trained with latentmill, {checkpoint.tag} after step {exported.step}",
        )
        private = Path(name) / target.name
        write_single_file(pipeline, private, fields, getattr(torch, options.dtype))
        private.replace(target)
        fsync_folder(target.parent)
    return target


def _write_pipeline(
    run_dir: Path,
    config: TrainConfig,
    checkpoint: Checkpoint,
    target: Path,
    options: ExportConfig,
    exported: ExportedWeights,
) -> Path:
    weights = checkpoint.weights(options.weights)
    encoding = EncodingRecord.load(open_store(config.data.streams[0].root))
    pipeline = config.backbone.pipeline
    check_network(pipeline, checkpoint.fingerprint["backbone"]["class"])
    texts = pipeline_texts(encoding, config)
    recorded = recorded_components(pipeline, encoding.image, texts)
    is_stock = pipeline.class_name == PipelineConfig().class_name
    if not is_stock:
        _check_texts(config, encoding)
    _check_conventions(config, encoding)
    given = {"vae": options.vae, "text_encoder": options.text_encoder, "tokenizer": options.tokenizer} | options.models
    if unknown := sorted(set(options.models) - set(recorded)):
        raise RequestError(
            f"`models` names {', '.join(unknown)}, but the components of {pipeline.class_name} are "
            f"{', '.join(recorded)}. Choose from these."
        )
    components = {name: _matching_model(name, given.get(name), recorded) for name, recorded in recorded.items()}
    _check_vae(components["vae"], encoding.image)
    lengths = tokenizer_lengths(pipeline, recorded, texts)
    if options.format == "single-file":
        for name, tokens in lengths.items():
            check_length(components[name], tokens)
        check_text_encoders(pipeline.class_name, components)
    sizes = (Bucket.parse(stream.bucket).latent_hw(encoding.image.downsampling) for stream in config.data.streams)
    latent_hw = max(sizes, key=math.prod)
    check_steps(pipeline, scheduler_of(pipeline, config.objective, latent_hw))
    with atomic_folder(target) as private:
        for name, folder in components.items():
            _copy(folder, private / name)
        for name, tokens in lengths.items():
            set_length(private / name, tokens)
        _copy(weights, private / network_name(pipeline))
        read = keep_towers(encoding, config.data.towers).texts
        trained = checkpoint.content["fingerprint"].get("text_projection")
        projection = fold_text(private / network_name(pipeline), config.backbone.resolved(read), read, trained)
        _complete_config(private / network_name(pipeline) / "config.json", config, checkpoint, encoding, texts)
        scheduler = scheduler_of(pipeline, config.objective, latent_hw)
        scheduler.save_pretrained(private / "scheduler")
        trimmed = is_stock and texts[0].trim
        own = [PIPELINE_FILE.stem, TRIMMED] if trimmed else None
        write_index(private, pipeline, encoding.image.class_name, texts, type(scheduler).__name__, own)
        if trimmed:
            shutil.copyfile(PIPELINE_FILE, private / PIPELINE_FILE.name)
        if options.format == "single-file":
            return target  # it has no card
        samples = copy_samples(run_dir, evaluations(run_dir, checkpoint.content, exported.name), private)
        funnel = describe_funnels(stream.root for stream in config.data.streams)
        described = (config, checkpoint.content, encoding, texts, exported, scheduler)
        widths = None if projection is None else (projection.shape[0], projection.shape[1])
        card = model_card(run_dir, target, *described, trimmed, samples, funnel, widths)
        (private / "README.md").write_text(card)
    return target


def check_pipeline(config: TrainConfig, encoding: EncodingRecord) -> None:
    """Check that a run on latents of this encoding can be exported as the pipeline that the config names.

    Raises:
        RequestError: the class does not exist, it takes other networks, its text encoders differ from the towers that
            the network reads, it encodes prompts, scales timesteps or normalises latents differently from training, its
            scheduler cannot be built, or it cannot sample with this scheduler.
    """
    pipeline = config.backbone.pipeline
    # the default pipeline is checked only at export, because a network can be trained without any pipeline
    if pipeline.class_name != PipelineConfig().class_name:
        check_network(pipeline, class_of(read_json(config.network), config.network).__name__)
        recorded_components(pipeline, encoding.image, pipeline_texts(encoding, config))
        _check_texts(config, encoding)
        _check_conventions(config, encoding)
    check_steps(pipeline, scheduler_of(pipeline, config.objective))


def _check_texts(config: TrainConfig, encoding: EncodingRecord) -> None:
    """Check that a named pipeline has the text encoders of training, and uses them in the same way."""
    check_same_encoders(encoding, config)
    texts = keep_towers(encoding, config.data.towers).texts
    check_prompts(config.backbone.resolved(texts), texts, config.objective.caption_dropout)


def _check_conventions(config: TrainConfig, encoding: EncodingRecord) -> None:
    """Check that the pipeline has the unconditional input, the scale of timesteps and the latents of training."""
    check_unconditional(config)
    check_times(config)
    check_normalisation(config.backbone.pipeline, encoding.image)


def _check_target(target: Path, options: ExportConfig) -> None:
    """Check that the export may replace `target`: it is absent, empty, or an earlier export, in a writable folder.

    Raises:
        RequestError: `target` contains anything else, or cannot be written.
    """
    if options.format == "single-file":
        if target.is_dir():
            raise RequestError(f"{target} is a folder, but --format single-file writes a file. Give another --output.")
        if target.exists() and not is_single_file(target):
            raise RequestError(f"{target} exists and was not written by this command. Give another --output.")
    elif target.exists() and not target.is_dir():
        raise RequestError(f"{target} is a file, but a pipeline is written to a folder. Give a different --output.")
    elif target.exists() and any(target.iterdir()) and not (target / "model_index.json").is_file():
        raise RequestError(
            f"{target} contains files that are not part of an exported pipeline, and the export would delete them. "
            f"Give a different --output."
        )
    # a file replaces a link, but a folder replaces the folder that the link names
    written = target.absolute() if options.format == "single-file" else target.resolve()
    with output_errors(f"{target} cannot be written", "With --output, choose a location that you can write to."):
        folder = next(parent for parent in (written.parent, *written.parent.parents) if parent.exists())
        tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder).cleanup()


def _load_checkpoint(run_dir: Path, step: int | None) -> Checkpoint:
    """Return the verified checkpoint for a step, or the newest intact checkpoint if no step is given."""
    steps = [step_of(folder) for folder in list_checkpoints(run_dir)]
    if step is not None and step not in steps:
        raise RequestError(
            f"{run_dir} has no checkpoint at step {step}. Available steps: {', '.join(map(str, steps)) or 'none'}."
        )
    try:
        checkpoint = newest_checkpoint(run_dir) if step is None else verify_checkpoint(step_folder(run_dir, step))
    except DamagedFile as error:
        raise DamagedFile(f"{error} Restore the checkpoint from a backup, or export a different step.") from error
    if checkpoint is None:
        raise RequestError(
            f"{run_dir} has no complete checkpoint, so there is nothing to export. Pass the run_dir of a training run, "
            f"and wait for its first checkpoint."
        )
    return checkpoint


def _complete_config(
    path: Path, config: TrainConfig, checkpoint: Checkpoint, encoding: EncodingRecord, texts: list[TextTower]
) -> None:
    """Add to the exported network's config.json the training settings that a sampler needs.

    diffusers ignores fields whose names begin with an underscore, but keeps them in the file.
    """
    fields = json.loads(path.read_text())
    if size := default_size(checkpoint.content["fingerprint"], class_name(fields)):
        fields["sample_size"] = size.height // encoding.image.downsampling
    for item in config.backbone.inputs.values():
        if isinstance(item, Guidance):
            fields[TRAINED_GUIDANCE] = item.scale
    fields.pop(TRAINED_ARGUMENTS, None)  # those of another export, if backbone.config is its config.json
    if arguments := prompt_arguments(config.backbone.pipeline, texts):
        fields[TRAINED_ARGUMENTS] = arguments
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _copy(folder: Path, target: Path) -> None:
    """Copy a folder.

    Raises:
        WorkError: the folder was removed while it was being copied, or a file in it cannot be copied.
    """
    try:
        shutil.copytree(folder, target, copy_function=shutil.copyfile)
    except (FileNotFoundError, shutil.Error) as error:
        if isinstance(error, shutil.Error) and folder.exists():
            _, _, reason = error.args[0][0]  # of the first file
            raise WorkError(
                f"A part of the export cannot be copied: {reason}. Fix this, and run the same command again."
            ) from error
        raise WorkError(
            f"{folder} was removed while it was being read, because a run keeps only its newest checkpoints. Set "
            f"checkpoint.keep or checkpoint.keep_every to keep those that you want to export."
        ) from error


def _matching_model(name: str, given: str | None, recorded: Weights) -> Path:
    """Return the folder of component `name`: the given model, or the recorded model if none is given.

    Raises:
        RequestError: the given model is not the model that encoded the latents.
    """
    folder = model_folder(given or recorded.name)
    found = hash_weights(str(folder), folder)
    if found.sha256 != recorded.sha256:
        has_own_option = name in ExportConfig.model_fields
        option = f"--{name} FOLDER" if has_own_option else f"""--models '{{"{name}": "FOLDER"}}'"""
        raise RequestError(
            f"{folder} is not the {name} that encoded the latents ({recorded.name}): its content has the "
            f"hash {found.sha256[:12]}… instead of {recorded.sha256[:12]}…. Pass the right model with {option}."
        )
    return folder


def _check_vae(folder: Path, image: ImageTower) -> None:
    """Check that the VAE's config normalises latents as in training. Its content hash does not cover this.

    Raises:
        RequestError: the scale or the shift differs.
    """
    vae = probe_autoencoder(image.class_name, read_json(folder / "config.json")).vae
    found = normalisation(vae.config, image.channels, f"{folder}/config.json")
    if found != {"scale": image.scale, "shift": image.shift}:
        raise RequestError(
            f"{folder}/config.json normalises latents with scale {found['scale']} and shift {found['shift']}, but the "
            f"network was trained with scale {image.scale} and shift {image.shift} (encoding.json), so the pipeline "
            f"would decode its latents wrongly. Pass a copy of the VAE with the normalisation of training with --vae "
            f"FOLDER."
        )
