"""Measure time and memory of opening a large stream and planning an epoch of it, at 1 M, 10 M and 100 M samples.

The root is synthetic: an index like stage 1's, and sparse files of the recorded sizes, which a run checks but does not
read. Each size is measured in new processes: a machine's first process, which makes the tables, and a later process,
which maps them.

    python -m bench.index.epoch_plan [--sizes 1000000 10000000 100000000] [--files 100000]
"""

import argparse
import os
import tempfile
import threading
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch

from bench.kit.common import in_new_process, section, status_mb, table, timed
from bench.kit.receipts import synthetic_receipt
from bench.kit.roots import encoding_record
from shards.base.store import LocalStore
from shards.format.text import TextLatents
from shards.format.towers import ONLY_TEXT
from shards.root.manifest import BucketIndex, BucketSize, Manifest
from shards.root.segments import content_id, make_rows, save_segment, sizes
from shards.root.shared import write_uncond
from train.config import DataConfig
from train.data.draws import global_slots
from train.data.loader import make_files, make_order
from train.data.order import choose_per_epoch
from train.data.selection import Selection, count_by_file
from train.data.spec import DataSpec
from train.data.streams import open_data

SIZES = [1_000_000, 10_000_000]
NUM_FILES = 100_000
GLOBAL_BATCH = 2048
NUM_RANKS = 8
FILES_PER_PART = 6.5
BUCKET = "256x256"
HEADER = ["samples", "files", "pass the filter", "process of the machine", "find and open, s"]
HEADER += ["plan epoch, s", "first batch's ids, s", "at 90 % of an epoch, s"]
HEADER += ["ids per step, ms", "own memory: peak, MB", "at the end, MB"]
ABOUT = f"""

One rank of {NUM_RANKS}, global batch {GLOBAL_BATCH}, 64 canonical nodes, blocks of 32,768. The first process of a
machine reads the index and writes the tables. It also checks every file, for at most 10 s. Own memory is anonymous
memory beyond that after the imports; mapped memory is shared. A filter also needs time to read the parts' tables, once
per machine. Here its mask is random."""
RANKS = {"first": {"LOCAL_RANK": "0"}, "further": {"LOCAL_RANK": "1"}}


def main() -> None:
    """Measure every size, and print a Markdown section."""
    parser = argparse.ArgumentParser(prog="bench.index.epoch_plan", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--files", type=int, default=NUM_FILES)
    options = parser.parse_args()
    rows = []
    for samples in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_root(Path(folder), samples, options.files)
            for passing, rank in product(("all", "half"), RANKS):
                os.environ |= RANKS[rank] | {"TMPDIR": folder}  # for the new process
                measured = in_new_process(measure, Path(folder), passing)
                rows.append([f"{samples:,}", f"{options.files:,}", passing, rank, *measured])
    print(section("Opening and planning", "bench.index.epoch_plan", table(HEADER, rows) + ABOUT))


def make_root(folder: Path, num_samples: int, num_files: int) -> None:
    """Write a latents root of sparse files with one bucket, and a filter's selection of half of the samples."""
    store = LocalStore(folder / "root")
    encoding = encoding_record(77, 1024)
    encoding.save(store)
    write_uncond(store, {ONLY_TEXT: TextLatents(torch.zeros(77, 1024), 2)})
    counts = np.full(num_files, num_samples // num_files) + (np.arange(num_files) < num_samples % num_files)
    bounds = np.unique((np.arange(0, num_files + FILES_PER_PART, FILES_PER_PART)).astype(int).clip(max=num_files))
    rows = []
    for part, (first, last) in enumerate(pairwise(bounds.tolist())):
        receipt = synthetic_receipt(f"{part:06d}", BUCKET, samples_of_files=counts[first:last].tolist())
        rows.append((receipt, ""))
        place = folder / "root" / receipt.folder
        place.mkdir(parents=True)
        for file in receipt.mds:
            descriptor = os.open(place / file.basename, os.O_WRONLY | os.O_CREAT)
            os.ftruncate(descriptor, file.bytes)  # sparse
            os.close(descriptor)
    whole = make_rows(rows)
    id = content_id(whole)
    BucketIndex(bucket=BUCKET, segments=(save_segment(store, whole),)).save(store, id)
    Manifest(number=1, buckets={BUCKET: BucketSize(id=id, **sizes([whole]))}, recalled={}).save(store)
    (folder / "half").mkdir()
    mask = np.random.default_rng(0).integers(0, 256, -(-num_samples // 8), dtype=np.uint8)
    passing = count_by_file(np.unpackbits(mask, count=num_samples).view(bool), counts)
    Selection(mask, passing, {}).save(folder / "half")


def measure(folder: Path, passing: str) -> list[str]:
    """Measure each step towards the first batch, in this process, and its memory."""
    imports, peak = status_mb("RssAnon"), Peak()
    config = DataConfig.model_validate(
        {"streams": [{"root": str(folder / "root"), "bucket": BUCKET}], "num_workers": 0}
    )
    opened, spec = timed(lambda: open_data(config, GLOBAL_BATCH))
    make_files(config, spec)
    if passing == "half":
        spec = with_selection(spec, Selection.mapped(folder / "half"))
    order = make_order(config, spec, GLOBAL_BATCH, seed=0)
    slots = global_slots(GLOBAL_BATCH // NUM_RANKS, 0, NUM_RANKS, NUM_RANKS).numpy()
    planned, _ = timed(lambda: order._layout(0, 0))
    first, _ = timed(lambda: order.samples(0, slots))
    later = make_order(config, spec, GLOBAL_BATCH, seed=0)
    resumed, _ = timed(lambda: later.samples(int(0.9 * order.steps_per_epoch), slots))
    steps = min(order.steps_per_epoch, 1000)
    running, _ = timed(lambda: [order.samples(step, slots) for step in range(steps)])
    seconds = [f"{value:.3f}" for value in (opened, planned, first, resumed)]
    megabytes = [f"{value - imports:.0f}" for value in (peak.stop(), status_mb("RssAnon"))]
    return [*seconds, f"{1000 * running / steps:.2f}", *megabytes]


class Peak:
    """The peak of this process's anonymous memory, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.most, self.over = 0.0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.over.wait(0.005):
            self.most = max(self.most, status_mb("RssAnon"))

    def stop(self) -> float:
        """Stop sampling, and return the peak in MB."""
        self.over.set()
        self.thread.join()
        return self.most


def with_selection(spec: DataSpec, selection: Selection) -> DataSpec:
    """Apply a filter's selection to the data."""
    (stream,) = spec.streams
    passing = int(selection.counts.sum())
    chosen = choose_per_epoch(1.0, passing, GLOBAL_BATCH)
    filtered = replace(stream, selection=selection, num_samples=passing, chosen=chosen)
    return replace(spec, streams=(filtered,), steps_per_epoch=chosen // GLOBAL_BATCH)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
