"""Verify a downloaded tar against its stats and its parquet file, and original images against their recorded hashes."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from precompute.download.config import DownloadConfig
from precompute.input.tars import Tar
from precompute.input.unit import MAX_JSON_BYTES, RawSample
from shards.base.errors import WorkError
from shards.base.store import LocalStore

# Image format → pattern of its magic bytes. The first match wins.
FORMATS = {
    "webp": rb"RIFF....WEBP",
    "avif": rb"....ftypavi[fs]",
    "jpeg": rb"\xff\xd8\xff",
    "png": rb"\x89PNG\r\n\x1a\n",
    "gif": rb"GIF8",
    "bmp": rb"BM",
    "tiff": rb"II\*\x00|MM\x00\*",
    "empty": rb"\Z",
    "html": rb"\s*<",
}


def check_tar(folder: Path, name: str, num_rows: int, config: DownloadConfig) -> dict[str, Any]:
    """Read all of `name`.tar, and compare it with `name`.parquet, `name`_stats.json and the number of requested rows.
    Raises WorkError at the first difference.

    Returns:
        `tar_bytes` and `tar_sha256`, the size and hash of the tar, and `formats`, the number of images per format.
    """
    stats = json.loads((folder / f"{name}_stats.json").read_text())
    rows = pq.read_table(folder / f"{name}.parquet", columns=["key", "sha256"]).to_pylist()
    hashes = {row["key"]: row["sha256"] for row in rows}
    _check_counts(stats, len(rows), num_rows)
    if len(hashes) != len(rows):
        raise WorkError("the parquet file lists a key twice")
    path = folder / f"{name}.tar"
    tar = Tar(path, path.stat().st_size)  # an image can be larger than requests.max_bytes once it is re-encoded
    tar.check(LocalStore(folder), name)
    formats: Counter[str] = Counter()
    for sample in tar.samples():
        json_member = tar.members[sample.key].get("json")
        has_large_json = json_member is not None and json_member.size > MAX_JSON_BYTES  # which is never parsed
        _check_sample(sample, hashes[sample.key], has_large_json, config.images.mode == "original")
        formats[format_of(sample.image or b"")] += 1
    return {"tar_bytes": tar.bytes, "tar_sha256": tar.sha256, "formats": dict(sorted(formats.items()))}


def _check_counts(stats: dict[str, Any], num_in_parquet: int, num_rows: int) -> None:
    counts = {
        "requested": num_rows,
        "stats": stats["count"],
        "sum of stats": stats["successes"] + stats["failed_to_download"] + stats["failed_to_resize"],
        "parquet": num_in_parquet,
    }
    if len(set(counts.values())) > 1:
        raise WorkError(f"the row counts differ: {', '.join(f'{place} {count}' for place, count in counts.items())}")


def _check_sample(sample: RawSample, sha256: str, has_large_json: bool, original_bytes: bool) -> None:
    if sample.image is None or sample.caption is None:
        raise WorkError(f"sample {sample.key} has no {'image' if sample.image is None else 'caption'} in the tar")
    if not has_large_json and sample.metadata.get("key") != sample.key:
        found = sample.metadata.get("key")
        problem = f"has the key {found} instead" if found else "is missing or has no key"
        raise WorkError(f"the JSON of sample {sample.key} {problem}")
    if original_bytes and hashlib.sha256(sample.image).hexdigest() != sha256:
        raise WorkError(f"the image of sample {sample.key} does not match the SHA-256 recorded during download")


def format_of(data: bytes) -> str:
    """Return the format of an image by its magic bytes: a key of FORMATS, or `other`."""
    return next((name for name, begin in FORMATS.items() if re.match(begin, data[:512], re.DOTALL)), "other")
