"""Small sample sets for tests."""

from functools import partial
from pathlib import Path
from typing import Any

from evaluation.sampling.job import begin_set, describe_drawing
from evaluation.sampling.model import pipeline_folder, prepare_model
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.settings import SamplingConfig
from evaluation.sampling.worker import SamplingJob, draw_on_worker
from shards.open import open_store

PROMPTS = [Prompt(f"p{i}", f"picture {i} of {i} blobs") for i in range(5)]


def sampling(**changes: Any) -> SamplingConfig:
    """Return settings for two 64 px images per prompt, with two steps, guidance 3 and parts of four images."""
    fields = {"size": "64x64", "steps": [2], "guidance": [3.0], "images_per_prompt": 2, "batch_size": 2, "part_size": 4}
    return SamplingConfig.model_validate(fields | changes)


def draw_here(pipeline: Path, place: Path, config: SamplingConfig, prompts: list[Prompt] = PROMPTS) -> Path:
    """Draw one sample set without Ray, and return its folder."""
    (setting,) = config.grid
    model = prepare_model(str(pipeline), None, "auto", open_store(place))
    drawing = describe_drawing(pipeline_folder(str(pipeline)), prompts, config, setting)
    job = SamplingJob(model, place, config.batch_size, "cpu", num_cpus=1)
    draw = partial(draw_on_worker, attempt=1, report=lambda count: None, job=job)
    for _, part in begin_set(place / "set", drawing, model, prompts, config):
        draw(part)
    return place / "set"


def pictures(place: Path) -> dict[str, bytes]:
    """Return file name → content for the images in all parts of a sample set."""
    return {path.name: path.read_bytes() for path in (place / "pictures").rglob("*") if path.is_file()}
