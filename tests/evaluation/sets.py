"""Sample sets for tests: a few prompts, drawn in this process or by the command."""

from functools import partial
from pathlib import Path
from typing import Any

from evaluation.sampling.job import begin_set, describe_drawing
from evaluation.sampling.model import make_ready, pipeline_folder
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.settings import SamplingConfig
from evaluation.sampling.worker import Recipe, draw_on_worker
from shards.open import open_store

PROMPTS = [Prompt(f"p{i}", f"picture {i} of {i} blobs") for i in range(5)]


def sampling(**changes: Any) -> SamplingConfig:
    """Two pictures of 64 px for each prompt, in two steps, guided by 3; parts of four."""
    fields = {"size": "64x64", "steps": [2], "guidance": [3.0], "images_per_prompt": 2, "batch_size": 2, "part_size": 4}
    return SamplingConfig.model_validate(fields | changes)


def draw_here(pipeline: Path, place: Path, config: SamplingConfig, prompts: list[Prompt] = PROMPTS) -> Path:
    """One sample set, without Ray. Returns its folder."""
    (setting,) = config.grid
    model = make_ready(str(pipeline), None, "auto", open_store(place))
    drawing = describe_drawing(pipeline_folder(str(pipeline)), prompts, config, setting)
    recipe = Recipe(model, place, config.batch_size, "cpu", num_cpus=1)
    draw = partial(draw_on_worker, attempt=1, report=lambda count: None, recipe=recipe)
    for _, part in begin_set(place / "set", drawing, model, prompts, config):
        draw(part)
    return place / "set"


def pictures(place: Path) -> dict[str, bytes]:
    """Every picture of a sample set by its file's name, whatever part it is in."""
    return {path.name: path.read_bytes() for path in (place / "pictures").rglob("*") if path.is_file()}
