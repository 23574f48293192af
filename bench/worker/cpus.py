"""CPU time per image of decoding alone and of a worker with each storage, measured in turn."""

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
from precompute.input.find import find_input

GPU_RATE = 530
"""Images/s that a GPU encodes: an H100 at two fifths of its bf16 rate."""
STORAGES = ("float16", "int8 and float8")


def in_turn(options: Options, _: int) -> list[float]:
    """Return, flattened, rounds of CPU seconds (decoding alone, float16, int8 and float8), without the first round."""
    torch.set_num_threads(1)
    shard = find_input(str(options.folder / "tars")).units()[0]
    pictures, config = (
        pictures_of(shard, options),
        worker_config(options.folder / "tars", options.folder, options.threads),
    )

    def worker(exact: bool) -> float:
        config = fresh_config(options, f"exact{exact}")  # removes the last round's output before the clock starts
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
    """Compare both storages, and return Markdown."""
    bare, *stored = np.array(in_new_process(in_turn, options)).reshape(-1, 1 + len(STORAGES)).T
    rows = []
    for storage, seconds in zip(STORAGES, stored, strict=True):
        ratios, rate = bare / seconds, options.images / np.median(seconds)
        spread = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((storage, spread, f"{rate:.0f}", f"{GPU_RATE / rate:.1f}"))
    head = ("storage", "CPU time of decoding relative to the worker", "images/s per core")
    return (
        f"{table((*head, f'cores for {GPU_RATE} images/s'), rows)}\n\n"
        f"{options.images} images of {sides[0]} to {sides[1]} px, {options.rounds} rounds in turn, {options.threads} "
        f"decoding threads, free encoders. Decoding alone: {options.images / np.median(bare):.0f} images per second of "
        "CPU time."
    )
