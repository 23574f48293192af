"""What a selection costs per row: `python -m bench.outputs.select --rows 1000000 20000000 --folder runs/bench`.

Run it as a module: as a script its folder would come first in the import path, and Python has a module `select` too.
Synthetic rows of the LAION schema, 20 % of the URLs twice. Each stage runs in a fresh process with one Arrow thread, so
that rates are per core and peak memory is the stage's own.
"""

import argparse
import multiprocessing
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.select.config import FiltersConfig, SelectConfig, UrlsConfig
from precompute.select.duplicates import count_partitions, find_drops, hash_urls, rows_to_drop, write_hashes
from precompute.select.job import select
from precompute.select.metadata import find_files, inspect, read_batches
from precompute.select.rules import Rule, apply, build_rules

FILE_ROWS = 1_000_000
NUMERIC = FiltersConfig(max_pwatermark=0.8, min_similarity=0.25, max_aspect_ratio=3.0)


def make_urls(ids: np.ndarray) -> pa.Array:
    """URLs of about 75 characters."""
    text = pa.array(ids).cast(pa.string())
    hosts = pa.array(ids % 9973).cast(pa.string())
    sizes = pa.array(ids * 7919 % 10**9).cast(pa.string())
    parts = ["https://cdn", hosts, ".example.com/s/files/1/", text, "/products/img_", text, ".jpg?v=", sizes, ""]
    return pc.binary_join_element_wise(*parts)


def make_file(path: Path, start: int, num_rows: int, num_urls: int) -> None:
    """`num_rows` rows from row `start` on, of a set with `num_urls` different URLs."""
    random = np.random.default_rng(start)
    ids = np.arange(start, start + num_rows) % num_urls
    sides = np.clip(random.lognormal(6.3, 0.6, (2, num_rows)), 32, 8000).astype(np.int32)
    text = pc.binary_join_element_wise("a picture of thing number ", pa.array(ids).cast(pa.string()), " on a table", "")
    table = pa.table(
        {
            "URL": make_urls(ids),
            "TEXT": text,
            "WIDTH": sides[0],
            "HEIGHT": sides[1],
            "similarity": random.normal(0.32, 0.03, num_rows).astype(np.float32),
            "hash": random.integers(-(2**62), 2**62, num_rows),
            "punsafe": pa.array(random.beta(0.3, 3, num_rows).astype(np.float32), mask=random.random(num_rows) < 0.01),
            "pwatermark": random.beta(0.5, 1, num_rows).astype(np.float32),
            "AESTHETIC_SCORE": random.normal(4.9, 0.8, num_rows).astype(np.float32),
        }
    )
    pq.write_table(table, path)


def make_metadata(folder: Path, num_rows: int) -> None:
    """Files of FILE_ROWS rows; four fifths of the URLs are different."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, num_rows, FILE_ROWS):
        path = folder / f"part-{start // FILE_ROWS:05d}.parquet"
        if not path.exists():
            make_file(path, start, min(FILE_ROWS, num_rows - start), num_rows * 4 // 5)


def filter_in_memory(metadata: Path, num_rows: int) -> tuple[float, float]:
    """Seconds of the numeric rules alone, on batches that are in memory."""
    rules = _numeric_rules()
    batches = list(_numeric_batches(metadata, num_rows, rules))
    return _time(lambda: _apply(rules, iter(batches)))


def filter_from_parquet(metadata: Path, num_rows: int) -> tuple[float, float]:
    """Seconds of the numeric rules, with reading their columns from parquet."""
    rules = _numeric_rules()
    return _time(lambda: _apply(rules, _numeric_batches(metadata, num_rows, rules)))


def hash_and_write(folder: Path, num_rows: int) -> tuple[float, float]:
    """Seconds of hashing every URL and writing the hashes in partitions; making the URLs is not counted."""
    folder.mkdir(parents=True)
    making = np.zeros(2)

    def urls() -> Iterator[pa.Array]:
        nonlocal making
        for start in range(0, num_rows, 2**17):
            begun = _now()
            made = make_urls(np.arange(start, min(start + 2**17, num_rows)) % (num_rows * 4 // 5))
            making += _now() - begun
            yield made

    wall, cpu = _time(lambda: write_hashes(folder, map(hash_urls, urls()), _partitions(num_rows))) - making
    return float(wall), float(cpu)


def find_duplicates(folder: Path, num_rows: int) -> tuple[float, float]:
    """Seconds of finding the duplicates among the hashes."""
    drops = [folder / f"drops-{partition}" for partition in range(_partitions(num_rows))]

    def run() -> None:
        for partition, path in enumerate(drops):
            find_drops(path, partition, [folder], None, True)

    spent = _time(run)
    found = len(rows_to_drop(drops, 0)[1])
    assert found == num_rows - num_rows * 4 // 5, f"found {found} duplicates"
    return spent


def select_all(metadata: Path, output: Path) -> tuple[float, float]:
    """Seconds of a whole selection with the default filters, in one process."""
    return _time(lambda: select(SelectConfig(metadata=str(metadata), output=output, processes=1)))


def _partitions(num_rows: int) -> int:
    return count_partitions(num_rows, SelectConfig.model_fields["partition_rows"].default)


def _numeric_rules() -> list[Rule]:
    rules = build_rules(NUMERIC, UrlsConfig(), [])
    return [rule for rule in rules if not {"TEXT", "URL"} & set(rule.columns)]


def _numeric_batches(metadata: Path, num_rows: int, rules: list[Rule]) -> Iterator[pa.RecordBatch]:
    columns = [column for rule in rules for column in rule.columns]
    for address in find_files(str(metadata))[: max(num_rows // FILE_ROWS, 1)]:
        yield from read_batches(inspect(address, rules), columns)


def _apply(rules: list[Rule], batches: Iterator[pa.RecordBatch]) -> None:
    for batch in batches:
        apply(rules, batch, Counter())


def _time(function: Callable[[], Any]) -> tuple[float, float]:
    """(wall seconds, CPU seconds). On a shared machine the second is the steadier."""
    begun = _now()
    function()
    wall, cpu = _now() - begun
    return float(wall), float(cpu)


def _now() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def _run_stage(stage: Callable[..., tuple[float, float]], arguments: tuple[Any, ...]) -> tuple[float, ...]:
    """(wall seconds, CPU seconds, MB before the stage, MB at its peak)."""
    pa.set_cpu_count(1)
    pa.array([None, 1.5]).to_numpy(zero_copy_only=False)  # loads pandas, once per process
    before = _peak_memory()
    wall, cpu = stage(*arguments)
    return wall, cpu, before, _peak_memory()


def _peak_memory() -> float:
    """MB; getrusage would give the parent's peak where that was higher."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(title: str, num_rows: int, stage: Callable[..., tuple[float, float]], *arguments: Any) -> None:
    """Run a stage in a fresh process, and print a line of the table."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        wall, cpu, before, peak = pool.submit(_run_stage, stage, arguments).result()
    rate = num_rows / cpu / 1e6
    print(f"| {title} | {num_rows:,} | {wall:.2f} | {cpu:.2f} | {rate:.2f} | {before:.0f} | {peak:.0f} |", flush=True)


def main() -> None:
    """Measure each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 20_000_000])
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/select"))
    options = parser.parse_args()
    print("| stage, one process | rows | wall s | CPU s | M rows per CPU s | MB before | MB at peak |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for num_rows in options.rows:
        metadata, work = options.folder / f"metadata-{num_rows}", options.folder / f"work-{num_rows}"
        make_metadata(metadata, num_rows)
        shutil.rmtree(work, ignore_errors=True)
        measure("numeric filters, in memory", num_rows, filter_in_memory, metadata, num_rows)
        measure("numeric filters, from parquet", num_rows, filter_from_parquet, metadata, num_rows)
        measure("dedupe: hash URLs, write", num_rows, hash_and_write, work / "hashes", num_rows)
        size = (work / "hashes" / "hashes.bin").stat().st_size
        measure("dedupe: find duplicates", num_rows, find_duplicates, work / "hashes", num_rows)
        measure("whole selection, default filters", num_rows, select_all, metadata, work / "selected")
        print(f"hashes on disk: {size / 1e6:,.0f} MB, {_partitions(num_rows)} partitions", flush=True)
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
