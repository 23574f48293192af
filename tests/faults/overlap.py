"""A worker behind a slow store: `python -m tests.faults.overlap FOLDER MODELS` prints its device's share of the time.

Tars come from S3 and parts are uploaded there, at 30 ms per request and 1.3 times the bandwidth that the device needs.
The device sleeps. One and three tars at a time are compared, with peaks of memory and scratch space.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from bench.kit.common import status_mb
from precompute.config import PrecomputeConfig
from shards.base.scratch import use_scratch
from shards.open import open_store
from tests.faults.proxy import throttle
from tests.faults.steps_s3 import BUCKET, served
from tests.fixtures import precompute_config
from tests.sleeping import Device, encode_asleep
from tests.tiny import make_samples, make_tar

NUM_SAMPLES, BATCH, SECONDS, DELAY = 32, 8, 3.0, 0.03


def main(folder: Path, models: Path, num_tars: int) -> None:
    """Fill three roots: one to count the bytes, and two to measure."""
    for number in range(num_tars):
        make_tar(folder / "tars", f"{number:05d}", make_samples(number, NUM_SAMPLES, [(256, 256)]))
    figures: dict[str, object] = {"tars": num_tars}
    (folder / "scratch").mkdir()
    use_scratch(folder / "scratch")
    with served() as server:
        store = open_store(BUCKET)
        for path in (folder / "tars").iterdir():
            store.put({f"tars/{path.name}": path})

        def config(root: str) -> PrecomputeConfig:
            fields = precompute_config(models, folder / "tars", f"{BUCKET}/{root}", buckets=["256x256"])
            return fields.model_copy(update={"input": f"{BUCKET}/tars"})

        throttle(server)
        encode_asleep(config("counted"), Device(0.0), 1)
        size = throttle(server) / num_tars
        pace = size / (SECONDS * NUM_SAMPLES / BATCH)
        for at_once in (1, 3):
            throttle(server, DELAY, 1.3 * pace)
            before, device = psutil.Process().memory_info().rss, Device(SECONDS)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
            with most_of(folder / "scratch") as scratch:
                encode_asleep(config(f"root-{at_once}"), device, at_once)
            figures[f"{at_once} at once"] = {
                "device": round(device.busy, 4),
                "grown_mib": round(status_mb("VmHWM") - before / 2**20, 1),
                "scratch_tars": round(max(scratch) / size, 2),
            }
        figures["bytes_per_tar"] = round(size)
    print(json.dumps(figures))


@contextmanager
def most_of(folder: Path) -> Iterator[list[int]]:
    """Track the peak size of the files below a folder, sampled every 10 ms."""
    seen, left = [0], threading.Event()

    def look() -> None:
        while not left.wait(0.01):
            total = 0
            for path in folder.rglob("*"):
                with suppress(FileNotFoundError):  # gone since
                    total += path.stat().st_size if path.is_file() else 0
            seen.append(total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        left.set()
        thread.join()


def run(arguments: list[str]) -> None:
    folder, models, every = arguments
    main(Path(folder), Path(models), int(every))


if __name__ == "__main__":
    run(sys.argv[1:])
