"""A run's weights, with the VAE and text encoders that its latents came from → a diffusers pipeline.

examples:
  python -m train export runs/phase2
  python -m train export runs/phase2 --weights raw --output runs/phase2/raw
  python -m train export runs/phase2 --step 100000 --output runs/phase2/export-100000
  python -m train export s3://bucket/phase2 --output runs/phase2/export
  python -m train export runs/phase2 --vae models/vae --text_encoder models/text_encoder --tokenizer models/tokenizer
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import diffusers
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler
from pydantic import Field

from shards.base.config import Config, load_config, load_for_run
from shards.base.durable import atomic_folder
from shards.base.errors import RequestError, WorkError
from shards.base.store import Place
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.models import TRAINED_GUIDANCE, hash_weights, model_folder
from shards.format.towers import Weights
from shards.open import open_store
from train.config import TrainConfig
from train.export.card import model_card
from train.export.components import (
    check_same_encoders,
    check_unconditional,
    default_size,
    network_name,
    pipeline_texts,
    recorded_components,
    write_index,
)
from train.model.backbone import PipelineConfig
from train.model.inputs import Guidance
from train.model.unet import class_name
from train.objective.config import ObjectiveConfig
from train.objective.paths import noise_scheduler
from train.run.saving.checkpoint import Checkpoint, newest_checkpoint, step_folder, verify_checkpoint
from train.run.saving.local_copy import copied

PIPELINE_FILE = Path(__file__).with_name("trimmed_pipeline.py")
TRIMMED = "TrimmedStableDiffusionPipeline"
"""The class in that file."""


class ExportConfig(Config):
    """Write a diffusers pipeline: this run's weights with the VAE and text encoders that its latents came from."""

    step: int | None = Field(None, ge=0)
    """Which checkpoint; null: the newest that is whole."""
    weights: str = "auto"
    """raw, ema, or auto, the moving average where the run has one; or a folder that `train ema RUN` wrote."""
    output: Path | None = None
    """Default: RUN/export; of a run at an address it is to be given."""
    vae: str | None = None
    """Folder or hub name; default: as the latents root recorded it. Its content must be the recorded one's."""
    text_encoder: str | None = None
    """The same, of the text encoder."""
    tokenizer: str | None = None
    """The same, of the tokenizer."""
    models: dict[str, str] = Field({})
    """The same, of any of the pipeline's components: {"text_encoder_2": FOLDER}."""


def export(arguments: list[str]) -> Path:
    """Parse the command line, and write the pipeline. Returns its folder."""
    return write_pipeline(*load_for_run(ExportConfig, arguments, "train export", __doc__))


def write_pipeline(run_dir: Place, options: ExportConfig) -> Path:
    """Assemble the pipeline folder from a checkpoint; it appears whole.

    Raises:
        RequestError: no checkpoint, or an encoder that is not the one the latents were made with.
        WorkError: the checkpoint is damaged, or was removed meanwhile.
    """
    if isinstance(run_dir, str):
        if options.output is None:
            raise RequestError(f"{run_dir} is an address, and a pipeline a folder. Give --output FOLDER for it.")
        _check_target(options.output)
        with copied(run_dir, options.step) as (copy, checkpoint):
            return _write_pipeline(copy, checkpoint, options.output, options)
    if not run_dir.is_dir():
        raise RequestError(f"There is no run folder {run_dir}. Give the run_dir of a training run.")
    target = options.output or run_dir / "export"
    _check_target(target)
    return _write_pipeline(run_dir, _chosen(run_dir, options.step), target, options)


def _write_pipeline(run_dir: Path, checkpoint: Checkpoint, target: Path, options: ExportConfig) -> Path:
    config = load_config(TrainConfig, run_dir / "config.yaml", [], "train export")
    weights = checkpoint.weights(options.weights)
    encoding = EncodingRecord.load(open_store(config.data.streams[0].root))
    texts = pipeline_texts(encoding, config)
    pipeline = config.backbone.pipeline
    recorded = recorded_components(pipeline, encoding.image, texts)
    if pipeline.class_name != PipelineConfig().class_name:
        check_same_encoders(encoding, config)
    check_unconditional(config)
    given = {"vae": options.vae, "text_encoder": options.text_encoder, "tokenizer": options.tokenizer} | options.models
    if unknown := sorted(set(options.models) - set(recorded)):
        raise RequestError(
            f"models names {', '.join(unknown)}; {pipeline.class_name} has {', '.join(recorded)} of them."
        )
    components = {name: _same_model(name, given.get(name), recorded) for name, recorded in recorded.items()}
    with atomic_folder(target) as private:
        for name, folder in components.items():
            _copy(folder, private / name)
        _copy(weights, private / network_name(pipeline))
        _complete_config(private / network_name(pipeline) / "config.json", config, checkpoint, encoding)
        sizes = (Bucket.parse(stream.bucket).latent_hw(encoding.image.downsampling) for stream in config.data.streams)
        scheduler = scheduler_of(pipeline, config.objective, max(sizes, key=math.prod))
        scheduler.save_pretrained(private / "scheduler")
        trimmed = pipeline.class_name == PipelineConfig().class_name and texts[0].trim
        own = [PIPELINE_FILE.stem, TRIMMED] if trimmed else None
        write_index(private, pipeline, encoding.image.class_name, texts, type(scheduler).__name__, own)
        if trimmed:
            shutil.copyfile(PIPELINE_FILE, private / PIPELINE_FILE.name)
        card = model_card(
            run_dir, target, config, checkpoint.content, encoding, texts, weights.name, scheduler, trimmed
        )
        (private / "README.md").write_text(card)
    return target


def check_pipeline(config: TrainConfig, encoding: EncodingRecord) -> None:
    """See that the pipeline which the config names can be made of a run over such latents.

    Raises:
        RequestError: it cannot: there is no such class, its text encoders are not the towers that the network reads, or
            its scheduler cannot be made.
    """
    pipeline = config.backbone.pipeline
    if pipeline.class_name != PipelineConfig().class_name:  # a U-Net under any text tower is trained, and not exported
        recorded_components(pipeline, encoding.image, pipeline_texts(encoding, config))
        check_same_encoders(encoding, config)
        check_unconditional(config)
    scheduler_of(pipeline, config.objective)


def sampler(
    objective: ObjectiveConfig, latent_hw: tuple[int, int] = (64, 64)
) -> DDIMScheduler | DPMSolverMultistepScheduler:
    """A deterministic sampler over the noise that the U-Net was trained under, set up as SD's are.

    Its steps are shifted as training's times were; where that depends on the picture's size, as those of `latent_hw`.

    Flow matching's is DPM-Solver++ along the straight line, where its first order is Euler's method: unlike diffusers'
    FlowMatchEulerDiscreteScheduler it has what StableDiffusionPipeline asks of a scheduler, so the stock one works.
    """
    if objective.prediction == "flow_matching":
        return DPMSolverMultistepScheduler(
            num_train_timesteps=objective.num_train_timesteps,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            **objective.shift.scheduler_settings("DPMSolverMultistepScheduler", latent_hw),
            steps_offset=1,  # unused here; diffusers warns of any other
        )
    config = noise_scheduler(objective).config
    # a schedule that ends in pure noise must be sampled from its very last step (Lin et al., 2023)
    spacing = {"timestep_spacing": "trailing"} if objective.zero_terminal_snr else {"steps_offset": 1}
    return DDIMScheduler.from_config(config, clip_sample=False, set_alpha_to_one=False, **spacing)


def scheduler_of(pipeline: PipelineConfig, objective: ObjectiveConfig, latent_hw: tuple[int, int] = (64, 64)) -> Any:
    """The scheduler that the config names, or else `sampler`'s. It steps where training's times were shifted to, as
    pictures of the latents (h, w) ask for, unless its settings say otherwise.

    Raises:
        RequestError: diffusers has none of that name, or it does not take these settings.
    """
    if pipeline.scheduler is None:
        return sampler(objective, latent_hw)
    try:
        return getattr(diffusers, pipeline.scheduler)(
            num_train_timesteps=objective.num_train_timesteps,
            **objective.shift.scheduler_settings(pipeline.scheduler, latent_hw) | pipeline.scheduler_settings,
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(
            f"backbone.pipeline.scheduler: {pipeline.scheduler} with {pipeline.scheduler_settings} cannot be made: "
            f"{error}. Give a scheduler of diffusers and settings that it has."
        ) from error


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise RequestError(f"{target} is a file, and a pipeline is a folder. Give another --output.")
    if target.exists() and any(target.iterdir()) and not (target / "model_index.json").is_file():
        raise RequestError(
            f"{target} holds something else than a pipeline, and would be replaced. Give another --output."
        )


def _chosen(run_dir: Path, step: int | None) -> Checkpoint:
    checkpoint = newest_checkpoint(run_dir) if step is None else verify_checkpoint(step_folder(run_dir, step))
    if checkpoint is None:
        raise RequestError(f"{run_dir} has no complete checkpoint: there is nothing to export yet.")
    return checkpoint


def _complete_config(path: Path, config: TrainConfig, checkpoint: Checkpoint, encoding: EncodingRecord) -> None:
    """Add what a sampler must know of training to the exported network's config.json.

    diffusers keeps fields that begin with an underscore, and ignores them.
    """
    fields = json.loads(path.read_text())
    if size := default_size(checkpoint.content["fingerprint"], class_name(fields)):
        fields["sample_size"] = size.height // encoding.image.downsampling
    for item in config.backbone.inputs.values():
        if isinstance(item, Guidance):
            fields[TRAINED_GUIDANCE] = item.scale
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _copy(folder: Path, target: Path) -> None:
    try:
        shutil.copytree(folder, target, copy_function=shutil.copyfile)
    except (FileNotFoundError, shutil.Error) as error:
        if folder.exists():
            raise
        raise WorkError(
            f"{folder} was removed while it was read: a run keeps its newest checkpoints alone. Set checkpoint.keep or "
            f"checkpoint.keep_every so that those to export stay."
        ) from error


def _same_model(kind: str, given: str | None, recorded: Weights) -> Path:
    folder = model_folder(given or recorded.name)
    found = hash_weights(str(folder), folder)
    if found.sha256 != recorded.sha256:
        raise RequestError(
            f"{folder} is not the {kind} that the latents were made with ({recorded.name}): its content hashes to "
            f"{found.sha256[:12]}…, not {recorded.sha256[:12]}…. Give the right one with --{kind} FOLDER."
        )
    return folder
