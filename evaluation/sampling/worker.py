"""A sampling worker, which loads the pipeline once and then draws one part after another."""

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

from evaluation.parts import PartReceipt, commit_part
from evaluation.sampling.model import Model, open_pipeline
from evaluation.sampling.pipeline import Sample, draw, load_pipeline, sampler_of, to_bytes
from evaluation.sampling.settings import Codec, Drawing
from evaluation.units import ending_broken_processes
from shards.base.device import is_accelerator
from shards.open import open_store

PICTURES = "pictures"
ENCODING_THREADS = 4


@dataclass(frozen=True)
class SamplePart:
    """A unit of work: some samples of one sample set."""

    name: str
    output: Path | str
    """Folder or URL of the sample set."""
    drawing: Drawing
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class SamplingJob:
    """Settings that all parts of a job share."""

    model: Model
    output: Path | str
    """Folder or URL that contains a run's exported model."""
    batch_size: int
    device: str
    num_cpus: float
    trust_remote_code: bool = False


def draw_on_worker(part: SamplePart, attempt: int, report: Callable[[int], None], job: SamplingJob) -> PartReceipt:
    """Make one attempt at one part, and report the number of images drawn so far."""
    torch.set_num_threads(1 if is_accelerator(job.device) else max(1, int(job.num_cpus)))
    with ending_broken_processes():
        pipeline, own_scheduler = cached_pipeline(
            job.model, job.output, job.device, part.drawing.precision, job.trust_remote_code
        )
        pipeline.scheduler = sampler_of(own_scheduler, part.drawing.setting.sampler)
        write = functools.partial(draw_part, part, pipeline, job.batch_size, report)
        return commit_part(open_store(part.output), PICTURES, part.name, write)


@functools.lru_cache(maxsize=1)
def cached_pipeline(
    model: Model, output: Path | str, device: str, precision: Any, trust_remote_code: bool
) -> tuple[Any, Any]:
    """Load the pipeline, and return it with its own scheduler. Both are cached for the worker's next part."""
    with open_pipeline(model, open_store(output)) as folder:
        pipeline = load_pipeline(folder, device, precision, trust_remote_code)
    return pipeline, pipeline.scheduler


def draw_part(
    part: SamplePart, pipeline: Any, batch_size: int, report: Callable[[int], None], folder: Path
) -> PartReceipt:
    """Draw the images of a part, write them to `folder`, and return the receipt's fields.

    Threads encode the files of one batch while the next one is drawn.
    """
    with ThreadPoolExecutor(ENCODING_THREADS) as threads:
        pending = []
        for start in range(0, len(part.samples), batch_size):
            batch = part.samples[start : start + batch_size]
            pictures = to_bytes(draw(pipeline, pad_batch(batch, batch_size), part.drawing)).numpy()
            for sample, pixels in zip(batch, pictures, strict=False):
                path = folder / file_name(sample.number, part.drawing.codec)
                pending.append(threads.submit(write_picture, path, pixels, part.drawing.codec))
            report(start + len(batch))
        for future in pending:
            future.result()
    ids = [[sample.prompt.id, sample.index] for sample in part.samples]
    made_by = {"host": socket.gethostname(), "pid": os.getpid(), "batch_size": batch_size}
    return {"drawing": part.drawing.id, "samples": ids, "made_by": made_by}


def pad_batch(batch: Sequence[Sample], batch_size: int) -> list[Sample]:
    """Repeat the last sample until the batch is full, because devices choose kernels by shape."""
    return [*batch, *[batch[-1]] * (batch_size - len(batch))]


def file_name(number: int, codec: Codec) -> str:
    """Return the file name of a sample."""
    return f"{number:07d}.{codec}"


def write_picture(path: Path, pixels: np.ndarray, codec: Codec) -> None:
    """Write an image, (height, width, 3) uint8, losslessly and without metadata."""
    options: dict[str, Any] = {"lossless": True, "exact": True} if codec == "webp" else {}
    Image.fromarray(pixels).save(path, **options)
