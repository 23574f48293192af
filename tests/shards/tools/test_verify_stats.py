"""Verification names all injected damage, and statistics of a latents root."""

import errno
import hashlib
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.kit.receipts import synthetic_receipt
from bench.kit.roots import encoding_record
from shards.__main__ import run
from shards.base.durable import DamagedFile, read_sealed_json, write_sealed_json
from shards.base.errors import WorkError, exit_code_of
from shards.base.store import LocalStore
from shards.open import open_store
from shards.root.publish import Publisher
from shards.tools.stats import root_stats, sample_stats
from shards.tools.verify import verify_root
from tests.roots import part_of


def test_a_missing_and_a_foreign_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (part_of(root, "64x64", tar) for tar in ("00000", "00001"))
    (one / "shard.00000.mds").unlink()
    (two / "notes.txt").write_text("x")
    assert [line.split("/root/")[1] for line in verify_root(open_store(root))] == [
        f"64x64/{one.name}/shard.00000.mds is missing",
        f"64x64/{two.name}/notes.txt is not listed in any receipt",
    ]
    assert exit_code_of(lambda: run(["verify", str(root)])) == 1
    printed = capsys.readouterr()
    assert f"64x64/{one.name}/shard.00000.mds is missing\n" in printed.out and "has 2 problems" in printed.err


@pytest.mark.parametrize("unreadable", ["shard.00000.mds", "samples.parquet", ".arrow"])
def test_a_bad_sector_is_reported_and_the_verification_continues(
    root: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    read_bytes, digest = Path.read_bytes, hashlib.file_digest

    def read(path: Path) -> bytes:
        if path.name.endswith(unreadable):
            raise OSError(errno.EIO, "Input/output error")
        return read_bytes(path)

    def hash_file(file: Any, name: str) -> Any:
        if file.name.endswith(unreadable):
            raise OSError(errno.EIO, "Input/output error")
        return digest(file, name)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(hashlib, "file_digest", hash_file)
    problems = list(verify_root(open_store(root)))
    assert len(problems) >= 2
    expected = rf"{re.escape(unreadable)} cannot be read|A segment of .* is missing or damaged"
    assert all(re.search(expected, line) for line in problems)


def test_each_segment_is_read_once(tmp_path: Path) -> None:
    """Every publication has its own index, which lists segments of earlier ones."""
    read = Counter[str]()

    class CountingStore(LocalStore):
        def read(self, name: str) -> bytes:
            read[name] += 1
            return super().read(name)

    encoding_record(4, 4).save(LocalStore(tmp_path))
    for number in range(12):
        receipt = synthetic_receipt(f"{number:05d}")
        LocalStore(tmp_path).create(receipt.name, receipt.sealed())
        Publisher(LocalStore(tmp_path)).publish()
    problems = list(verify_root(CountingStore(tmp_path)))
    segments = [f"index/segments/{path.name}" for path in (tmp_path / "index" / "segments").iterdir()]
    assert [read[name] for name in segments] == [1] * len(segments) and len(segments) >= 12
    assert not any("index/" in line for line in problems)


@pytest.mark.parametrize("content", [b"x", None])
def test_each_index_with_a_lost_or_damaged_segment_is_named(root: Path, content: bytes | None) -> None:
    for path in (root / "index" / "segments").iterdir():
        path.unlink()
        if content:
            path.write_bytes(content)
    lines = list(verify_root(open_store(root)))
    for path in (root / "index" / "buckets").iterdir():
        assert any(re.search(f"A segment of .*{path.name} is missing or damaged", line) for line in lines)


@pytest.mark.parametrize("lost", ["index", "index/manifests", "index/buckets"])
def test_a_missing_index_is_found(root: Path, lost: str) -> None:
    (root / "index" / "segments" / ".nfs0001").touch()  # NFS leaves such files behind
    assert list(verify_root(open_store(root))) == []
    shutil.rmtree(root / lost)
    problems = list(verify_root(open_store(root)))
    assert len(problems) == 2 and all("that matches the receipts: rebuild it with" in line for line in problems)
    run(["index", str(root)])
    assert list(verify_root(open_store(root))) == []


def test_stats_name_the_damaged_file(root: Path, s3: str) -> None:
    """Also on S3, where the damaged file has been copied to a temporary folder."""
    part = part_of(root, "64x64", "00000")
    data = (part / "shard.00000.mds").read_bytes()
    begin = int.from_bytes(data[4:8], "little")  # of the first sample, which starts with the sizes of its columns
    remote = open_store(f"{s3}/root")
    remote.put({name: root / name for name in open_store(root).files()})
    for change, message in (
        (data[:5] + bytes([data[5] ^ 64]) + data[6:], "is damaged: its header does not match its index"),
        (data[:begin] + b"\xff" * 4 + data[begin + 4 :], "is damaged: its sample 0 cannot be decoded"),
        (None, "is missing. Restore it from a backup"),
    ):
        (part / "shard.00000.mds").write_bytes(change or b"")
        name = f"64x64/{part.name}/shard.00000.mds"
        remote.put({name: part / "shard.00000.mds"})
        if change is None:
            (part / "shard.00000.mds").unlink()
            remote.remove([name])
        for store in (open_store(root), remote):
            with pytest.raises(DamagedFile, match=re.escape(f"{store.where(name)} {message}")):
                root_stats(store, max_samples=10)


def test_a_receipt_that_tells_another_reason_than_its_part(root: Path) -> None:
    receipt = read_sealed_json(root / "commits" / "64x64" / "00000.json")
    for counted in ("refused", "rejects"):
        receipt[counted]["looks_odd"] = receipt[counted].pop("no_image")
    write_sealed_json(root / "commits" / "64x64" / "00000.json", receipt)
    assert any(
        "counts refused samples differently than its 64x64 part's table" in line
        for line in verify_root(open_store(root))
    )


def test_the_index_comes_back_byte_for_byte(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "64x64" / "index.json"
    before = path.read_bytes()
    path.unlink()
    assert "rebuild it with `python -m shards index" in next(verify_root(open_store(root)))
    run(["index", str(root)])
    assert path.read_bytes() == before and "64x64: 30 samples" in capsys.readouterr().out
    written = path.stat()
    run(["index", str(root)])
    unchanged = path.stat()  # an index that is up to date is not replaced
    assert (unchanged.st_ino, unchanged.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    path.write_bytes(before[:-1] + b" ")
    run(["index", str(root)])
    assert path.read_bytes() == before


def test_stats(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stats = root_stats(open_store(root), max_samples=1000)
    assert (stats["samples_in"], stats["encoded"], stats["rejected"]["too_small"]) == (46, 30, 10)
    assert {b: v["samples"] for b, v in stats["buckets"].items()} == {"64x64": 30, "128x128": 20}
    # 8 planes of 8x8 and 16 tokens of 16, two bytes each, plus some overhead
    assert 1024 + 512 < stats["buckets"]["64x64"]["bytes_per_sample"] < 1024 + 512 + 200
    assert len(stats["buckets"]["64x64"]["latent_std"]) == 4
    run(["stats", str(root), "--plot", str(tmp_path / "new" / "plot")])
    printed = capsys.readouterr().out
    assert "46 samples in, 30 encoded" in printed
    for bucket, b in stats["buckets"].items():
        (row,) = (line for line in printed.splitlines() if line.split()[:1] == [bucket])
        lengths = " / ".join(f"{length:.0f}" for length in b["caption_characters"].values())
        assert lengths in row and ", ".join(f"{value:.3f}" for value in b["latent_std"]) in row
    assert (tmp_path / "new" / "plot").read_bytes().startswith(b"\x89PNG")


def test_a_damaged_encoding_stops_the_verification(root: Path) -> None:
    path = root / "encoding.json"
    path.write_bytes(path.read_bytes().replace(b"moments", b"momenta"))
    with pytest.raises(WorkError, match=r"encoding\.json is damaged"):
        run(["verify", str(root)])


def test_constant_latents_have_no_deviation() -> None:
    """Rounding makes their variance negative."""
    encoding = encoding_record(16, 16)
    image = encoding.image.model_copy(update={"scale": (0.18215,) * 4, "shift": (0.1159,) * 4})
    for value in (0.37, 1.91, 2.87109375):
        latents = np.full((encoding.image.num_planes, 8, 8), value, np.float16)
        sample = {"image_latents": latents, "caption": "grey", "scores": np.full(4, np.nan, np.float32)}
        found = sample_stats([sample] * 3, encoding.model_copy(update={"image": image}))
        assert found["latent_std"] == [0.0] * 4 and found["scores"] == {}
