"""Measure the peak memory of commands that read every receipt of a root of the size of LAION's selection.

The receipts are synthetic, with the fields and the length of real ones, and every command runs in its own process.
There are no parts, so `verify` reports missing files, but it still reads all receipts and checks counts and indexes.

    python -m bench.index.reading [--tars 79000] [--before CHECKOUT]
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from bench.kit.common import section, table
from bench.kit.receipts import synthetic_receipt
from bench.kit.roots import encoding_record
from shards.base.durable import sealed_json
from shards.base.store import LocalStore
from shards.format.receipts import FileRecord, MadeBy, pack_bits
from shards.format.tables import CAPTION_CHANGES
from shards.root.index import write_indexes

FILES_OF_PARTS = {"256x256": [1060] * 2, "512x512": [190] * 11}
"""Samples in each file of a part: 1.03 M files in 158,000 parts."""
SAMPLES_IN, REJECTED = 10_000, 30
REASONS = ("corrupt", "no_caption", "non_finite")
COMMANDS = {
    "stats": ["--max-samples", "0"],
    "card": [],
    "by-node": [],
    "recall": ["--since", "2026-01-01", "--dry-run"],
    "verify": [],
}
TARS_AT_ONCE = 500
RUN = """
import runpy, sys
from pathlib import Path
import shards.__main__
def peak():
    return next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
imports = peak()
sys.argv = ["shards", *sys.argv[1:]]
try:
    shards.__main__.main()
finally:
    print("memory", peak(), imports, file=sys.stderr)
"""
"""Runs `python -m shards`, and prints its peak memory and that of its imports, in KiB."""


def main() -> None:
    """Measure every command, and print a Markdown section."""
    parser = argparse.ArgumentParser(prog="bench.index.reading", description=__doc__)
    parser.add_argument("--tars", type=int, default=79_000)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=[*COMMANDS])
    parser.add_argument("--before", type=Path, help="checkout of a different version to compare with")
    options = parser.parse_args()
    checkouts = {"this version": Path.cwd()} | ({str(options.before): options.before} if options.before else {})
    with tempfile.TemporaryDirectory() as folder:
        root = make_root(Path(folder) / "root", options.tars)
        num_bytes = sum(path.stat().st_size for path in (root / "commits").rglob("*.json"))
        rows = []
        for command in options.commands:
            peaks = []
            for name, checkout in checkouts.items():
                peak, imports, seconds = measure(checkout, command, root)
                peaks.append(peak)
                ratio = f"{peak / peaks[0]:.1f}" if len(peaks) > 1 else ""
                rows.append([command, name, f"{peak:,.0f}", f"{imports:,.0f}", f"{seconds:.0f}", ratio])
    header = ["command", "version", "peak, MB", "of which imports", "seconds", "relative to this version"]
    receipts = options.tars * len(FILES_OF_PARTS)
    body = f"{table(header, rows)}\n\n{receipts:,} receipts of {num_bytes / receipts / 1000:.1f} KB on average."
    print(section("Reading all receipts", "bench.index.reading", body))


def measure(checkout: Path, command: str, root: Path) -> tuple[float, float, float]:
    """Run a command, and return its peak memory and that of its imports in MB, and its seconds."""
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-c", RUN, command, str(root), *COMMANDS[command]],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - start
    if ran.returncode != (1 if command == "verify" else 0):
        sys.exit(f"error: `shards {command}` in {checkout} failed with exit code {ran.returncode}: {ran.stderr}")
    peak, imports = (int(word) * 1024 / 1e6 for word in ran.stderr.split("memory ")[1].split()[:2])
    return peak, imports, seconds


def make_root(root: Path, num_tars: int) -> Path:
    """Write a root with receipts and indexes but no parts."""
    encoding_record(77, 1024).save(LocalStore(root))
    for bucket in FILES_OF_PARTS:
        (root / "commits" / bucket).mkdir(parents=True)
    with ProcessPoolExecutor() as pool:  # keeps this process small
        firsts = range(0, num_tars, TARS_AT_ONCE)
        list(pool.map(write_receipts, [root] * len(firsts), firsts, [min(num_tars, n + TARS_AT_ONCE) for n in firsts]))
        pool.submit(write_indexes, LocalStore(root)).result()
    return root


def write_receipts(root: Path, first: int, last: int) -> None:
    """Write the receipts of the tars from `first` to `last` - 1."""
    for number in range(first, last):
        order = np.random.default_rng(number).permutation(SAMPLES_IN)
        rejects = {reason: bits(order[-REJECTED * (n + 1) :][:REJECTED]) for n, reason in enumerate(REASONS)}
        for bucket, files_of_part in FILES_OF_PARTS.items():
            receipt = synthetic_receipt(f"{number:06d}", bucket, samples_of_files=files_of_part)
            rejected = dict.fromkeys(REASONS, REJECTED)
            small = SAMPLES_IN - receipt.samples - sum(rejected.values())
            realistic = receipt.model_copy(
                update={
                    "token": random.Random(number).randbytes(16).hex(),
                    "files": receipt.files | dict.fromkeys(("index.json", "refused.parquet"), FILE),
                    "samples_in": SAMPLES_IN,
                    "stored": bits(order[: receipt.samples]),
                    "refused": rejected | {"too_small": small},
                    "rejects": rejects,
                    "captions": {"stored": receipt.samples} | dict.fromkeys(CAPTION_CHANGES, 10),
                    "shared_files": dict.fromkeys(("uncond.safetensors", "encoding.json"), FILE),
                    "software": {f"package_{n}": "1.0.0" for n in range(8)},
                    "settings": {f"section.setting_{n}": n for n in range(20)},
                    "made_by": MadeBy(
                        host=f"gpu-{number % 64}",
                        gpu="NVIDIA H100 80GB HBM3",
                        gpu_uuid=f"GPU-{number % 512:032x}",
                        version="0.1.0",
                        source_sha256="a" * 64,
                    ),
                    "started": "2026-11-24T12:00:00+00:00",
                    "seconds": {f"stage_{n}": 12.345 for n in range(12)} | {"total": 100.0},
                }
            )
            (root / receipt.name).write_bytes(sealed_json(realistic.model_dump(mode="json")))


FILE = FileRecord(bytes=1_000_000, sha256="d" * 64)


def bits(rows: Iterable[int]) -> str:
    """Pack a mask of SAMPLES_IN samples that is set at `rows`."""
    values = np.zeros(SAMPLES_IN, bool)
    values[np.asarray(rows)] = True
    return pack_bits(values)


if __name__ == "__main__":
    main()
