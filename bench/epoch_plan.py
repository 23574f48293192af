"""Opening a large stream, and planning an epoch of it: seconds and memory at 1 M, 10 M and 100 M samples.

The index is synthetic: an entry per MDS file, as stage 1 writes it. Files are sparse, of the size that the index says,
so that every one is found and its size held against the index, as a run does it; nothing reads them. Each size is
measured in a fresh process.

    python -m bench.epoch_plan [--sizes 1000000 10000000 100000000] [--files 100000]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kit.common import section, status_mb, table
from bench.kit.roots import encoding_record
from shards.base.durable import canonical_json
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import Column
from shards.format.mds_writer import file_config
from shards.format.text import TextLatents
from shards.format.towers import ONLY_TEXT
from shards.open import open_store
from shards.root.shared import write_uncond
from train.config import DataConfig
from train.data.draws import global_slots
from train.data.loader import make_files, make_order
from train.data.order import choose_per_epoch
from train.data.selection import Selection, count_by_file
from train.data.streams import open_data

SIZES = [1_000_000, 10_000_000]
NUM_FILES = 100_000
GLOBAL_BATCH = 2048
NUM_RANKS = 8
FILES_PER_PART = 10


def main() -> None:
    """Measure every size, and print a section of docs/evidence/benchmarks.md."""
    parser = argparse.ArgumentParser(prog="bench.epoch_plan", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--files", type=int, default=NUM_FILES)
    parser.add_argument("--measure", type=Path, help="a root, in this process; used by the benchmark itself")
    parser.add_argument("--passing", choices=["all", "half"], default="all", help="with --measure")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.passing)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for samples in options.sizes:
            make_root(Path(folder), samples, options.files)
            for passing in ("all", "half"):
                command = [sys.executable, "-m", "bench.epoch_plan", "--measure", folder, "--passing", passing]
                result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
                rows.append([f"{samples:,}", f"{options.files:,}", passing, *result.values()])
    header = [
        "samples",
        "files",
        "pass the filter",
        "open s",
        "make loader s",
        "plan epoch s",
        "first batch's ids s",
        "at 90 % of an epoch s",
        "ids per step ms",
        "memory MB",
        "of it imports",
    ]
    body = table(header, rows) + (
        f"\n\nOne rank of {NUM_RANKS}, global batch {GLOBAL_BATCH}, 64 canonical nodes, blocks of 32,768. `open` "
        f"parses the index and looks at every file; memory is the process's peak. With a filter the time to read the "
        f"parts' tables comes on top (`bench.loader` has it per table): here the mask is random bits."
    )
    print(section("Opening and planning", "bench.epoch_plan", body))


def make_root(root: Path, num_samples: int, num_files: int) -> None:
    """A latents root of sparse files, all in one bucket."""
    encoding = encoding_record(77, 1024)
    encoding.save(open_store(root))
    write_uncond(open_store(root), {ONLY_TEXT: TextLatents(torch.zeros(77, 1024), 2)}, encoding)
    columns = columns_of(encoding)
    entries = []
    for number in range(num_files):
        samples = num_samples // num_files + (number < num_samples % num_files)
        name = f"{number // FILES_PER_PART:05d}/shard.{number % FILES_PER_PART:05d}.mds"
        path, size = root / "256x256" / name, 174_200 * samples
        if number % FILES_PER_PART == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.ftruncate(descriptor, size)  # sparse
        os.close(descriptor)
        raw = {"basename": name, "bytes": size, "hashes": {"xxh3_64": f"{number:016x}"}}
        entries.append(columns | {"raw_data": raw, "samples": samples})
    (root / "256x256" / "index.json").write_bytes(canonical_json({"version": 2, "shards": entries}))


def columns_of(encoding: EncodingRecord) -> dict[str, Any]:
    """What an index says of each file besides its name and numbers."""
    types = encoding.stored_columns(Bucket(256, 256))
    return file_config([Column.of(name, types[name]) for name in sorted(types)]) | {"zip_data": None}


def measure(root: Path, passing: str) -> dict[str, str]:
    """Seconds of each step towards the first batch, in this process, and its peak memory."""
    imports = status_mb("VmHWM")
    config = DataConfig.model_validate({"streams": [{"root": str(root), "bucket": "256x256"}], "num_workers": 0})
    opened, spec = timed(lambda: open_data(config, GLOBAL_BATCH))
    made, _ = timed(lambda: make_files(config, spec))
    if passing == "half":
        spec = with_random_mask(spec)
    order = make_order(config, spec, GLOBAL_BATCH, seed=0)
    slots = global_slots(GLOBAL_BATCH // NUM_RANKS, 0, NUM_RANKS, NUM_RANKS).numpy()
    planned, _ = timed(lambda: order._layout(0, 0))
    first, _ = timed(lambda: order.samples(0, slots))
    later = make_order(config, spec, GLOBAL_BATCH, seed=0)
    resumed, _ = timed(lambda: later.samples(int(0.9 * order.steps_per_epoch), slots))
    steps = min(order.steps_per_epoch, 1000)
    running, _ = timed(lambda: [order.samples(step, slots) for step in range(steps)])
    peak = status_mb("VmHWM")
    seconds = [f"{value:.3f}" for value in (opened, made, planned, first, resumed)]
    names = ["open", "make", "plan", "first", "resume"]
    return dict(zip(names, seconds, strict=True)) | {
        "step": f"{1000 * running / steps:.2f}",
        "peak": f"{peak:.0f}",
        "imports": f"{imports:.0f}",
    }


def with_random_mask(spec: Any) -> Any:
    """The same data under a filter that half of the samples pass."""
    (stream,) = spec.streams
    mask = np.random.default_rng(0).integers(0, 256, -(-stream.num_samples // 8), dtype=np.uint8)
    bits = np.unpackbits(mask)[: stream.num_samples]
    counts = count_by_file(bits.view(bool), stream.files.samples)
    passing = int(counts.sum())
    chosen = choose_per_epoch(1.0, passing, GLOBAL_BATCH)
    selection = Selection(np.packbits(bits), counts, {})
    filtered = replace(stream, selection=selection, num_samples=passing, chosen=chosen)
    return replace(spec, streams=(filtered,), steps_per_epoch=chosen // GLOBAL_BATCH)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the function returns."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
