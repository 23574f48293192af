"""Measure how long a job on a root of 158,000 receipts takes to start and end, with a latency of 30 ms per call.

The receipts are synthetic, with as many MDS files as LAION's selection fills. They are stored in a local folder, behind
a store that adds latency, limits concurrency and counts calls (`bench.kit.receipts.ThinStore`). Each phase runs in its
own process, so that memory is measured separately.

    python -m bench.index.publishing [--tars 79000] [--new 500]
"""

import argparse
import signal
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.kit.common import in_new_process, section, status_mb, table, timed
from bench.kit.receipts import NAMES_PER_PAGE, ThinStore, synthetic_receipt
from bench.kit.roots import encoding_record
from shards.base.store import LocalStore
from shards.format.receipts import active_receipts
from shards.root.committed import list_commits
from shards.root.index import write_streaming
from shards.root.manifest import newest_manifest
from shards.root.publish import PeriodicPublisher, Publisher

FILES_OF_PARTS = {"256x256": [1060] * 2, "512x512": [190] * 11}
"""Samples in each file of a part: 1.03 M files in 158,000 parts."""
BUCKETS = tuple(FILES_OF_PARTS)
CALL_SECONDS, CONNECTIONS = 0.03, 64
PHASES = {
    "first": "publish all receipts, without an index",
    "start": "start a job: list finished tars",
    "end": "end a job: publish new receipts",
    "streaming": "write streaming's index.json",
    "again": "publish without new receipts",
}


def main() -> None:
    """Measure every phase, and print a Markdown section."""
    parser = argparse.ArgumentParser(prog="bench.index.publishing", description=__doc__)
    parser.add_argument("--tars", type=int, default=79_000)
    parser.add_argument("--new", type=int, default=500, help="tars added between the first index and the end")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        commit(root, range(options.tars - options.new))
        encoding_record(77, 1024).save(LocalStore(root))
        for phase, about in PHASES.items():
            if phase == "start":
                commit(root, range(options.tars - options.new, options.tars))
            rows.append([about, *in_new_process(run_phase, phase, root)])
        left = leave(root)
    header = ["phase", "seconds", "list calls", "reads", "writes", "peak memory, MB", "of which imports"]
    body = (
        f"{table(header, rows)}\n\n{options.tars:,} tars in {' and '.join(BUCKETS)}, {options.new:,} of which "
        f"were added after the first index; {1000 * CALL_SECONDS:g} ms per call, {CONNECTIONS} concurrent calls, "
        f"{NAMES_PER_PAGE} names per page. A job that receives SIGTERM while publishing everything for the first time "
        f"exits after {left:.1f} s."
    )
    print(section("Publishing", "bench.index.publishing", body))


def commit(root: Path, tars: range) -> None:
    """Write the receipts of these tars."""
    for bucket in BUCKETS:
        folder = root / "commits" / bucket
        folder.mkdir(parents=True, exist_ok=True)
        for number in tars:
            receipt = synthetic_receipt(f"{number:06d}", bucket, samples_of_files=FILES_OF_PARTS[bucket])
            (root / receipt.name).write_bytes(receipt.sealed())


def run_phase(phase: str, root: Path) -> list[object]:
    """Run a phase, and return its seconds, calls and memory."""
    store, imports, start = ThinStore(root, CALL_SECONDS, CONNECTIONS), status_mb("VmHWM"), time.perf_counter()
    result: Any = None
    match phase:
        case "start":
            result = len(active_receipts(list_commits(store)))
        case "streaming":
            manifest = newest_manifest(store)
            assert manifest is not None
            write_streaming(store, manifest)
        case _:
            result = Publisher(store).publish().number
    seconds, calls = time.perf_counter() - start, [store.calls[kind] for kind in ("list", "get", "put")]
    assert phase == "streaming" or result
    return [f"{seconds:.1f}", *calls, f"{status_mb('VmHWM'):.0f}", f"{imports:.0f}"]


def publish_forever(root: Path, began: Any) -> None:
    """Publish until a SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # a job exits by itself as well
    with PeriodicPublisher(ThinStore(root, CALL_SECONDS, CONNECTIONS), every=0.01):
        began.set()
        time.sleep(3600)


def leave(root: Path) -> float:
    """Return the seconds from a SIGTERM to the exit of a job that is publishing."""
    for path in (root / "index" / "manifests").iterdir():
        path.unlink()
    context = get_context("spawn")
    began = context.Event()
    process = context.Process(target=publish_forever, args=(root, began))
    process.start()
    began.wait()
    time.sleep(5)  # while it reads receipts
    process.terminate()
    seconds, _ = timed(process.join)
    assert process.exitcode == 75
    return seconds


if __name__ == "__main__":
    main()
