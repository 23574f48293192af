"""The part writer produces the same bytes as streaming, records hashes of them, and reports disk errors."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming import MDSWriter, StreamingDataset
from streaming.base.format.mds.encodings import mds_decode, mds_encode

from shards.base.durable import DamagedFile, sha256_file
from shards.base.errors import RequestError
from shards.format import mds_writer, text
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import Column, Decoder, read_offsets, shape_header
from shards.format.mds_writer import PartMDSWriter
from shards.open import open_store
from shards.root.reading import read_part
from shards.root.writing import PartWriter

pytestmark = pytest.mark.heavy


def record(latents: Path, **text: Any) -> EncodingRecord:
    """Make an encoding record with the given text fields."""
    encoding = EncodingRecord.load(open_store(latents))
    captions = {"captions": text.pop("captions")} if "captions" in text else {}
    tower = encoding.texts["text"].model_copy(update=text)
    return encoding.model_copy(update={"texts": {"text": tower}, **captions})


def samples(encoding: EncodingRecord, count: int) -> Iterator[dict]:
    """Draw samples of the 64x64 bucket."""
    random, stored = np.random.default_rng(0), encoding.texts["text"]
    for i in range(count):
        captions = [
            text.TextLatents(
                torch.from_numpy(random.normal(size=(stored.length, stored.width))),
                int(random.integers(2, stored.length)),
            )
            for _ in range(random.integers(1, 4) if encoding.several else 1)
        ]
        yield {
            "key": f"{i:09d}",
            "caption": "x" * int(random.integers(1, 100)),
            "image_latents": random.normal(size=(encoding.image.num_planes, 8, 8)).astype(np.float16),
            **next(text.pack("text", stored, [captions], encoding.several)),
            "size": np.array([64, 64, 0, 0], np.int32),
            "scores": np.array([5, 0.3, np.nan, np.nan], np.float32),
        }


def both_ways(
    encoding: EncodingRecord, folder: Path, limit: int, count: int
) -> tuple[PartMDSWriter, dict[str, bytes], dict[str, bytes]]:
    """Write the same samples with our writer and with streaming's; return our writer and both outputs."""
    bucket = Bucket(64, 64)
    columns = encoding.columns(bucket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mds_writer, "FILE_BYTES", limit)
        ours = PartMDSWriter(folder / "ours", encoding, bucket)
        theirs = MDSWriter(out=str(folder / "theirs"), columns=columns, hashes=["xxh3_64"], size_limit=limit)
        for sample in samples(encoding, count):
            ours.write(sample)
            theirs.write(sample)
        ours.finish()
        theirs.finish()
    one, two = ({path.name: path.read_bytes() for path in (folder / who).iterdir()} for who in ("ours", "theirs"))
    return ours, one, two


ONE, SEVERAL = ("txt",), ("txt", "json:title")


@pytest.mark.parametrize(
    ("storage", "trim", "captions", "limit", "count"),
    [
        *((*encoding, 8_000, 20) for encoding in product(("float16", "float8"), (False, True), (ONE, SEVERAL))),
        ("float8", True, SEVERAL, 500, 3),  # a sample is more than a file
        ("float8", True, SEVERAL, 5_000, 30),  # few samples a file
        ("float8", True, SEVERAL, 1 << 27, 60),  # one file
    ],
)
def test_the_bytes_are_those_of_streaming(
    latents: Path, tmp_path: Path, storage: str, trim: bool, captions: tuple[str, ...], limit: int, count: int
) -> None:
    encoding = record(latents, storage=storage, trim=trim, captions=captions)
    ours, written, expected = both_ways(encoding, tmp_path, limit, count)
    assert written == expected
    assert (len(ours.records) > 1) == (limit < 1 << 27) and ours.records.keys() == written.keys() - {"index.json"}
    for name, known in ours.records.items():
        path = tmp_path / "ours" / name
        assert (known.bytes, known.sha256) == (path.stat().st_size, sha256_file(path))
    if count > 3:  # for a sample larger than a file, streaming first writes an empty file, which it cannot read
        theirs = StreamingDataset(local=str(tmp_path / "theirs"), batch_size=1)
        for read, stored, sample in zip(read_part(tmp_path / "ours"), theirs, samples(encoding, count), strict=True):
            assert read.keys() == stored.keys() == sample.keys()
            for name, value in sample.items():
                np.testing.assert_array_equal(read[name], value, strict=not isinstance(value, str))
                np.testing.assert_array_equal(stored[name], value)


def test_a_file_is_filled_to_its_last_byte(latents: Path, tmp_path: Path) -> None:
    encoding = record(latents)
    _, written, _ = both_ways(encoding, tmp_path / "one", 9_000, 3)
    size = len(written["shard.00000.mds"])  # the limit has as many digits, so the header stays as long
    for limit, num_files in ((size, 1), (size - 1, 2)):
        _, written, expected = both_ways(encoding, tmp_path / str(limit), limit, 3)
        assert written == expected and len(written) == num_files + 1


@pytest.mark.parametrize(
    ("shape", "head"), [((1,), 2), ((255, 3), 3), ((256, 2), 5), ((65535,), 3), ((1, 65536), 9), ((2, 3, 300), 7)]
)
def test_an_array_that_says_its_own_shape(shape: tuple[int, ...], head: int) -> None:
    array = (np.arange(np.prod(shape)) % 1000).astype(np.float16).reshape(shape)
    data = shape_header(shape) + array.tobytes()
    assert data == mds_encode("ndarray:float16", array) and len(shape_header(shape)) == head
    read = Decoder([Column.of("a", "ndarray:float16")])(np.uint32(len(data)).tobytes() + data)["a"]
    np.testing.assert_array_equal(read, array, strict=True)
    np.testing.assert_array_equal(read, mds_decode("ndarray:float16", data), strict=True)


@pytest.mark.parametrize("encoding", ["pkl", "int", "ndarray", "ndarray:float64:3", "ndarray:int32:3:4"])
def test_a_type_that_stage_1_never_writes(encoding: str) -> None:
    with pytest.raises(RequestError, match="which stage 1 never writes"):
        Column.of("a", encoding)
    with pytest.raises(RequestError, match="which stage 1 never writes"):
        Decoder([Column("a", encoding, None)])


def test_arrays_that_do_not_fit_their_columns_and_a_part_without_samples(latents: Path, tmp_path: Path) -> None:
    encoding = record(latents, trim=True)
    (sample,) = samples(encoding, 1)
    writer = PartMDSWriter(tmp_path / "part", encoding, Bucket(64, 64))
    wrong = {"image_latents": np.zeros((3, 8, 8), np.float16), "scores": np.zeros(4, np.float64)}
    wrong["text_latents.text"] = sample["text_latents.text"][:0]
    for name, array in wrong.items():
        with pytest.raises(ValueError, match=f"{name} has dtype"):
            writer.write(sample | {name: array})
    writer.finish()
    assert json.loads((tmp_path / "part" / "index.json").read_text())["shards"] == [] and not writer.records


def test_an_error_of_the_disk_comes_out(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, forget: bool) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(mds_writer, "fsync_file", fail)
    encoding = EncodingRecord.load(open_store(latents))
    writer = PartMDSWriter(tmp_path / "part", encoding, Bucket(64, 64))
    for sample in samples(encoding, 3):
        writer.write(sample)
    with pytest.raises(OSError, match="No space left"):
        writer.finish()


@pytest.mark.parametrize(
    "data", [np.array([3, 16, 20, 30], "<u4"), np.array([2, 16, 20], "<u4")], ids=["count", "size"]
)
def test_a_header_that_lists_another_number_of_samples_is_damaged(data: np.ndarray) -> None:
    assert read_offsets(lambda *_: np.array([2, 16, 20, 30], "<u4").tobytes(), 2, "file").tolist() == [16, 20, 30]
    with pytest.raises(DamagedFile, match="file is damaged: its header does not match its index"):
        read_offsets(lambda *_: data.tobytes(), 2, "file")


def test_a_part_without_samples_has_no_captions(tmp_path: Path, latents: Path) -> None:
    part = PartWriter(tmp_path / "new" / "part", record(latents), Bucket(64, 64))
    part.refuse("000000001", "", "undecodable", "cannot be decoded")
    written = part.finish()
    assert written.stored == [] and set(written.captions.values()) == {0}
