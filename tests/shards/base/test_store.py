"""Both kinds of latents root: one behaviour, and each kind's own way to exclude other writers."""

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import shards.base.remote
from shards.__main__ import run
from shards.base.errors import RequestError, WorkError
from shards.base.remote import Claim, RemoteStore
from shards.base.store import LocalStore, Place, Store
from shards.format.encoding import EncodingRecord
from shards.format.receipts import load_receipts
from shards.open import open_store
from shards.root.shared import load_uncond
from shards.tools.stats import root_stats
from shards.tools.verify import verify_root


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty root of each kind."""
    if request.param == "folder":
        yield LocalStore(tmp_path / "root")
    elif request.param == "memory":
        yield (remote := RemoteStore(f"memory://{tmp_path.name}/root"))
        remote.fs.store.clear()
    else:
        yield RemoteStore(f"{request.getfixturevalue('s3')}/root")


@pytest.fixture
def fast_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEASE_SECONDS", 0.6), ("BEAT_SECONDS", 0.1), ("POLL_SECONDS", 0.02)):
        monkeypatch.setattr(shards.base.remote, name, seconds)


def test_files(store: Store, tmp_path: Path) -> None:
    assert store.entries() == [] and store.files() == [] and store.files("commits") == []
    assert store.size("commits/a.json") is None
    with pytest.raises(FileNotFoundError):
        store.read("commits/a.json")
    store.write("commits/a.json", b"old")
    store.write("commits/a.json", b"newer")
    assert store.read("commits/a.json") == b"newer" and store.size("commits/a.json") == 5
    assert store.sha256("commits/a.json") == hashlib.sha256(b"newer").hexdigest()
    assert store.read_many(["commits/a.json", "commits/b.json"]) == {"commits/a.json": b"newer"}
    assert store.entries() == ["commits"] and store.files() == ["commits/a.json"]
    assert store.size("commits") is None


def test_putting_a_folder_removes_what_is_in_the_way(store: Store, tmp_path: Path) -> None:
    for number, names in enumerate((["a", "b/c", "left"], ["a", "b/c"])):
        for name in names:
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {number}")
        store.put(tmp_path / str(number), "64x64/00000")
    assert store.files("64x64/00000") == ["a", "b/c"] and store.read("64x64/00000/b/c") == b"b/c 1"
    with store.local("64x64/00000") as folder:
        assert (folder / "b/c").read_text() == "b/c 1"
    with store.local("64x64/00000", ["a"]) as folder:
        assert (folder / "a").read_text() == "a 1"


def test_an_object_is_created_once(store: Store) -> None:
    if isinstance(store, RemoteStore):
        assert store.create("claim", b"1") and not store.create("claim", b"2")
        assert store.read("claim") == b"1"


def test_one_at_a_time(store: Store, fast_claims: None) -> None:
    inside = most = entered = 0

    def enter() -> None:
        nonlocal inside, most, entered
        with store.locked("00000") as still_held:
            inside, entered = inside + 1, entered + 1
            most = max(most, inside)
            time.sleep(0.02)
            still_held()
            inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, entered) == (1, 6)


def test_a_silent_holder_is_succeeded_and_finds_out(tmp_path: Path, fast_claims: None) -> None:
    store = RemoteStore(f"memory://{tmp_path.name}/root")
    dead = Claim(store, ".claims/00000")  # nothing shows that it lives
    dead.check()
    began = time.monotonic()
    with store.locked("00000") as still_held:
        assert time.monotonic() - began >= 0.6
        still_held()
        with pytest.raises(WorkError, match="was taken over"):
            dead.check()
        dead.release()
        dead.store.write(dead._name(dead.number), dead._beat(9))  # it wakes up, and changes nothing
        still_held()
    assert RemoteStore(store.address).files(".claims/00000") == ["00000001", "00000002"]
    store.fs.store.clear()


def test_a_holder_that_shows_it_lives_is_waited_for(tmp_path: Path, fast_claims: None) -> None:
    store, entered = RemoteStore(f"memory://{tmp_path.name}/root"), threading.Event()

    def enter() -> None:
        with store.locked("00000"):
            entered.set()

    with store.locked("00000") as still_held:
        (waiter := threading.Thread(target=enter)).start()
        assert not entered.wait(2)  # three leases
        still_held()
    assert entered.wait(10)
    waiter.join()
    store.fs.store.clear()


def test_a_root_reads_the_same_from_an_address(latents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = "memory://copied/latents"
    remote = RemoteStore(address)
    remote.fs.put(str(latents), "/copied/latents", recursive=True)
    assert EncodingRecord.load(open_store(address)) == EncodingRecord.load(open_store(latents))
    assert load_receipts(open_store(address)) == load_receipts(open_store(latents))
    here, there = (load_uncond(open_store(place))["text"].states for place in (latents, address))
    assert here is not None and there is not None and here.equal(there)
    assert list(verify_root(open_store(address))) == []
    assert root_stats(open_store(address), 1000) == root_stats(open_store(latents), 1000)
    run(["index", address])
    assert "64x64: 30 samples" in capsys.readouterr().out
    remote.write("64x64/00000/shard.00000.mds", b"x" + remote.read("64x64/00000/shard.00000.mds")[1:])
    assert [line.split(" is damaged")[0] for line in verify_root(open_store(address))] == [
        f"{address}/64x64/00000/shard.00000.mds"
    ]
    remote.fs.store.clear()


def test_places() -> None:
    class Config(BaseModel):
        output: Place

    def place(value: object) -> Path | str:
        return Config.model_validate({"output": value}).output

    assert place("runs/latents") == Path("runs/latents") == place(Path("runs/latents"))
    assert place("file:///mnt/latents") == Path("/mnt/latents")
    assert place("s3://bucket/latents/") == "s3://bucket/latents"
    assert Config(output="s3://b/x").model_dump(mode="json") == Config(output="s3://b/x").model_dump(mode="json")
    assert isinstance(open_store("file:///mnt/latents"), LocalStore)
    with pytest.raises(RequestError, match="The address nonsense://x cannot be opened"):
        open_store("nonsense://x")


def test_a_store_that_fails_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(f"memory://{tmp_path.name}/root")

    def fail(*_: object, **__: object) -> None:
        raise TimeoutError("no route to host")

    monkeypatch.setattr(type(store.fs), "cat_file", fail)
    with pytest.raises(WorkError, match=r"root/encoding\.json cannot be read or written: TimeoutError: no route"):
        EncodingRecord.load(store)
