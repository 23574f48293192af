"""What a picture takes of the processor: by decoding alone, and by a worker with each storage, in turn."""

import time
from collections.abc import Callable

import numpy as np
import torch

from bench.kit.common import table
from bench.worker.alone import (
    Options,
    bare_pixels,
    encode,
    free_image_encoder,
    fresh_config,
    in_new_process,
    pictures_of,
    worker_config,
)
from precompute.encode.worker import prepare_process
from precompute.input.tars import list_tars

GPU_RATE = 530
"""Pictures/s that a GPU encodes: an H100 at two fifths of its bf16 rate."""
STORAGES = ("float16", "int8 and float8")


def in_turn(options: Options, _: int) -> list[float]:
    """Rounds of processor seconds (decoding alone, float16, int8 and float8), in one flat list; the first round is not
    told of."""
    torch.set_num_threads(1)
    shard = list_tars(str(options.folder / "tars"))[0]
    pictures, config = (
        pictures_of(shard, options),
        worker_config(options.folder / "tars", options.folder, options.threads),
    )

    def worker(exact: bool) -> float:
        config = fresh_config(options, f"exact{exact}")  # what the last round wrote is removed before the clock starts
        return processor(lambda: encode([shard], config, free_image_encoder(), exact))

    def processor(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    prepare_process()
    rounds = [
        (processor(lambda: bare_pixels(pictures, config)), worker(exact=True), worker(exact=False))
        for _ in range(options.rounds + 1)
    ]
    return [seconds for found in rounds[1:] for seconds in found]


def report(options: Options, sides: tuple[int, int]) -> str:
    """Both storages; Markdown."""
    bare, *stored = np.array(in_new_process(in_turn, options)).reshape(-1, 1 + len(STORAGES)).T
    rows = []
    for storage, seconds in zip(STORAGES, stored, strict=True):
        ratios, rate = bare / seconds, options.images / np.median(seconds)
        spread = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((storage, spread, f"{rate:.0f}", f"{GPU_RATE / rate:.1f}"))
    head = ("stored as", "decoding's processor time over a worker's", "pictures/s for each core")
    return (
        f"{table((*head, f'cores for {GPU_RATE} pictures/s'), rows)}\n\n"
        f"{options.images} pictures of {sides[0]} to {sides[1]} px, {options.rounds} rounds in turn, {options.threads} "
        f"threads that decode, encoders that cost nothing. Decoding alone: {options.images / np.median(bare):.0f} "
        "pictures for a second of processor time."
    )
