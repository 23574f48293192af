"""Exactly once: an attempt is written in private, made durable, renamed into place, and then exists by its receipt.

    ROOT/.attempts/00042.<random>/256x256/…, rejects.parquet      private; anything here may be deleted at any time
    ROOT/256x256/00042/…, ROOT/rejects/00042.parquet              in place, but nobody looks before …
    ROOT/commits/00042.json                                       … the receipt says so

Two attempts at one shard may run at once, on one machine or on two: the commit itself is done under a lock, and the
one that comes second finds the receipt and throws its own work away.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.files import fsync_folder, fsync_tree, locked, sha256_file
from shards.receipts import FileRecord, Receipt, load_receipt

ATTEMPTS = ".attempts"


@contextmanager
def attempt_folder(root: Path, shard: str) -> Iterator[Path]:
    """A private folder for one attempt at `shard`; gone afterwards, however the attempt ended."""
    folder = root / ATTEMPTS / f"{shard}.{uuid.uuid4().hex[:12]}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Size and SHA-256 of every file below `folder`, by relative path, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): record_file(path) for path in paths}


def record_file(path: Path) -> FileRecord:
    """Size and SHA-256 of one file."""
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))


def commit(
    root: Path, shard: str, attempt: Path, buckets: list[str], make_receipt: Callable[[Receipt | None], Receipt]
) -> Receipt:
    """Move an attempt's parts into place and write the receipt.

    Args:
        root: the latents root.
        shard: name of the input shard.
        attempt: folder with one sub-folder per bucket.
        buckets: the buckets that this attempt encoded.
        make_receipt: given the shard's earlier receipt (of other buckets) or None, writes the attempt's
            `rejects.parquet` and returns the receipt. Called under the lock.

    Returns:
        The receipt now in force: another's, where another attempt committed all of `buckets` first.
    """
    with locked(root / ATTEMPTS / f"{shard}.lock"):
        earlier = load_receipt(root, shard)
        if earlier is not None and set(buckets) <= set(earlier.parts):
            return earlier
        new = make_receipt(earlier)
        fsync_tree(attempt)
        for bucket in buckets:
            _put(attempt / bucket, root / bucket / shard)
        _put(attempt / "rejects.parquet", root / "rejects" / f"{shard}.parquet")
        new.save(root)
        return new


def _put(source: Path, target: Path) -> None:
    """Rename `source` to `target`. What an attempt that died before its receipt left there is in the way, and goes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        shutil.rmtree(target)
    source.replace(target)
    fsync_folder(target.parent)
