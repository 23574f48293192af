"""A worker by itself: its overhead relative to decoding alone, two workers side by side, and its memory."""

import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from bench.kit.common import in_new_process, status_mb, table, timed_in_turn
from bench.pixels import make_corpus
from bench.worker.fakes import SleepingImageEncoder, free_encoders, sd2_record
from bench.worker.inputs import jpegs, make_tars
from precompute.config import PrecomputeConfig, make_recipe
from precompute.encode.tar import encode_tar
from precompute.encode.towers import Towers
from precompute.encode.worker import prepare_process
from precompute.input.find import find_input
from precompute.input.unit import Unit
from precompute.pixels.decode import decode
from shards.open import open_store
from shards.root.shared import create_root

BUCKETS = ("256x256", "512x512")
DISTINCT_PICTURES = 100
MIXED, SMALL = (300, 1600), (400, 600)
"""Longer sides in pixels: the corpus of bench.pixels, and one whose decoding is cheap relative to storing."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    folder: Path
    images: int
    shards: int
    threads: int
    rounds: int
    seconds_per_picture: float

    def fresh_config(self, name: str) -> PrecomputeConfig:
        """Make a config with the product's defaults and no models, for an empty latents root of this name."""
        root = self.folder / name
        shutil.rmtree(root, ignore_errors=True)
        return PrecomputeConfig.model_validate(
            {
                **{"input": str(self.folder / "tars"), "output": root, "buckets": list(BUCKETS), "captions": ["txt"]},
                "vae": "stand-in",
                "texts": {"text": {"model": "stand-in", "tokenizer": "stand-in"}},
                "workers": {"num_gpus": 0, "num_cpus": self.threads, "decode_threads": self.threads},
            }
        )


def encode(shards: Iterable[Unit], config: PrecomputeConfig, seconds_per_picture: float = 0.0) -> None:
    """Encode units like a worker, one after another, into a new root. The image encoder is free or sleeps."""
    recipe, store = make_recipe(config, sd2_record()), open_store(config.output)
    create_root(store, recipe.encoding)
    image, texts = free_encoders(recipe.encoding)
    if seconds_per_picture:
        image = SleepingImageEncoder(recipe.encoding.image, seconds_per_picture)
    towers = Towers(texts, config.workers.batch_size, image=image, features={})  # type: ignore[arg-type]
    for shard in shards:
        encode_tar(shard, recipe, store, towers)


def begin() -> None:
    """Prepare this process like a worker's."""
    torch.set_num_threads(1)
    prepare_process()


def overhead(options: Options) -> np.ndarray:
    """Return (4, rounds): bare seconds, the worker's seconds, bare CPU seconds, the worker's CPU seconds."""
    begin()
    config = options.fresh_config("bare")
    shard = find_input(config.input).units()[0]
    roots = iter([options.fresh_config(f"free{number}") for number in range(options.rounds + 1)])
    with shard.open(config.limits.max_bytes) as source:
        members = [sample.image for sample in source.samples() if sample.image]
    cpu: dict[str, list[float]] = {"bare": [], "worker": []}

    def bare() -> None:
        start = time.process_time()
        with ThreadPoolExecutor(config.workers.decode_threads) as pool:
            for _ in pool.map(lambda data: decode(data, config.to_fill.all, config.pixels, config.limits), members):
                pass
        cpu["bare"].append(time.process_time() - start)

    def worker() -> None:
        start = time.process_time()
        encode([shard], next(roots))
        cpu["worker"].append(time.process_time() - start)

    pair = timed_in_turn(bare, worker, options.rounds)
    return np.array([pair.first_seconds, pair.second_seconds, cpu["bare"][1:], cpu["worker"][1:]])


def one_of_two(options: Options, number: int) -> tuple[float, float]:
    """Encode the tar of this number, or both tars if it is negative, and return the start and end time."""
    begin()
    config = options.fresh_config(f"two{number}")
    shards = find_input(config.input).units()[:2]
    start = time.time()
    encode(shards if number < 0 else shards[number : number + 1], config, options.seconds_per_picture)
    return start, time.time()


def two_workers(options: Options) -> float:
    """Return the rate of two processes with one tar each, relative to one process with both tars."""
    start, end = in_new_process(one_of_two, options, -1)
    with ThreadPoolExecutor(2) as pool:
        times = list(pool.map(lambda number: in_new_process(one_of_two, options, number), (0, 1)))
    return (end - start) / (max(t[1] for t in times) - min(t[0] for t in times))


def memory(options: Options) -> list[float]:
    """Return the resident memory after each tar, and its peak, in MB."""
    begin()
    config, resident = options.fresh_config("memory"), []
    for _, shard in zip(range(options.shards), cycle(find_input(config.input).units()), strict=False):
        encode([shard], config)
        resident.append(status_mb("VmRSS"))
        shutil.rmtree(config.output)
    return [*resident, status_mb("VmHWM")]


def overhead_row(options: Options, corpus: tuple[int, int]) -> tuple[str, str]:
    """Return a row of the table: the overhead of a worker with free encoders."""
    bare, worker, bare_cpu, worker_cpu = in_new_process(overhead, options)
    rates = bare / worker
    return (
        f"free encoders, images of {corpus[0]} to {corpus[1]} px: rate relative to decoding alone, "
        f"{options.threads} threads each",
        f"{np.median(rates):.0%} ({min(rates):.0%} to {max(rates):.0%}); by CPU time "
        f"{np.median(bare_cpu / worker_cpu):.0%}; decoding alone {options.images / np.median(bare):.0f} images/s; the "
        f"worker {options.images / np.median(worker_cpu):.0f} images per second of CPU time",
    )


def report(options: Options) -> str:
    """Measure the worker, and return Markdown."""
    mixed, small = (make_corpus(DISTINCT_PICTURES, 0, *sides) for sides in (MIXED, SMALL))
    make_tars(options.folder / "tars", jpegs(mixed, 2 * options.images), options.images)
    of_small = replace(options, folder=options.folder / "small")
    make_tars(of_small.folder / "tars", jpegs(small, options.images), options.images)
    many_short = replace(options, folder=options.folder / "short")
    make_tars(many_short.folder / "tars", jpegs(mixed, 3 * (options.images // 10)), options.images // 10)

    free = [overhead_row(options, MIXED), overhead_row(of_small, SMALL)]
    gain = two_workers(options)
    *resident, peak = in_new_process(memory, many_short)
    later = np.array(resident[len(resident) // 2 :])  # after one-time allocations
    (slope, _), covariance = np.polyfit(range(len(later)), later, 1, cov=True)
    rows = [
        *free,
        ("sleeping encoder: two workers relative to one", f"{gain:.2f} ×"),
        (
            f"memory over {len(resident)} tars of {options.images // 10}",
            f"peak {peak:.0f} MB; {slope:+.2f} ± {covariance[0, 0] ** 0.5:.2f} MB per tar over the second half",
        ),
    ]
    listed = " ".join(f"{value:.0f}" for value in resident[9::10])
    return (
        f"{table(('what', 'measured'), rows)}\n\n"
        f"Tars of {options.images} JPEGs, those of bench.pixels unless stated otherwise, into {' and '.join(BUCKETS)} "
        f"with Stable Diffusion 2's shapes. The sleeping encoder takes {options.seconds_per_picture * 1e3:g} ms per "
        f"image and bucket. A worker is a process that calls `encode_tar`. Resident MB after every tenth tar: "
        f"{listed}."
    )
