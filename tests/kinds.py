"""Writers of the same captioned images as each kind of input."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from streaming import MDSWriter

from tests.tiny import make_tar

Samples = Sequence[tuple[str, dict[str, bytes]]]
"""(key, {suffix: bytes}) of each sample, as in a tar."""


def as_tar(folder: Path, samples: Samples) -> None:
    make_tar(folder, "00000", samples, stats=False)


def as_files(folder: Path, samples: Samples) -> None:
    folder.mkdir()
    for key, members in samples:
        for suffix, data in members.items():
            (folder / f"{key}.{suffix}").write_bytes(data)


def _pictures(folder: Path, samples: Samples) -> list[dict[str, str]]:
    """Write the images to a folder, and return a row for each."""
    folder.mkdir()
    rows = []
    for key, members in samples:
        (folder / f"{key}.jpg").write_bytes(members["jpg"])
        rows.append({"file_name": f"{key}.jpg", "text": members.get("txt", b"").decode()})
    return rows


def as_jsonl(folder: Path, samples: Samples) -> None:
    rows = _pictures(folder, samples)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_csv(folder: Path, samples: Samples) -> None:
    rows = _pictures(folder, samples)
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["file_name", "text"])
        writer.writeheader()
        writer.writerows(rows)


def as_table(folder: Path, samples: Samples) -> None:
    pq.write_table(pa.Table.from_pylist(_pictures(folder, samples)), folder / "metadata.parquet")


def as_kohya(folder: Path, samples: Samples) -> None:
    rows = _pictures(folder, samples)
    (folder / "meta_cap.json").write_text(json.dumps({row["file_name"]: {"caption": row["text"]} for row in rows}))


def as_parquet(folder: Path, samples: Samples, rows_per_group: int = 4) -> None:
    folder.mkdir()
    images = [{"bytes": members["jpg"], "path": f"{key}.jpg"} for key, members in samples]
    table = pa.table({"image": images, "text": [members.get("txt", b"").decode() for _, members in samples]})
    pq.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=rows_per_group)


def as_mds(folder: Path, samples: Samples, compression: str | None = None) -> None:
    columns = {"image": "bytes", "caption": "str", "width": "int"}
    options = {"columns": columns, "compression": compression, "hashes": ["sha1"], "size_limit": 1 << 14}
    with MDSWriter(out=str(folder), **options) as writer:
        for _, members in samples:
            writer.write({"image": members["jpg"], "caption": members.get("txt", b"").decode(), "width": 7})


KINDS: dict[str, Callable[[Path, Samples], None]] = {
    "tar": as_tar,
    "files": as_files,
    "jsonl": as_jsonl,
    "csv": as_csv,
    "table": as_table,
    "kohya": as_kohya,
    "parquet": as_parquet,
    "mds": as_mds,
}
