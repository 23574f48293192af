"""Small sample sets for tests, and units of work without Ray."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evaluation.sampling.job import begin_set, describe_drawing, draw_on_worker
from evaluation.sampling.model import pipeline_folder, prepare_model
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.settings import SamplingConfig
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
    for _, part in begin_set(place / "set", drawing, model, prompts, config):
        draw_on_worker(model, place, config.batch_size, "cpu", False, part, 1, lambda count: None)
    return place / "set"


def run_here(units: Sequence[tuple[str, Any]], function: Callable[..., Any], *rest: object, attempt: int = 1) -> None:
    """Make one attempt at each unit in this process, in place of `run_units`. Units are pickled, as by Ray."""
    for _, unit in units:
        there, work = pickle.loads(pickle.dumps((function, unit)))
        there(work, attempt, lambda count: None)


def pictures(place: Path) -> dict[str, bytes]:
    """Return file name → content for the images in all parts of a sample set."""
    return {path.name: path.read_bytes() for path in (place / "pictures").rglob("*") if path.is_file()}
