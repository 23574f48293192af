"""What a stage 1 worker adds to decoding, whether it keeps its encoders busy, and how it does beside a plain script.

`python -m bench.worker`. The worker is `encode_tar` itself, on tars of JPEGs, into 256 and 512 px buckets with Stable
Diffusion 2's shapes. Its encoders are stand-ins: one costs nothing, the other works like a GPU, in its own time beside
the worker's threads, and takes a fixed time per picture. `--only beside` runs the comparison with the plain script
alone. No GPU is needed, and no weights.
"""

import argparse
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter

from bench.kit.common import section, status_mb, table, timed_in_turn
from bench.pixels import make_corpus
from bench.worker import beside
from bench.worker.inputs import jpegs, make_tars
from bench.worker.standins import FreeImageEncoder, SleepingImageEncoder, free_encoders, sd2_record
from precompute.config import PrecomputeConfig, make_recipe
from precompute.encode.tar import encode_tar
from precompute.encode.towers import Towers
from precompute.encode.worker import warm_up
from precompute.input.tars import InputTar, Tar, list_tars
from precompute.pixels.decode import decode
from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.mds_writer import PartMDSWriter
from shards.format.text import TextLatents
from shards.format.towers import ONLY_TEXT
from shards.open import open_store
from shards.root.shared import create_root

BUCKETS = ("256x256", "512x512")
DISTINCT_PICTURES = 100
MIXED, SMALL = (300, 1600), (400, 600)
"""Longer sides in pixels: the corpus of the pixel path's benchmark, and one where decoding costs least beside what is
stored."""
IMAGES = 2000
BESIDE = {"demo": 1500, "photographs": 288}
"""Pictures that the plain script gets, too, where encoders cost nothing: all of it takes some five minutes."""


def worker_config(tars: Path, output: Path, threads: int) -> PrecomputeConfig:
    """The defaults of configs/precompute.yaml with `threads` decoders and no models."""
    return PrecomputeConfig.model_validate(
        {
            **{"input": str(tars), "output": output, "buckets": list(BUCKETS)},
            **dict.fromkeys(("vae", "text_encoder", "tokenizer"), "stand-in"),
            "workers": {"num_gpus": 0, "num_cpus": threads, "decode_threads": threads},
        }
    )


def free_image_encoder() -> FreeImageEncoder:
    """Of Stable Diffusion 2's sizes."""
    return free_encoders(sd2_record())[0]


def encode(shards: Iterable[InputTar], config: PrecomputeConfig, image_encoder: FreeImageEncoder) -> None:
    """What a worker does, one tar after the other, into a root of its own."""
    store, recipe = open_store(config.output), make_recipe(config, sd2_record())
    create_root(store, recipe.encoding)
    _, texts = free_encoders(recipe.encoding)
    towers = Towers(image_encoder, texts, {}, config.workers.batch_size)  # type: ignore[arg-type]
    for shard in shards:
        encode_tar(shard, recipe, store, towers)


def bare_pixels(members: list[bytes], config: PrecomputeConfig) -> int:
    """Decode the same pictures with as many threads, and do nothing else; returns how many came out."""
    with ThreadPoolExecutor(config.workers.decode_threads) as pool:
        pictures = pool.map(lambda data: decode(data, config.to_fill.all, config.pixels, config.limits), members)
        return sum(len(picture.pixels) for picture in pictures)


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    folder: Path
    images: int
    shards: int
    threads: int
    rounds: int
    seconds_per_picture: float


def in_new_process(function: Callable[[Options, int], list[float]], options: Options, number: int = 0) -> list[float]:
    """The function's result from a process of its own, so that memory and torch's threads are its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (options, number))


def fresh_config(options: Options, name: str) -> PrecomputeConfig:
    """A config with an empty latents root of that name."""
    root = options.folder / name
    shutil.rmtree(root, ignore_errors=True)
    return worker_config(options.folder / "tars", root, options.threads)


def sleeping_encoder(options: Options) -> SleepingImageEncoder:
    """Of Stable Diffusion 2's sizes."""
    return SleepingImageEncoder(sd2_record().image, options.seconds_per_picture)


def overhead(options: Options, number: int) -> list[float]:
    """Rounds of (bare seconds, worker's seconds, bare CPU seconds, worker's CPU seconds), in one flat list."""
    torch.set_num_threads(1)
    shard = list_tars(str(options.folder / "tars"))[0]
    config = worker_config(options.folder / "tars", options.folder / "free", options.threads)
    roots = iter([fresh_config(options, f"free{number}") for number in range(options.rounds + 1)])  # removed at the end
    path = options.folder / "tars" / f"{shard.name}.tar"
    members = [sample.image for sample in Tar(path, config.limits.max_bytes).samples() if sample.image]
    cpu: dict[str, list[float]] = {"bare": [], "worker": []}

    def bare() -> None:
        start = time.process_time()
        bare_pixels(members, config)
        cpu["bare"].append(time.process_time() - start)

    def worker() -> None:
        start = time.process_time()
        encode([shard], next(roots), free_image_encoder())
        cpu["worker"].append(time.process_time() - start)

    warm_up()
    pair = timed_in_turn(bare, worker, options.rounds)
    rounds = zip(pair.first_seconds, pair.second_seconds, cpu["bare"][1:], cpu["worker"][1:], strict=True)
    return [value for values in rounds for value in values]


def busy(options: Options, number: int) -> list[float]:
    """Share of the time that the sleeping encoder worked: in each of three shards, and from the first to the last."""
    torch.set_num_threads(1)
    config, encoder = fresh_config(options, f"busy{number}"), sleeping_encoder(options)
    shards, shares = list_tars(config.input)[:3], []
    warm_up()  # as a worker does when it loads its encoders
    start = time.perf_counter()
    for shard in shards:
        shard_start, busy_before = time.perf_counter(), encoder.busy
        encode([shard], config, encoder)
        shares.append((encoder.busy - busy_before) / (time.perf_counter() - shard_start))
    return [*shares, encoder.busy / (time.perf_counter() - start)]


def one_of_two(options: Options, number: int) -> list[float]:
    """Encode every other shard from `number` on, or shard after shard where it is negative; when it began and ended."""
    torch.set_num_threads(1)
    config, encoder = fresh_config(options, f"two{number}"), sleeping_encoder(options)
    shards = list_tars(config.input)[:2]
    warm_up()
    start = time.time()
    encode(shards if number < 0 else shards[number : number + 1], config, encoder)
    return [start, time.time()]


def two_workers(options: Options) -> float:
    """Rate of two processes on a shard each over that of one process on both."""
    start, end = in_new_process(one_of_two, options, -1)
    with ThreadPoolExecutor(2) as pool:
        times = list(pool.map(lambda number: in_new_process(one_of_two, options, number), (0, 1)))
    return (end - start) / (max(t[1] for t in times) - min(t[0] for t in times))


def memory(options: Options, number: int) -> list[float]:
    """MB resident after each of the shards, and at the peak."""
    torch.set_num_threads(1)
    warm_up()
    config, resident = fresh_config(options, "memory"), []
    for _, shard in zip(range(options.shards), cycle(list_tars(config.input)), strict=False):
        encode([shard], config, free_image_encoder())
        resident.append(status_mb("VmRSS"))
        shutil.rmtree(config.output)
    return [*resident, status_mb("VmHWM")]


def overhead_row(options: Options, corpus: tuple[int, int]) -> tuple[str, str]:
    """What was measured and what came out, of a worker whose encoders cost nothing."""
    rounds = np.array(in_new_process(overhead, options)).reshape(-1, 4)
    bare, worker, bare_cpu, worker_cpu = rounds.T
    rates = bare / worker
    return (
        f"encoders that cost nothing, pictures of {corpus[0]} to {corpus[1]} px: rate over that of bare decoding, "
        f"{options.threads} threads each",
        f"{np.median(rates):.0%} ({min(rates):.0%} to {max(rates):.0%}); by CPU time "
        f"{np.median(bare_cpu / worker_cpu):.0%}; bare {options.images / np.median(bare):.0f} pictures/s; the worker "
        f"{options.images / np.median(worker_cpu):.0f} pictures per second of processor time",
    )


def writing_row(options: Options) -> tuple[str, str]:
    """An MDS writer of a part against streaming's, with the same hashes; ours waits for the disk, too."""
    bucket, encoding = Bucket.parse(BUCKETS[0]), sd2_record()
    rng, folders = np.random.default_rng(0), count()
    columns = encoding.columns(bucket)
    caption = TextLatents(torch.from_numpy(rng.standard_normal((77, 1024), np.float32)), 77)
    latents = torch.from_numpy(rng.standard_normal((8, *bucket.latent_hw(8)), np.float32))
    sample = {
        "key": "000420017",
        "caption": "a picture of nothing in particular",
        **next(image.pack(encoding.image, [latents])),
        **next(text.pack(ONLY_TEXT, encoding.texts[ONLY_TEXT], [[caption]], several=False)),
        "size": np.zeros(4, np.int32),
        "scores": np.zeros(4, np.float32),
    }

    def write(make: Callable[[Path], Any]) -> None:
        writer = make(options.folder / f"writing{next(folders)}")
        for _ in range(options.images):
            writer.write(sample)
        writer.finish()

    pair = timed_in_turn(
        lambda: write(lambda folder: PartMDSWriter(folder, encoding, bucket)),
        lambda: write(lambda folder: MDSWriter(out=str(folder), columns=columns, hashes=["sha256", "xxh3_64"])),
        options.rounds,
    )
    rate = options.images / np.median(pair.first_seconds)
    return (
        "our MDS writer over streaming's MDSWriter, both with SHA-256 and xxh3, ours with fsync: rate",
        f"{pair.ratio:.1f} × ({pair.spread}); ours {rate:,.0f} samples/s",
    )


def report(options: Options) -> str:
    """Measure all of it; Markdown."""
    mixed, small = (make_corpus(DISTINCT_PICTURES, 0, *sides) for sides in (MIXED, SMALL))
    make_tars(options.folder / "tars", jpegs(mixed, 3 * options.images), options.images)
    of_small = replace(options, folder=options.folder / "small")
    make_tars(of_small.folder / "tars", jpegs(small, options.images), options.images)
    many_short = replace(options, folder=options.folder / "short")
    make_tars(many_short.folder / "tars", jpegs(mixed, 3 * (options.images // 10)), options.images // 10)

    free = [overhead_row(options, MIXED), overhead_row(of_small, SMALL)]
    *shares, over_all = in_new_process(busy, options)
    gain = two_workers(options)
    *resident, peak = in_new_process(memory, many_short)
    later = np.array(resident[len(resident) // 2 :])  # what is taken once has been taken
    (slope, _), covariance = np.polyfit(range(len(later)), later, 1, cov=True)
    rows = [
        *free,
        writing_row(options),
        (
            "sleeping encoder: busy in one shard, start and commit included",
            ", ".join(f"{share:.1%}" for share in shares) + f"; all {len(shares)} in a row {over_all:.1%}",
        ),
        ("sleeping encoder: two workers over one", f"{gain:.2f} ×"),
        (
            f"memory over {len(resident)} shards of {options.images // 10}",
            f"peak {peak:.0f} MB; {slope:+.2f} ± {covariance[0, 0] ** 0.5:.2f} MB per shard over the second half",
        ),
    ]
    listed = " ".join(f"{value:.0f}" for value in resident[9::10])
    return section(
        "A stage 1 worker",
        "bench.worker",
        f"{table(('what', 'measured'), rows)}\n\n"
        f"Shards of {options.images} JPEGs, where nothing else is said those of the pixel path's benchmark, into "
        f"{' and '.join(BUCKETS)}, with Stable Diffusion 2's shapes. The sleeping encoder takes "
        f"{options.seconds_per_picture * 1e3:g} ms for each picture of each bucket. A worker is a process that calls "
        f"`encode_tar`. MB resident after every tenth shard: {listed}.",
    )


def beside_report(options: Options) -> str:
    """The plain script and the worker in turn; Markdown."""
    pictures = {name: max(1, int(number * options.images / IMAGES)) for name, number in BESIDE.items()}
    body = beside.report(options.folder / "beside", pictures, options.threads, options.rounds)
    return section(
        "A worker beside a plain script",
        "bench.worker",
        f"{body}\n\nThe load of the machine was {os.getloadavg()[0]:.1f} at the end.",
    )


def main() -> None:
    """Make the tars, measure, print."""
    parser = argparse.ArgumentParser(prog="bench.worker", description=__doc__)
    parser.add_argument("--only", choices=("alone", "beside"), help="one of the two sections")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/worker"))
    parser.add_argument("--images", type=int, default=IMAGES, help="in a shard; a tenth of it where memory is measured")
    parser.add_argument("--shards", type=int, default=240, help="one after the other, where memory is measured")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="that decode")
    parser.add_argument("--rounds", type=int, default=2, help="of what is run in turn")
    parser.add_argument("--seconds-per-picture", type=float, default=0.01, help="of the sleeping encoder")
    arguments = vars(parser.parse_args())
    only, options = arguments.pop("only"), Options(**arguments)
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        for name, make in (("alone", report), ("beside", beside_report)):
            if only in (None, name):
                print(make(options))
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
