"""Draw a sample set for every sampling setting: find the missing parts, and draw them on Ray workers."""

import functools
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cluster.fleet import FleetConfig
from cluster.start import precision_on_worker
from evaluation.parts import PartReceipt, check_same, commit_part, create_once, read_receipts, read_sealed
from evaluation.sampling.model import Model, open_pipeline
from evaluation.sampling.pipeline import (
    describe_scheduler,
    draw,
    has_guidance_input,
    load_pipeline,
    load_scheduler,
    sampler_of,
    to_bytes,
)
from evaluation.sampling.prompts import Prompt, prompts_sha256
from evaluation.sampling.sets import PICTURES, RECORD, PlannedImage, below, file_name, list_samples, split
from evaluation.sampling.settings import Codec, Drawing, SamplingConfig, Setting
from evaluation.units import keep_last, run_units
from shards.base.device import Precision, worker_device
from shards.base.errors import RequestError
from shards.open import open_store

ENCODING_THREADS = 4


@dataclass(frozen=True)
class SamplePart:
    """A unit of work: some samples of one sample set."""

    name: str
    output: Path | str
    """Folder or URL of the sample set."""
    drawing: Drawing
    samples: tuple[PlannedImage, ...]


def draw_sets(
    model: Model,
    prompts: list[Prompt],
    config: SamplingConfig,
    output: Path | str,
    workers: FleetConfig,
    trust_remote_code: bool,
) -> list[Path | str]:
    """Draw the missing parts of every setting's sample set, and return where each sample set is stored.

    Raises:
        RequestError: an existing sample set has different prompts or settings, or the model does not support a setting.
        WorkError: some parts failed.
    """
    store = open_store(output)
    config = config.model_copy(update={"precision": resolve_precision(config, output, workers)})
    with open_pipeline(model, store) as folder:
        drawings = [describe_drawing(folder, prompts, config, setting) for setting in config.grid]
    units: list[tuple[str, SamplePart]] = []
    places = []
    for drawing in drawings:
        place = below(output, str(drawing.setting))
        places.append(place)
        units += begin_set(place, drawing, model, prompts, config)
    device = worker_device(workers.num_gpus)
    function = functools.partial(draw_on_worker, model, output, config.batch_size, device, trust_remote_code)
    run_units(units, function, workers, "sample")
    return places


def resolve_precision(config: SamplingConfig, output: Path | str, workers: FleetConfig) -> Precision:
    """Resolve `auto`: reuse the precision of an existing sample set, or else choose one that suits the workers."""
    precision = config.precision
    if precision == "auto":
        records = (read_sealed(open_store(below(output, str(setting))), RECORD) for setting in config.grid)
        precision = next((record["drawing"]["precision"] for record in records if record), precision)
    return precision_on_worker(precision, workers)


def describe_drawing(folder: Path, prompts: list[Prompt], config: SamplingConfig, setting: Setting) -> Drawing:
    """Describe everything that a setting's images depend on, except for the model."""
    own_scheduler = load_scheduler(folder)
    assert config.precision != "auto", "call resolve_precision first"
    if config.guidance_input is not None and not has_guidance_input(folder):
        raise RequestError(
            f"sampling.guidance_input is {config.guidance_input:g}, but the network in {folder} takes no guidance "
            f"scale as an input, so the setting would have no effect. Remove sampling.guidance_input. For "
            f"classifier-free guidance, set sampling.guidance instead."
        )
    copied = {"seed", "images_per_prompt", "size", "negative_prompt", "guidance_input", "precision", "codec"}
    return Drawing(
        prompts=prompts_sha256(prompts),
        num_samples=len(prompts) * config.images_per_prompt,
        setting=setting,
        scheduler=describe_scheduler(sampler_of(own_scheduler, setting.sampler)),
        **config.model_dump(include=copied),
    )


def begin_set(
    place: Path | str, drawing: Drawing, model: Model, prompts: list[Prompt], config: SamplingConfig
) -> list[tuple[str, SamplePart]]:
    """Record the settings of a new sample set, or check those of an existing one, and return the missing parts."""
    store = open_store(place)
    content = {
        "drawing": drawing.as_json(),
        "drawing_id": drawing.id,
        "model": asdict(model),
        "part_size": config.part_size,
        "prompts": [asdict(prompt) for prompt in prompts],
    }
    check_same(store, create_once(store, RECORD, lambda: content), content, "a sample set", "--output")
    chunks = split(list_samples(prompts, config.images_per_prompt), config.part_size)
    parts = [SamplePart(name, place, drawing, tuple(chunk)) for name, chunk in chunks]
    committed = read_receipts(store, PICTURES, [part.name for part in parts])
    return [(f"{drawing.setting} {part.name}", part) for part in parts if part.name not in committed]


def draw_on_worker(
    model: Model,
    output: Path | str,
    batch_size: int,
    device: str,
    trust_remote_code: bool,
    part: SamplePart,
    attempt: int,
    report: Callable[[int], None],
) -> PartReceipt:
    """Make one attempt at one part: draw its images, and commit them.

    Args:
        output: folder or URL that contains a run's exported model.
        report: called with the number of images drawn so far.
    """
    store = open_store(part.output)
    if found := read_receipts(store, PICTURES, [part.name]):
        return found[part.name]  # another job has drawn it, and a watcher may have deleted the model since
    pipeline, own_scheduler = cached_pipeline(model, output, device, part.drawing.precision, trust_remote_code)
    pipeline.scheduler = sampler_of(own_scheduler, part.drawing.setting.sampler)
    write = functools.partial(draw_part, part, pipeline, batch_size, report)
    return commit_part(store, PICTURES, part.name, write)


@keep_last
def cached_pipeline(
    model: Model, output: Path | str, device: str, precision: Any, trust_remote_code: bool
) -> tuple[Any, Any]:
    """Load the pipeline, and return it together with its own scheduler. Both are kept for the worker's next part."""
    with open_pipeline(model, open_store(output)) as folder:
        pipeline = load_pipeline(folder, device, precision, trust_remote_code)
    return pipeline, pipeline.scheduler


def draw_part(
    part: SamplePart, pipeline: Any, batch_size: int, report: Callable[[int], None], folder: Path
) -> PartReceipt:
    """Draw the images of a part, write them to `folder`, and return the receipt's fields.

    Threads encode the files of one batch while the next batch is drawn.
    """
    with ThreadPoolExecutor(ENCODING_THREADS) as threads:
        pending = []
        for start in range(0, len(part.samples), batch_size):
            batch = part.samples[start : start + batch_size]
            # all batches have the same size, because devices choose kernels by shape
            padded = [*batch, *[batch[-1]] * (batch_size - len(batch))]
            pictures = to_bytes(draw(pipeline, padded, part.drawing)).numpy()
            for sample, pixels in zip(batch, pictures, strict=False):
                path = folder / file_name(sample.number, part.drawing.codec)
                pending.append(threads.submit(write_picture, path, pixels, part.drawing.codec))
            report(start + len(batch))
        for future in pending:
            future.result()
    ids = [[sample.prompt.id, sample.index] for sample in part.samples]
    made_by = {"host": socket.gethostname(), "pid": os.getpid(), "batch_size": batch_size}
    return {"drawing": part.drawing.id, "samples": ids, "made_by": made_by}


def write_picture(path: Path, pixels: np.ndarray, codec: Codec) -> None:
    """Write an image, (height, width, 3) uint8, losslessly and without metadata."""
    options: dict[str, Any] = {"lossless": True, "exact": True} if codec == "webp" else {}
    Image.fromarray(pixels).save(path, **options)
