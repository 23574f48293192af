"""What a stage 1 worker adds to decoding, whether it keeps its encoders busy, and how it does beside a plain script.

`python -m bench.worker`. The worker is `encode_tar` itself, on tars of JPEGs, into 256 and 512 px buckets with Stable
Diffusion 2's shapes. Its encoders are stand-ins: one costs nothing, the other works like a GPU, in its own time beside
the worker's threads, and takes a fixed time per picture. `--only beside` runs the comparison with the plain script
alone, and `--only cpus` what a picture takes of the processor. No GPU is needed, and no weights.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter

from bench.kit.common import section, status_mb, table, timed_in_turn
from bench.pixels import make_corpus
from bench.worker import beside, cpus
from bench.worker.alone import (
    BUCKETS,
    Options,
    bare_pixels,
    encode,
    free_image_encoder,
    fresh_config,
    in_new_process,
    pictures_of,
    worker_config,
)
from bench.worker.inputs import jpegs, make_tars
from bench.worker.standins import SleepingImageEncoder, sd2_record
from precompute.encode.worker import prepare_process
from precompute.input.tars import list_tars
from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.mds_writer import PartMDSWriter
from shards.format.text import TextLatents
from shards.format.towers import ONLY_TEXT

DISTINCT_PICTURES = 100
MIXED, SMALL = (300, 1600), (400, 600)
"""Longer sides in pixels: the corpus of the pixel path's benchmark, and one where decoding costs least beside what is
stored."""
IMAGES = 2000
BESIDE = {"demo": 1500, "photographs": 288}
"""Pictures that the plain script gets, too, where encoders cost nothing: all of it takes some five minutes."""


def sleeping_encoder(options: Options) -> SleepingImageEncoder:
    """Of Stable Diffusion 2's sizes."""
    return SleepingImageEncoder(sd2_record().image, options.seconds_per_picture)


def overhead(options: Options, number: int) -> list[float]:
    """Rounds of (bare seconds, worker's seconds, bare CPU seconds, worker's CPU seconds), in one flat list."""
    torch.set_num_threads(1)
    shard = list_tars(str(options.folder / "tars"))[0]
    config = worker_config(options.folder / "tars", options.folder / "free", options.threads)
    roots = iter([fresh_config(options, f"free{number}") for number in range(options.rounds + 1)])  # removed at the end
    members = pictures_of(shard, options)
    cpu: dict[str, list[float]] = {"bare": [], "worker": []}

    def bare() -> None:
        start = time.process_time()
        bare_pixels(members, config)
        cpu["bare"].append(time.process_time() - start)

    def worker() -> None:
        start = time.process_time()
        encode([shard], next(roots), free_image_encoder())
        cpu["worker"].append(time.process_time() - start)

    prepare_process()
    pair = timed_in_turn(bare, worker, options.rounds)
    rounds = zip(pair.first_seconds, pair.second_seconds, cpu["bare"][1:], cpu["worker"][1:], strict=True)
    return [value for values in rounds for value in values]


def busy(options: Options, number: int) -> list[float]:
    """Share of the time that the sleeping encoder worked: in each of three shards, and from the first to the last."""
    torch.set_num_threads(1)
    config, encoder = fresh_config(options, f"busy{number}"), sleeping_encoder(options)
    shards, shares = list_tars(config.input)[:3], []
    prepare_process()  # as a worker does when it loads its encoders
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
    prepare_process()
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
    prepare_process()
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


def cpus_report(options: Options) -> str:
    """A picture's processor time by both storages; Markdown."""
    mixed = replace(options, folder=options.folder / "cpus")
    make_tars(mixed.folder / "tars", jpegs(make_corpus(DISTINCT_PICTURES, 0, *MIXED), options.images), options.images)
    return section("CPUs for a worker", "bench.worker", cpus.report(mixed, MIXED))


def main() -> None:
    """Make the tars, measure, print."""
    parser = argparse.ArgumentParser(prog="bench.worker", description=__doc__)
    parser.add_argument("--only", choices=("alone", "cpus", "beside"), help="one of the sections")
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
        for name, make in (("alone", report), ("cpus", cpus_report), ("beside", beside_report)):
            if only in (None, name):
                print(make(options))
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
