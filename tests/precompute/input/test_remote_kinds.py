"""Every kind of input at a URL, and datasets on a hub."""

from pathlib import Path

import fsspec
import pytest

from precompute.input import numbering
from precompute.input.find import Found, choose_caption_fields, find_input
from shards.base.errors import Outage, RequestError
from shards.base.remote import RemoteStore
from tests.fake_hub import connect, fake_hub, keep_downloads_in
from tests.kinds import KINDS, as_parquet
from tests.tiny import make_samples

LIMIT = 1 << 20
SAMPLES = make_samples(0, 10, [(80, 64)])
PICTURES = [members["jpg"] for _, members in SAMPLES]


def pictures_of(found: Found) -> list[bytes | None]:
    """Return the images of all units."""
    pictures = []
    for unit in found.units():
        with unit.open(LIMIT) as source:
            pictures += [sample.image for sample in source.samples()]
    return pictures


@pytest.mark.parametrize("kind", ["tar", "jsonl", "parquet", "mds"])  # the other tables are read like jsonl
def test_in_an_object_store(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbering, "UNIT_SAMPLES", 4)
    KINDS[kind](tmp_path / kind, SAMPLES)
    store = RemoteStore(f"memory://{tmp_path.name}/{kind}")
    files = [path for path in (tmp_path / kind).rglob("*") if path.is_file()]
    store.put({path.relative_to(tmp_path / kind).as_posix(): path for path in files})
    found = find_input(store.address)
    assert len(choose_caption_fields(found, LIMIT)) == 1
    assert pictures_of(found) == PICTURES
    store.remove(store.files())


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
    with pytest.raises(RequestError, match=r"no-such-bucket/x (does not exist, or contains no files|cannot be listed)"):
        find_input("s3://no-such-bucket/x")


def test_a_dataset_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_downloads_in(monkeypatch, tmp_path / "cache")
    as_parquet(tmp_path / "files", SAMPLES)
    (tmp_path / "files" / "dataset.py").write_text("raise SystemExit('this code must not run')")
    with fake_hub(tmp_path / "files") as hub:
        connect(monkeypatch, hub)
        found = find_input("hf://datasets/us/pictures")
        assert (found.kind, choose_caption_fields(found, LIMIT)) == ("parquet files with images", ["json:text"])
        assert pictures_of(found) == PICTURES
