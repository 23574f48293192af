"""Small metadata files with LAION's schema for the tests of select and download."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.select.config import SelectConfig

GOOD = {
    "URL": "http://example.com/{i}.jpg",
    "TEXT": "picture number {i}",
    "WIDTH": 640,
    "HEIGHT": 480,
    "similarity": 0.3,
    "hash": 7,
    "punsafe": 0.01,
    "pwatermark": 0.2,
    "AESTHETIC_SCORE": 5.5,
    "LANGUAGE": "en",
}
TYPES = {"WIDTH": pa.int32(), "HEIGHT": pa.int32(), "hash": pa.int64()} | {
    name: pa.float32() for name in ("similarity", "punsafe", "pwatermark", "AESTHETIC_SCORE")
}


def rows(num_rows: int, start: int = 0, **columns: list[Any]) -> pa.Table:
    """Return `num_rows` rows that pass every default filter, with some columns replaced by `columns`."""
    numbers = range(start, start + num_rows)
    values = {
        name: [value.format(i=i) if isinstance(value, str) else value for i in numbers] for name, value in GOOD.items()
    }
    values |= columns
    return pa.table({name: pa.array(value, TYPES.get(name, pa.string())) for name, value in values.items()})


def write(path: Path, table: pa.Table, **options: Any) -> Path:
    """Write `table` as a parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def three_files(folder: Path) -> Path:
    """Write three files, 900 rows: every tenth is unsafe, every seventh of the rest small, and 150 URLs occur twice."""
    for number in range(3):
        indexes = range(number * 300, number * 300 + 300)
        table = rows(
            300,
            punsafe=[0.5 if i % 10 == 0 else 0.01 for i in indexes],
            WIDTH=[100 if i % 7 == 0 else 640 for i in indexes],
            URL=[f"http://example.com/{i % 750}.jpg" for i in indexes],
            TEXT=[f"row {i}" for i in indexes],
        )
        write(folder / f"part-{number}.parquet", table)
    return folder


def config(metadata: Path | str, output: Path, **fields: Any) -> SelectConfig:
    """Run a selection in this process."""
    return SelectConfig.model_validate({"metadata": str(metadata), "output": output, "processes": 1} | fields)
