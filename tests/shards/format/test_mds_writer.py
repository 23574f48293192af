"""The part's writer gives streaming's own bytes, knows what it wrote, and does not lose a disk's error."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming import MDSWriter

from shards.base.files import sha256_file
from shards.format import mds_writer, text
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds_writer import PartMDSWriter
from shards.open import open_store


def record(latents: Path, **text: Any) -> EncodingRecord:
    """The encoding of a root, with other text fields."""
    encoding = EncodingRecord.load(open_store(latents))
    return encoding.model_copy(update={"text": encoding.text.model_copy(update=text)})


def samples(encoding: EncodingRecord, count: int) -> Iterator[dict]:
    """Samples of the 64x64 bucket."""
    random, stored = np.random.default_rng(0), encoding.text
    for i in range(count):
        captions = [
            (
                torch.from_numpy(random.normal(size=(stored.length, stored.width))),
                int(random.integers(2, stored.length)),
            )
            for _ in range(random.integers(1, 4) if stored.several else 1)
        ]
        pack = text.pack_several(captions, stored.storage, stored.trim) if stored.several else None
        yield {
            "key": f"{i:09d}",
            "caption": "x" * int(random.integers(1, 100)),
            "image_latents": random.normal(size=(encoding.num_planes, 8, 8)).astype(np.float16),
            **(pack or text.pack(*captions[0], stored.storage, stored.trim)),
            "size": np.array([64, 64, 0, 0], np.int32),
            "scores": np.array([5, 0.3, np.nan, np.nan], np.float32),
        }


def both_ways(
    encoding: EncodingRecord, folder: Path, limit: int, count: int
) -> tuple[PartMDSWriter, dict[str, bytes], dict[str, bytes]]:
    """The same samples by our writer and by streaming's: ours, and what either wrote."""
    bucket = Bucket(64, 64)
    columns = encoding.columns(bucket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mds_writer, "SHARD_BYTES", limit)
        ours = PartMDSWriter(folder / "ours", encoding, bucket)
        theirs = MDSWriter(out=str(folder / "theirs"), columns=columns, hashes=["xxh3_64"], size_limit=limit)
        for sample in samples(encoding, count):
            ours.write(sample)
            theirs.write(sample)
        ours.finish()
        theirs.finish()
    one, two = ({path.name: path.read_bytes() for path in (folder / who).iterdir()} for who in ("ours", "theirs"))
    return ours, one, two


@pytest.mark.parametrize("storage", ["float16", "float8"])
@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("captions", [("txt",), ("txt", "json:title")], ids=["one-caption", "several"])
def test_the_bytes_are_those_of_streaming(
    latents: Path, tmp_path: Path, storage: str, trim: bool, captions: tuple[str, ...]
) -> None:
    encoding = record(latents, storage=storage, trim=trim, captions=captions)
    ours, written, expected = both_ways(encoding, tmp_path, 20_000, 100)
    assert written == expected
    assert len(ours.records) > 5 and ours.records.keys() == written.keys() - {"index.json"}
    for name, known in ours.records.items():
        path = tmp_path / "ours" / name
        assert (known.bytes, known.sha256) == (path.stat().st_size, sha256_file(path))


def test_a_sample_that_is_more_than_a_file(latents: Path, tmp_path: Path) -> None:
    _, written, expected = both_ways(record(latents), tmp_path, 500, 3)
    assert written == expected


def test_an_array_that_does_not_fit_its_column(latents: Path, tmp_path: Path) -> None:
    encoding = EncodingRecord.load(open_store(latents))
    (sample,) = samples(encoding, 1)
    writer = PartMDSWriter(tmp_path / "part", encoding, Bucket(64, 64))
    for name, wrong in (("image_latents", np.zeros((3, 8, 8), np.float16)), ("scores", np.zeros(4, np.float64))):
        with pytest.raises(ValueError, match=f"{name} has dtype"):
            writer.write(sample | {name: wrong})


def test_no_sample_at_all(latents: Path, tmp_path: Path) -> None:
    writer = PartMDSWriter(tmp_path / "part", EncodingRecord.load(open_store(latents)), Bucket(64, 64))
    writer.finish()
    assert json.loads((tmp_path / "part" / "index.json").read_text())["shards"] == [] and not writer.records


def test_an_error_of_the_disk_comes_out(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, forget: bool) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(mds_writer, "fsync_file", fail)
    encoding = EncodingRecord.load(open_store(latents))
    writer = PartMDSWriter(tmp_path / "part", encoding, Bucket(64, 64))
    for sample in samples(encoding, 3):
        writer.write(sample)
    with pytest.raises(OSError, match="No space left"):
        writer.finish()
