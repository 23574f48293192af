"""What a worker does: load the pipeline once, then draw one part after another."""

import functools
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from evaluation.parts import Receipt, commit_part
from evaluation.sampling.model import Model, opened
from evaluation.sampling.pipeline import Sample, draw, load_pipeline, sampler_of, to_bytes
from evaluation.sampling.settings import Codec, Drawing
from evaluation.units import ending_broken_processes
from shards.base.device import is_accelerator
from shards.open import open_store

PICTURES = "pictures"
ENCODING_THREADS = 4


@dataclass(frozen=True)
class Part:
    """A unit of work: some samples of one set."""

    name: str
    output: Path | str
    """The sample set."""
    drawing: Drawing
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Recipe:
    model: Model
    output: Path | str
    """Where a run's exported model is."""
    batch_size: int
    device: str
    num_cpus: float
    trust_remote_code: bool = False


def draw_on_worker(part: Part, attempt: int, report: Callable[[int], None], recipe: Recipe) -> Receipt:
    """One attempt at one part; `report` hears how many pictures were drawn."""
    torch.set_num_threads(1 if is_accelerator(recipe.device) else max(1, int(recipe.num_cpus)))
    with ending_broken_processes():
        pipeline, own = load_model(
            recipe.model, recipe.output, recipe.device, part.drawing.precision, recipe.trust_remote_code
        )
        pipeline.scheduler = sampler_of(own, part.drawing.setting.sampler)
        make = functools.partial(draw_part, part, pipeline, recipe.batch_size, report)
        return commit_part(open_store(part.output), PICTURES, part.name, make)


@functools.lru_cache(maxsize=1)
def load_model(
    model: Model, output: Path | str, device: str, precision: Any, trust_remote_code: bool
) -> tuple[Any, Any]:
    """The pipeline and its own scheduler; kept for the next part."""
    with opened(model, open_store(output)) as folder:
        pipeline = load_pipeline(folder, device, precision, trust_remote_code)
    return pipeline, pipeline.scheduler


def draw_part(part: Part, pipeline: Any, batch_size: int, report: Callable[[int], None], folder: Path) -> Receipt:
    """Every picture of a part into `folder`, encoded beside the drawing."""
    with ThreadPoolExecutor(ENCODING_THREADS) as threads:
        writing = []
        for start in range(0, len(part.samples), batch_size):
            batch = part.samples[start : start + batch_size]
            pictures = to_bytes(draw(pipeline, filled_up(batch, batch_size), part.drawing)).numpy()
            for sample, pixels in zip(batch, pictures, strict=False):
                path = folder / file_name(sample.number, part.drawing.codec)
                writing.append(threads.submit(write_picture, path, pixels, part.drawing.codec))
            report(start + len(batch))
        for written in writing:
            written.result()
    ids = [[sample.prompt.id, sample.index] for sample in part.samples]
    where = {"host": socket.gethostname(), "pid": os.getpid(), "batch_size": batch_size}
    return {"drawing": part.drawing.id, "samples": ids, "made_by": where}


def filled_up(batch: Sequence[Sample], batch_size: int) -> list[Sample]:
    """A batch of one size whatever the part's length: a device picks its kernels by shape."""
    return [*batch, *[batch[-1]] * (batch_size - len(batch))]


def file_name(number: int, codec: Codec) -> str:
    return f"{number:07d}.{codec}"


def write_picture(path: Path, pixels: np.ndarray, codec: Codec) -> None:
    """(height, width, 3) uint8 as a file that keeps every pixel, without metadata."""
    options: dict[str, Any] = {"lossless": True, "exact": True} if codec == "webp" else {}
    Image.fromarray(pixels).save(path, **options)
