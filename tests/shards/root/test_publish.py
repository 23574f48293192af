"""Manifests depend only on the set of parts, and the cost of publishing depends only on new parts."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kit.receipts import ThinStore, synthetic_receipt
from shards.base.durable import DamagedFile, sealed_json
from shards.base.errors import RequestError
from shards.base.store import LocalStore, Store
from shards.format.receipts import tombstone_name
from shards.root.manifest import BucketIndex, Manifest, current_ids, load_rows, newest_manifest, read_index
from shards.root.publish import PeriodicPublisher, Publisher, PublishStopped
from shards.root.segments import SCHEMA, content_id, files_of, make_rows, receipts_of, save_segment
from tests.tiny import flip_a_bit

BUCKET = "256x256"


def commit(store: Store, *tars: str, bucket: str = BUCKET, generation: int = 0) -> None:
    for tar in tars:
        receipt = synthetic_receipt(tar, bucket, generation, samples_of_files=[10] * (1 + len(tar) % 3))
        assert store.create(receipt.name, receipt.sealed())


def index_of(store: Store, manifest: Manifest, bucket: str = BUCKET) -> BucketIndex:
    return read_index(store, bucket, manifest.buckets[bucket].id)


def names(store: Store, manifest: Manifest, bucket: str = BUCKET) -> list[str]:
    rows = load_rows(store, manifest.buckets[bucket].id, index_of(store, manifest, bucket))
    return receipts_of(rows, bucket)


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8))
@settings(max_examples=10)
def test_what_a_manifest_says_depends_on_the_set_of_parts_alone(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]]
) -> None:
    """The number of earlier manifests and their publishers do not matter."""
    often, once = (LocalStore(tmp_path_factory.mktemp("root")) for _ in range(2))
    done: set[int] = set()
    for store in (often, once):
        commit(store, "tar")
    for batch in batches:
        fresh = set(batch) - done
        done |= fresh
        commit(often, *(f"{number:05d}" for number in fresh))
        Publisher(often).publish()
    commit(once, *(f"{number:05d}" for number in sorted(done, reverse=True)))
    one, other = Publisher(often).publish(), Publisher(once).publish()
    assert one.buckets == other.buckets
    expected = make_rows((synthetic_receipt(f"{n:05d}", samples_of_files=[10] * 3), "") for n in done)
    rows = load_rows(often, one.buckets[BUCKET].id, index_of(often, one))
    assert content_id(rows.slice(0, len(done))) == content_id(expected) and rows["tar"].to_pylist()[-1] == "tar"


def test_publishing_fetches_what_was_added_and_segments_stay_few(tmp_path: Path) -> None:
    store, rng = ThinStore(tmp_path), random.Random(0)
    most = 0
    publisher = Publisher(store)
    for number in range(30):
        fresh = [f"{number:03d}{i:02d}" for i in range(rng.randint(1, 4))]
        commit(store, *fresh)
        store.calls.clear()
        manifest = publisher.publish()
        segments = index_of(store, manifest).segments
        most = max(most, len(segments))
        # manifests and commits listed; the newest manifest, its index, each new receipt; segment, index, manifest put
        assert store.calls["get"] <= len(fresh) + 5 and store.calls["put"] == 3 and store.calls["list"] == 2
    assert manifest.number == 30 and most <= 8
    # a new process loads the segments but no receipts
    store.calls.clear()
    assert Publisher(store).publish() == manifest and store.calls["get"] <= 6 + len(segments) and not store.calls["put"]
    assert (
        len(names(store, manifest))
        == manifest.buckets[BUCKET].parts
        == len(list((tmp_path / "commits" / BUCKET).iterdir()))
    )


def test_two_publishers_lose_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "00000")

    def publish(first: int) -> None:
        publisher = Publisher(store)
        for number in range(first, 40, 4):
            commit(store, f"{number:05d}x")
            publisher.publish()

    threads = [threading.Thread(target=publish, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = newest_manifest(store)
    assert newest is not None and len(names(store, newest)) == 41
    assert [int(name[:8]) for name in store.files("index/manifests")] == list(range(1, newest.number + 1))


def test_what_was_recalled_drops_out_and_comes_back_as_another_generation(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "00000", "00001", "00002")
    commit(store, "00001", bucket="512x512")
    before = Publisher(store).publish()
    store.create(tombstone_name(BUCKET, "00001", 0), b"")
    store.create(tombstone_name("512x512", "00001", 0), b"")
    without = Publisher(store).publish()
    assert names(store, without) == [f"commits/{BUCKET}/00000.json", f"commits/{BUCKET}/00002.json"]
    assert without.recalled == {BUCKET: ("00001.g0",), "512x512": ("00001.g0",)}
    assert without.buckets["512x512"].parts == 0 and names(store, without, "512x512") == []
    commit(store, "00001", generation=1)
    again = Publisher(store).publish()
    assert names(store, again)[1] == f"commits/{BUCKET}/00001.g1.json"
    # the previous index is unchanged
    assert names(store, before)[1] == f"commits/{BUCKET}/00001.json" and again.recalled == without.recalled


def test_publishing_that_is_told_to_stop_leaves_the_manifest_that_was(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "00000")
    manifest = Publisher(store).publish()
    commit(store, "00001")
    with pytest.raises(PublishStopped):
        Publisher(store, stop=lambda: True).publish()
    with pytest.raises(KeyboardInterrupt), PeriodicPublisher(store, every=3600):
        raise KeyboardInterrupt
    assert newest_manifest(store) == manifest
    with PeriodicPublisher(store, every=3600) as publishing:
        finished = publishing.finish()
    assert finished.number == 2 and newest_manifest(store) == finished


def test_a_job_publishes_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of the store is logged, and the next attempt succeeds. Afterwards, no thread is left."""
    store = LocalStore(tmp_path)
    commit(store, "00000")
    create, errors = store.create, [OSError(5, "the store is unresponsive")]

    def fail_once(*arguments: Any) -> bool:
        if errors:
            raise errors.pop()
        return create(*arguments)

    monkeypatch.setattr(store, "create", fail_once)
    with PeriodicPublisher(store, every=0.01):
        for _ in range(3000):
            if newest_manifest(store) is not None:
                break
            threading.Event().wait(0.01)
    assert newest_manifest(store) is not None and "the store is unresponsive" in capsys.readouterr().err
    assert "publish" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("lost", ["buckets", "segments"])
def test_an_index_that_is_lost_is_written_anew(tmp_path: Path, lost: str) -> None:
    """The new index divides the same rows into fewer segments."""
    store = LocalStore(tmp_path)
    # a segment is merged if it has fewer than twice as many rows as the new one: 5 < 2 * 3, but 8 = 2 * 4
    for numbers, num_segments in ((range(5), 1), (range(5, 8), 1), (range(8, 12), 2)):
        commit(store, *(f"{number:05d}" for number in numbers))
        manifest = Publisher(store).publish()
        segments = index_of(store, manifest).segments
        assert len(segments) == num_segments
    name = {"buckets": f"{manifest.buckets[BUCKET].id}.json", "segments": f"{segments[0]}.arrow"}[lost]
    (tmp_path / "index" / lost / name).unlink()
    with pytest.raises((RequestError, DamagedFile), match=r"python -m shards index"):
        names(store, manifest)
    assert Publisher(store).publish() == manifest and len(names(store, manifest)) == 12


def test_a_lost_index_is_replaced_although_no_part_is_left(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "00000")
    lost = Publisher(store).publish().buckets[BUCKET].id
    (tmp_path / f"index/buckets/{lost}.json").unlink()
    store.create(tombstone_name(BUCKET, "00000", 0), b"")
    manifest = Publisher(store).publish()
    assert manifest.buckets[BUCKET].parts == 0 and names(store, manifest) == []


@pytest.mark.parametrize("damaged", ["manifests", "buckets", "segments"])
def test_a_damaged_index_is_named(tmp_path: Path, damaged: str) -> None:
    store = LocalStore(tmp_path)
    commit(store, "00000", "00001")
    manifest = Publisher(store).publish()
    (path,) = (tmp_path / "index" / damaged).iterdir()
    flip_a_bit(path)
    with pytest.raises(
        DamagedFile, match=path.name.replace(".", r"\.") + ".* delete (it and run|the file and rebuild)"
    ):
        newest_manifest(store)
        names(store, manifest)
    path.unlink()
    assert Publisher(store).publish() == manifest and len(names(store, manifest)) == 2


def test_another_versions_manifest_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("index/manifests/00000001.json", sealed_json({"version": 3, "number": 1}))
    with pytest.raises(
        RequestError,
        match=r"has format version 3, but this version of latentmill reads only version 2\. Use the version",
    ):
        current_ids(store)


@pytest.mark.parametrize(("part", "basename"), [("00000.00000000", "../../evil.mds"), ("..", "a"), ("/etc", "passwd")])
def test_an_index_that_names_a_file_outside_its_folder_is_refused(tmp_path: Path, part: str, basename: str) -> None:
    store = LocalStore(tmp_path)
    commit(store, "00000")
    manifest = Publisher(store).publish()
    index = index_of(store, manifest)
    (row,) = load_rows(store, manifest.buckets[BUCKET].id, index).to_pylist()
    row |= {"part": part, "files": [file | {"basename": basename} for file in row["files"]]}
    forged = save_segment(store, pa.Table.from_pylist([row], SCHEMA))
    with pytest.raises(RequestError, match="names a file outside its bucket's folder"):
        load_rows(store, manifest.buckets[BUCKET].id, index.model_copy(update={"segments": (forged,)}))


def test_files_stand_in_the_order_of_their_tars(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(store, "00010", "00002", "1")
    manifest = Publisher(store).publish()
    files = files_of(load_rows(store, manifest.buckets[BUCKET].id, index_of(store, manifest)))
    expected = [
        f"{tar}.00000000/shard.{n:05d}.mds"
        for tar, count in (("00002", 3), ("00010", 3), ("1", 2))
        for n in range(count)
    ]
    assert files["name"].to_pylist() == [name.encode() for name in expected]
    assert manifest.buckets[BUCKET].files == 8 and manifest.buckets[BUCKET].samples == 80
    assert json.loads((tmp_path / "index/manifests/00000001.json").read_text())["number"] == 1
