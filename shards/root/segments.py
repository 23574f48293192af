"""Index segments: immutable Arrow tables with one row per part.

Each row includes a list of the part's MDS files; rows for 158,000 parts with 1.03 M files take about 90 MB. Rows are
sorted by tar and generation, so the merged table does not depend on how the rows were divided into segments.
"""

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.base.durable import DamagedFile, canonical_json
from shards.base.store import Store
from shards.format.mds import part_type
from shards.format.receipts import Receipt, receipt_name
from shards.format.tables import SAMPLES_NAME

FOLDER = "index/segments"
ROWS_AT_ONCE = 1 << 16
MDS_FILE = pa.struct([("basename", pa.string()), ("bytes", pa.int64()), ("samples", pa.int64()), ("hash", pa.uint64())])
SCHEMA = pa.schema(
    [
        ("tar", pa.string()),
        ("generation", pa.int32()),
        ("part", pa.string()),  # the part's folder, relative to the bucket's folder
        ("etag", pa.string()),  # ETag of the receipt's object
        ("samples", pa.int64()),
        ("table", pa.string()),  # SHA-256 of samples.parquet
        ("digest", pa.binary(32)),  # see `digest`
        ("files", pa.list_(MDS_FILE)),
    ]
)


def make_rows(receipts: Iterable[tuple[Receipt, str]]) -> pa.Table:
    """Build a table with one row per (receipt, ETag) pair, sorted by tar and generation."""
    rows = [
        {
            "tar": receipt.tar,
            "generation": receipt.generation,
            "part": receipt.part,
            "etag": etag,
            "samples": receipt.samples,
            "table": receipt.files[SAMPLES_NAME].sha256,
            "digest": digest(receipt),
            "files": [{**file.model_dump(), "hash": int(file.hash, 16)} for file in receipt.mds],
        }
        for receipt, etag in receipts
    ]
    return _sorted(pa.Table.from_pylist(rows, SCHEMA)).combine_chunks()


def digest(receipt: Receipt) -> bytes:
    """Hash everything that determines a part's samples and their location, but not when or where they were encoded."""
    identity = receipt.model_dump(mode="json", include={"bucket", "tar", "generation", "part", "samples", "mds"})
    return hashlib.sha256(canonical_json(identity | {"table": receipt.files[SAMPLES_NAME].sha256})).digest()


def merge(tables: list[pa.Table], columns: Sequence[str] = SCHEMA.names) -> pa.Table:
    """Merge sorted tables into one, sorted by tar and generation, with contiguous columns."""
    tables = [table.select(columns) for table in tables if len(table)] or [SCHEMA.empty_table().select(columns)]
    rows = tables[0] if len(tables) == 1 else _sorted(pa.concat_tables(tables))
    return rows if rows["tar"].num_chunks == 1 else rows.combine_chunks()


def _sorted(rows: pa.Table) -> pa.Table:
    return rows.sort_by([("tar", "ascending"), ("generation", "ascending")])


def content_id(rows: pa.Table) -> str:
    """Return an id of 64 hex digits that depends only on the set of parts, not on how they are divided into segments or
    when they were published."""
    return hashlib.sha256(b"".join(rows["digest"].to_pylist())).hexdigest()


def receipts_of(rows: pa.Table, bucket: str) -> list[str]:
    """Return the path of each row's receipt, relative to the root."""
    pairs = zip(rows["tar"].to_pylist(), rows["generation"].to_pylist(), strict=True)
    return [receipt_name(bucket, tar, generation) for tar, generation in pairs]


def part_name(tar: str, generation: int) -> str:
    """Return a part's name, such as `00042.g0`, which also appears in the name of its tombstone."""
    return f"{tar}.g{generation}"


def sizes(tables: Iterable[pa.Table]) -> dict[str, int]:
    """Count the parts, files and samples of several tables."""
    counts = {"parts": 0, "files": 0, "samples": 0}
    for rows in tables:
        counts["parts"] += len(rows)
        counts["files"] += pc.sum(pc.list_value_length(rows["files"]), min_count=0).as_py()
        counts["samples"] += pc.sum(rows["samples"], min_count=0).as_py()
    return counts


def files_of(rows: pa.Table) -> pa.Table:
    """Build a table with one row per MDS file, in order. Its columns are the fields of `MDS_FILE`, and `name`, the
    file's path relative to the bucket's folder."""
    nested = rows["files"].combine_chunks()
    parts = pc.take(rows["part"].combine_chunks(), pc.list_parent_indices(nested))
    flat = nested.flatten()
    columns = {field.name: flat.field(field.name) for field in MDS_FILE}
    names = pc.binary_join_element_wise(parts, columns["basename"], "/")
    return pa.table(columns | {"name": names.cast(pa.binary())})


def names_outside(rows: pa.Table) -> list[str]:
    """Return part folders and file names that are not plain names and could point outside the bucket's folder."""
    basenames = pc.list_flatten(rows["files"]).combine_chunks().field("basename")
    names = pa.concat_arrays([rows["part"].combine_chunks(), basenames])
    outside: list[str] = names.filter(pc.match_substring_regex(names, r"/|\\|^\.*$")).to_pylist()
    return outside


def save_arrays(rows: pa.Table, folder: Path) -> None:
    """Write the .npy files that `MdsIndex.mapped` memory-maps.

    Names are converted in blocks of ROWS_AT_ONCE to limit the number of Python strings in memory.
    """
    files = files_of(rows)
    for name, column in (("sizes", "bytes"), ("samples", "samples"), ("hashes", "hash")):
        np.save(folder / f"{name}.npy", files[column].to_numpy())
    longest = pc.max(pc.binary_length(files["name"])).as_py() or 1
    names = np.lib.format.open_memmap(folder / "names.npy", "w+", f"S{longest}", (len(files),))
    for first in range(0, len(files), ROWS_AT_ONCE):
        names[first : first + ROWS_AT_ONCE] = files["name"].slice(first, ROWS_AT_ONCE).to_pylist()
    np.save(folder / "parts.npy", parts_of(rows))


def parts_of(rows: pa.Table) -> NDArray[np.void]:
    """Convert the rows to a (parts,) array of dtype `part_type`."""
    folders = [part.encode() for part in rows["part"].to_pylist()]
    named = [
        part_name(*pair).encode() for pair in zip(rows["tar"].to_pylist(), rows["generation"].to_pylist(), strict=True)
    ]
    longest_folder, longest_name = (max(map(len, texts), default=1) for texts in (folders, named))
    parts = np.empty(len(rows), part_type(longest_folder, longest_name))
    parts["folder"], parts["name"], parts["samples"] = folders, named, rows["samples"].to_numpy()
    parts["table"] = [sha256.encode() for sha256 in rows["table"].to_pylist()]
    return parts


def save_segment(store: Store, rows: pa.Table) -> str:
    """Store a table as a file named after its SHA-256; return the SHA-256."""
    sink = io.BytesIO()  # `getvalue` returns its buffer without a copy
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(rows)
    data = sink.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    store.create(f"{FOLDER}/{sha256}.arrow", data)
    return sha256


def load_segment(store: Store, sha256: str) -> pa.Table:
    """Load a segment. Raises FileNotFoundError if it is missing, and DamagedFile if it does not match its SHA-256."""
    name = f"{FOLDER}/{sha256}.arrow"
    data = store.read(name)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DamagedFile(
            f"{store.where(name)} is damaged: its SHA-256 does not match its name. Restore it from a backup, or "
            f"delete the file and rebuild the index with `python -m shards index {store.where()}`."
        )
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()
