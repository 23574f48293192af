"""The part's writer gives streaming's own bytes, knows what it wrote, and does not lose a disk's error."""

import json
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter

from shards import mds_writer
from shards.buckets import Bucket
from shards.encoding import EncodingRecord
from shards.files import sha256_file
from shards.mds_writer import PartMDSWriter


def samples(encoding: EncodingRecord, count: int) -> list[dict]:
    """Samples of the 64x64 bucket."""
    random = np.random.default_rng(0)
    text = (encoding.text.length, encoding.text.width)
    return [
        {
            "key": f"{i:09d}",
            "caption": "x" * int(random.integers(1, 100)),
            "image_latents": random.normal(size=(encoding.num_planes, 8, 8)).astype(np.float16),
            "text_latents": random.normal(size=text).astype(np.float16),
            "size": np.array([64, 64, 0, 0], np.int32),
            "scores": np.array([5, 0.3, np.nan, np.nan], np.float32),
        }
        for i in range(count)
    ]


def test_the_bytes_are_those_of_streaming(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, bucket, limit = EncodingRecord.load(latents), Bucket(64, 64), 20_000
    monkeypatch.setattr(mds_writer, "SHARD_BYTES", limit)
    ours = PartMDSWriter(tmp_path / "ours", encoding, bucket)
    theirs = MDSWriter(
        out=str(tmp_path / "theirs"), columns=encoding.columns(bucket), hashes=["xxh3_64"], size_limit=limit
    )
    for sample in samples(encoding, 100):
        ours.write(sample)
        theirs.write(sample)
    ours.finish()
    theirs.finish()
    written = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    assert len(ours.records) > 5 and ours.records.keys() == written.keys() - {"index.json"}
    for name, record in ours.records.items():
        path = tmp_path / "ours" / name
        assert (record.bytes, record.sha256) == (path.stat().st_size, sha256_file(path))


def test_no_sample_at_all(latents: Path, tmp_path: Path) -> None:
    writer = PartMDSWriter(tmp_path / "part", EncodingRecord.load(latents), Bucket(64, 64))
    writer.finish()
    assert json.loads((tmp_path / "part" / "index.json").read_text())["shards"] == [] and not writer.records


def test_an_error_of_the_disk_comes_out(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(mds_writer, "fsync_file", fail)
    encoding = EncodingRecord.load(latents)
    writer = PartMDSWriter(tmp_path / "part", encoding, Bucket(64, 64))
    for sample in samples(encoding, 3):
        writer.write(sample)
    with pytest.raises(OSError, match="No space left"):
        writer.finish()
