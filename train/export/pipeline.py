"""A run's weights, with the VAE and text encoder that its latents came from → a diffusers pipeline.

examples:
  python -m train export runs/phase2
  python -m train export runs/phase2 --weights raw --output runs/phase2/raw
  python -m train export runs/phase2 --step 100000 --output runs/phase2/export-100000
  python -m train export runs/phase2 --vae models/vae --text_encoder models/text_encoder --tokenizer models/tokenizer
"""

import json
import math
import shutil
import uuid
from pathlib import Path

import diffusers
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler
from pydantic import Field

from shards.base.config import Config, load_config
from shards.base.errors import RequestError, WorkError
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.models import hash_weights, model_folder
from shards.format.towers import TextTower, Weights
from shards.open import open_store
from train.config import TrainConfig
from train.data.spec import only_read
from train.export.card import model_card
from train.objective.paths import ObjectiveConfig, noise_scheduler
from train.run.checkpoint import Checkpoint, newest_checkpoint, step_folder, verify_checkpoint

PIPELINE_FILE = Path(__file__).with_name("trimmed_pipeline.py")


class ExportConfig(Config):
    """Write a diffusers pipeline: this run's U-Net with the VAE and text encoder that its latents came from."""

    step: int | None = Field(None, ge=0)
    """Which checkpoint; null: the newest that is whole."""
    weights: str = "auto"
    """raw, ema, or auto, the moving average where the run has one; or a folder that `train ema RUN` wrote."""
    output: Path | None = None
    """Default: RUN/export."""
    vae: str | None = None
    """Folder or hub name; default: as the latents root recorded it. Its content must be the recorded one's."""
    text_encoder: str | None = None
    """The same, of the text encoder."""
    tokenizer: str | None = None
    """The same, of the tokenizer."""


def export(arguments: list[str]) -> Path:
    """Parse the command line, and write the pipeline. Returns its folder."""
    if not arguments or arguments[0].startswith("-"):
        if set(arguments) & {"-h", "--help"}:
            load_config(ExportConfig, None, ["--help"], "train export RUN", __doc__)
        raise RequestError("train export: name the run first: `python -m train export RUN [--weights ema] …`.")
    return write_pipeline(Path(arguments[0]), load_config(ExportConfig, None, arguments[1:], "train export RUN"))


def write_pipeline(run_dir: Path, options: ExportConfig) -> Path:
    """Assemble the pipeline folder from a checkpoint; it appears whole.

    Raises:
        RequestError: no checkpoint, or an encoder that is not the one the latents were made with.
        WorkError: the checkpoint is damaged, or was removed meanwhile.
    """
    target = options.output or run_dir / "export"
    if target.exists() and not target.is_dir():
        raise RequestError(f"{target} is a file, and a pipeline is a folder. Give another --output.")
    if target.exists() and any(target.iterdir()) and not (target / "model_index.json").is_file():
        raise RequestError(
            f"{target} holds something else than a pipeline, and would be replaced. Give another --output."
        )
    checkpoint = _chosen(run_dir, options.step)
    config = load_config(TrainConfig, run_dir / "config.yaml", [], "train export")
    weights = checkpoint.weights(options.weights)
    encoding = EncodingRecord.load(open_store(config.data.streams[0].root))
    text = only_text(encoding, config.data.towers)
    parts = {
        "vae": _same_model("vae", options.vae, encoding.image.weights),
        "text_encoder": _same_model("text_encoder", options.text_encoder, text.weights),
        "tokenizer": _same_model("tokenizer", options.tokenizer, text.tokenizer),
        "unet": weights,
    }
    private = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        for name, folder in parts.items():
            _copy(folder, private / name)
        sizes = (Bucket.parse(stream.bucket).latent_hw(encoding.image.downsampling) for stream in config.data.streams)
        scheduler = sampler(config.objective, max(sizes, key=math.prod))
        scheduler.save_pretrained(private / "scheduler")
        _write_index(private, type(scheduler).__name__, text.trim)
        card = model_card(
            run_dir, target, config, checkpoint.content, encoding, text, weights.name, type(scheduler).__name__
        )
        (private / "README.md").write_text(card)
        if target.exists():
            shutil.rmtree(target)
        private.replace(target)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return target


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


def only_text(encoding: EncodingRecord, towers: list[str] | None) -> TextTower:
    """The text tower that a StableDiffusionPipeline would use: the one that a run with these `data.towers` read.

    Raises:
        RequestError: the pipeline would make other numbers of a picture or a caption than the root holds.
    """
    read = [tower for tower in only_read(encoding, towers).texts.values() if tower.states]
    stock = ("CLIPTextModel", "last", "{}", False, ((None, None),))
    if [(tower.class_name, tower.layer, tower.template, tower.masked, tower.keep) for tower in read] != [stock]:
        raise RequestError(
            f"StableDiffusionPipeline has one text encoder, a CLIPTextModel whose last states it takes unmasked, and "
            f"this run's text towers are {', '.join(encoding.texts)}. Its weights are in the checkpoint's folder "
            f"unet/, for a pipeline of your own."
        )
    (text,) = read
    if encoding.image.class_name != "AutoencoderKL" or any(encoding.image.shift):
        raise RequestError(
            f"StableDiffusionPipeline takes an AutoencoderKL without a shift; this root's is a "
            f"{encoding.image.class_name}. The weights are in the checkpoint's folder unet/."
        )
    return text


def _chosen(run_dir: Path, step: int | None) -> Checkpoint:
    checkpoint = newest_checkpoint(run_dir) if step is None else verify_checkpoint(step_folder(run_dir, step))
    if checkpoint is None:
        raise RequestError(f"{run_dir} has no complete checkpoint: there is nothing to export yet.")
    return checkpoint


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


def _write_index(folder: Path, scheduler: str, trim: bool) -> None:
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": diffusers.__version__,
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "scheduler": ["diffusers", scheduler],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
    }
    if trim:
        shutil.copyfile(PIPELINE_FILE, folder / "pipeline.py")
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
