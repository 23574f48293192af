"""Every kind of input at a URL, and datasets on a hub."""

import hashlib
import json
from pathlib import Path

import fsspec
import pytest

from precompute.input import numbering
from precompute.input.find import choose_caption_fields, find_input
from shards.base.errors import Outage, RequestError
from tests.fake_hub import ask, fake_hub
from tests.kinds import KINDS, as_parquet
from tests.tiny import make_samples

LIMIT = 1 << 20
SAMPLES = make_samples(0, 10, [(80, 64)])
PICTURES = [members["jpg"] for _, members in SAMPLES]
READ = """
import hashlib, json, sys
from precompute.input.find import choose_caption_fields, find_input

found = find_input(sys.argv[1])
hashes = []
for unit in found.units():
    with unit.open(1 << 20) as source:
        hashes += [hashlib.sha256(sample.image).hexdigest() for sample in source.samples()]
print(json.dumps([found.kind, choose_caption_fields(found, 1 << 20), hashes]))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_on_s3(kind: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbering, "UNIT_SAMPLES", 4)
    KINDS[kind](tmp_path / kind, SAMPLES)
    fsspec.filesystem("s3").put(f"{tmp_path / kind}/", f"{s3}/{kind}/", recursive=True)
    found = find_input(f"{s3}/{kind}")
    assert len(choose_caption_fields(found, LIMIT)) == 1
    pictures = []
    for unit in found.units():
        with unit.open(LIMIT) as source:
            pictures += [sample.image for sample in source.samples()]
    assert pictures == PICTURES


def test_a_store_that_fails_is_an_outage(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_parquet(tmp_path / "parquet", SAMPLES)
    fsspec.filesystem("s3").put(f"{tmp_path / 'parquet'}/", f"{s3}/parquet/", recursive=True)
    (unit,) = find_input(f"{s3}/parquet").units()

    def fail(*_: object, **__: object) -> bytes:
        raise ConnectionError("connection reset")

    monkeypatch.setattr(unit.store.fs, "cat_file", fail)  # type: ignore[attr-defined]
    with pytest.raises(Outage, match="connection reset"), unit.open(LIMIT, "salvage") as source:
        list(source.samples())


def test_a_bucket_that_does_not_exist(s3: str) -> None:
    with pytest.raises(RequestError, match=r"no-such-bucket/x (contains 0 files|cannot be listed)"):
        find_input("s3://no-such-bucket/x")


def test_a_dataset_on_the_hub(tmp_path: Path) -> None:
    as_parquet(tmp_path / "files", SAMPLES)
    (tmp_path / "files" / "dataset.py").write_text("raise SystemExit('this code must not run')")
    with fake_hub(tmp_path / "files") as hub:
        kind, captions, hashes = json.loads(ask(READ, hub, tmp_path / "cache", "hf://datasets/us/pictures"))
        assert hashes == [hashlib.sha256(data).hexdigest() for data in PICTURES]
        assert (kind, captions) == ("parquet files with images", ["json:text"])
