"""What became of every sample of a shard, so that accepted + rejected = samples in, for each bucket and in all."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.pixels import Reject
from shards.commit import record_file, record_files
from shards.encoding import FILE_NAME, EncodingRecord
from shards.errors import WorkError
from shards.receipts import Part, Receipt
from shards.root import UNCOND_NAME
from shards.writing import TABLE_NAME

REJECTS_NAME = "rejects.parquet"
REJECT_SCHEMA = pa.schema([(name, pa.string()) for name in ("key", "url", "bucket", "reason", "detail")])
SOFTWARE = ("diffusers", "mosaicml-streaming", "numpy", "pillow", "torch", "transformers")

RejectRow = tuple[str, str, str, str, str]
"""(key, url, bucket, reason, detail); bucket is empty where the sample is in no bucket at all."""


@dataclass
class Outcome:
    """Counts and rows, gathered while a shard is encoded."""

    buckets: list[str]
    samples_in: int = 0
    encoded: set[str] = field(default_factory=set)
    """Keys that are in at least one of `buckets`."""
    rows: list[RejectRow] = field(default_factory=list)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    truncated_captions: int = 0

    def __post_init__(self) -> None:
        self.refused = {bucket: Counter() for bucket in self.buckets}

    def refuse(self, key: str, url: str, reject: Reject, bucket: str = "") -> None:
        """Count a sample that is not encoded for `bucket`, or for any where none is named."""
        self.rows.append((key, url, bucket, reject.reason, str(reject)))
        for name in [bucket] if bucket else self.buckets:
            self.refused[name][reject.reason] += 1

    def close(self, stored_before: set[str], rows_before: Iterable[RejectRow]) -> tuple[list[RejectRow], int]:
        """The rejects table and the number of samples encoded, with what an earlier run put into other buckets.

        Args:
            stored_before: keys that are in buckets committed earlier.
            rows_before: the rejects table as it was then.
        """
        stored = self.encoded | stored_before
        lost: dict[str, RejectRow] = {}
        partly = [row for row in rows_before if row[2]]
        for row in self.rows:
            if row[0] not in stored:
                lost.setdefault(row[0], (row[0], row[1], "", row[3], row[4]))
            elif row[2]:
                partly.append(row)
        return [*lost.values(), *partly], len(stored)


def close_attempt(
    outcome: Outcome,
    attempt: Path,
    root: Path,
    shard: str,
    encoding: EncodingRecord,
    source: dict[str, str | int | None],
    earlier: Receipt | None,
) -> Receipt:
    """Write the attempt's rejects table, and make its receipt (its times are filled in by the caller).

    Args:
        earlier: the receipt that this one replaces, where other buckets of the shard are committed.

    Raises:
        WorkError: the tar does not hold as many samples as it did then.
    """
    if earlier is not None and earlier.samples_in != outcome.samples_in:
        raise WorkError(
            f"shard {shard} held {earlier.samples_in} samples when buckets {', '.join(earlier.parts)} were committed "
            f"and holds {outcome.samples_in} now. Put the old tar back, or encode into a new root."
        )
    rows, encoded = outcome.close(_stored_keys(root, shard, earlier), _reject_rows(root, shard, earlier))
    columns = zip(*rows, strict=True) if rows else [() for _ in REJECT_SCHEMA]
    arrays = [pa.array(values, pa.string()) for values in columns]
    pq.write_table(pa.table(arrays, schema=REJECT_SCHEMA), attempt / REJECTS_NAME)
    parts = {
        bucket: Part(
            samples=outcome.samples_in - refused.total(),
            refused=dict(sorted(refused.items())),
            files=record_files(attempt / bucket),
        )
        for bucket, refused in outcome.refused.items()
    }
    return Receipt(
        shard=shard,
        encoding_id=encoding.id,
        samples_in=outcome.samples_in,
        encoded=encoded,
        rejected=dict(sorted(Counter(row[3] for row in rows if not row[2]).items())),
        truncated_captions=outcome.truncated_captions,
        input=source,
        parts=parts | (earlier.parts if earlier else {}),
        shared_files={
            f"rejects/{shard}.parquet": record_file(attempt / REJECTS_NAME),
            UNCOND_NAME: record_file(root / UNCOND_NAME),
            FILE_NAME: record_file(root / FILE_NAME),
        },
        software={name: version(name) for name in SOFTWARE},
        attempts=1,
        started="",
        seconds=0.0,
    )


def _stored_keys(root: Path, shard: str, earlier: Receipt | None) -> set[str]:
    keys: set[str] = set()
    for bucket in earlier.parts if earlier else ():
        keys.update(pq.read_table(root / bucket / shard / TABLE_NAME, columns=["key"])["key"].to_pylist())
    return keys


def _reject_rows(root: Path, shard: str, earlier: Receipt | None) -> list[RejectRow]:
    if earlier is None:
        return []
    table = pq.read_table(root / "rejects" / f"{shard}.parquet", schema=REJECT_SCHEMA)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))
