"""Measure a stage 1 worker's overhead, and compare it with a simple script: `python -m bench.worker`.

The worker is `encode_tar` itself, on tars of JPEGs, into buckets of 256 and 512 px with Stable Diffusion 2's shapes.
Fake encoders replace the networks: one takes no time, and the other behaves like a GPU, taking a fixed time per image
in parallel with the worker's threads. `--only beside` runs the comparison with the simple script, `--only cpus`
measures CPU time per image, and `--only kinds` compares the kinds of input. Neither a GPU nor weights are needed.
"""

import argparse
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from bench.kit.common import section, status_mb, table, timed_in_turn
from bench.pixels import make_corpus
from bench.worker import comparison, cpus, kinds
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
from bench.worker.fakes import SleepingImageEncoder, sd2_record
from bench.worker.inputs import jpegs, make_tars
from precompute.encode.worker import prepare_process
from precompute.input.find import find_input

DISTINCT_PICTURES = 100
MIXED, SMALL = (300, 1600), (400, 600)
"""Longer sides in pixels: the corpus of bench.pixels, and one whose decoding is cheap relative to storing."""
IMAGES = 2000
COMPARED = {"demo": 1500, "photographs": 288}
"""Number of images in the comparison with the simple script with free encoders, which takes five minutes."""


def sleeping_encoder(options: Options) -> SleepingImageEncoder:
    """Make a sleeping encoder with Stable Diffusion 2's shapes."""
    return SleepingImageEncoder(sd2_record().image, options.seconds_per_picture)


def overhead(options: Options, number: int) -> list[float]:
    """Return, flattened, rounds of (bare seconds, worker's seconds, bare CPU seconds, worker's CPU seconds)."""
    torch.set_num_threads(1)
    shard = find_input(str(options.folder / "tars")).units()[0]
    config = worker_config(options.folder / "tars", options.folder / "free", options.threads)
    roots = iter([fresh_config(options, f"free{number}") for number in range(options.rounds + 1)])
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
    """Return the share of time for which the sleeping encoder was busy, in each of three tars and overall."""
    torch.set_num_threads(1)
    config, encoder = fresh_config(options, f"busy{number}"), sleeping_encoder(options)
    shards, shares = find_input(config.input).units()[:3], []
    prepare_process()  # like a worker that loads its encoders
    start = time.perf_counter()
    for shard in shards:
        shard_start, busy_before = time.perf_counter(), encoder.busy
        encode([shard], config, encoder)
        shares.append((encoder.busy - busy_before) / (time.perf_counter() - shard_start))
    return [*shares, encoder.busy / (time.perf_counter() - start)]


def one_of_two(options: Options, number: int) -> list[float]:
    """Encode the tar of this number, or both tars if it is negative, and return the start and end time."""
    torch.set_num_threads(1)
    config, encoder = fresh_config(options, f"two{number}"), sleeping_encoder(options)
    shards = find_input(config.input).units()[:2]
    prepare_process()
    start = time.time()
    encode(shards if number < 0 else shards[number : number + 1], config, encoder)
    return [start, time.time()]


def two_workers(options: Options) -> float:
    """Return the rate of two processes with one tar each, relative to one process with both tars."""
    start, end = in_new_process(one_of_two, options, -1)
    with ThreadPoolExecutor(2) as pool:
        times = list(pool.map(lambda number: in_new_process(one_of_two, options, number), (0, 1)))
    return (end - start) / (max(t[1] for t in times) - min(t[0] for t in times))


def memory(options: Options, number: int) -> list[float]:
    """Return the resident memory after each tar, and its peak, in MB."""
    torch.set_num_threads(1)
    prepare_process()
    config, resident = fresh_config(options, "memory"), []
    for _, shard in zip(range(options.shards), cycle(find_input(config.input).units()), strict=False):
        encode([shard], config, free_image_encoder())
        resident.append(status_mb("VmRSS"))
        shutil.rmtree(config.output)
    return [*resident, status_mb("VmHWM")]


def overhead_row(options: Options, corpus: tuple[int, int]) -> tuple[str, str]:
    """Return a row of the table: the overhead of a worker with free encoders."""
    rounds = np.array(in_new_process(overhead, options)).reshape(-1, 4)
    bare, worker, bare_cpu, worker_cpu = rounds.T
    rates = bare / worker
    return (
        f"free encoders, images of {corpus[0]} to {corpus[1]} px: rate relative to decoding alone, "
        f"{options.threads} threads each",
        f"{np.median(rates):.0%} ({min(rates):.0%} to {max(rates):.0%}); by CPU time "
        f"{np.median(bare_cpu / worker_cpu):.0%}; decoding alone {options.images / np.median(bare):.0f} images/s; the "
        f"worker {options.images / np.median(worker_cpu):.0f} images per second of CPU time",
    )


def report(options: Options) -> str:
    """Measure the worker by itself, and return a Markdown section."""
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
    later = np.array(resident[len(resident) // 2 :])  # after one-time allocations
    (slope, _), covariance = np.polyfit(range(len(later)), later, 1, cov=True)
    rows = [
        *free,
        (
            "sleeping encoder busy during one tar, startup and commit included",
            ", ".join(f"{share:.1%}" for share in shares) + f"; over all {len(shares)} {over_all:.1%}",
        ),
        ("sleeping encoder: two workers relative to one", f"{gain:.2f} ×"),
        (
            f"memory over {len(resident)} tars of {options.images // 10}",
            f"peak {peak:.0f} MB; {slope:+.2f} ± {covariance[0, 0] ** 0.5:.2f} MB per tar over the second half",
        ),
    ]
    listed = " ".join(f"{value:.0f}" for value in resident[9::10])
    return section(
        "A stage 1 worker",
        "bench.worker",
        f"{table(('what', 'measured'), rows)}\n\n"
        f"Tars of {options.images} JPEGs, those of bench.pixels unless stated otherwise, into {' and '.join(BUCKETS)} "
        f"with Stable Diffusion 2's shapes. The sleeping encoder takes {options.seconds_per_picture * 1e3:g} ms per "
        f"image and bucket. A worker is a process that calls `encode_tar`. Resident MB after every tenth tar: "
        f"{listed}.",
    )


def comparison_report(options: Options) -> str:
    """Compare the simple script with the worker, and return a Markdown section."""
    pictures = {name: max(1, int(number * options.images / IMAGES)) for name, number in COMPARED.items()}
    body = comparison.report(options.folder / "beside", pictures, options.threads, options.rounds)
    return section(
        "A worker compared with a simple script",
        "bench.worker",
        f"{body}\n\nAt the end, the machine's load was {os.getloadavg()[0]:.1f}.",
    )


def cpus_report(options: Options) -> str:
    """Measure CPU time per image for both storages, and return a Markdown section."""
    mixed = replace(options, folder=options.folder / "cpus")
    make_tars(mixed.folder / "tars", jpegs(make_corpus(DISTINCT_PICTURES, 0, *MIXED), options.images), options.images)
    return section("CPUs for a worker", "bench.worker", cpus.report(mixed, MIXED))


def kinds_report(options: Options) -> str:
    """Compare the kinds of input, and return a Markdown section."""
    of_kinds = replace(options, folder=options.folder / "kinds", images=options.images // 2)
    kinds.make_inputs(of_kinds.folder, jpegs(make_corpus(DISTINCT_PICTURES, 0, *MIXED), of_kinds.images))
    return section("A worker for each kind of input", "bench.worker", kinds.report(of_kinds))


def main() -> None:
    """Measure, and print the sections."""
    parser = argparse.ArgumentParser(prog="bench.worker", description=__doc__)
    parser.add_argument("--only", choices=("alone", "cpus", "beside", "kinds"), help="run one section only")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/worker"), help="temporary folder")
    parser.add_argument("--images", type=int, default=IMAGES, help="images per tar; a tenth of it for measuring memory")
    parser.add_argument("--shards", type=int, default=240, help="number of consecutive tars for measuring memory")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="decoding threads")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of comparisons that run in turn")
    parser.add_argument("--seconds-per-picture", type=float, default=0.01, help="speed of the sleeping encoder")
    arguments = vars(parser.parse_args())
    only, options = arguments.pop("only"), Options(**arguments)
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        sections = {"alone": report, "cpus": cpus_report, "beside": comparison_report, "kinds": kinds_report}
        for name, make in sections.items():
            if only in (None, name):
                print(make(options))
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
