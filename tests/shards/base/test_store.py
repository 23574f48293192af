"""Both kinds of store behave in the same way, and each excludes other writers by its own means."""

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from pydantic import BaseModel

from shards.__main__ import run
from shards.base.errors import Outage, RequestError, WorkError
from shards.base.remote import RemoteStore
from shards.base.store import STAGING_FOLDER, LocalStore, Place, Store
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.committed import list_commits, load_receipts
from shards.root.shared import load_uncond
from shards.tools.stats import root_stats
from shards.tools.verify import verify_root


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of each kind."""
    if request.param == "folder":
        yield LocalStore(tmp_path / "root")
    elif request.param == "memory":
        yield (remote := RemoteStore(f"memory://{tmp_path.name}/root"))
        remote.fs.store.clear()
    else:
        yield RemoteStore(f"{request.getfixturevalue('s3')}/root")


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
    assert [name for name in store.entries() if name != STAGING_FOLDER] == ["commits"]
    assert store.files() == ["commits/a.json"]
    assert store.size("commits") is None


def test_a_range_past_the_end_is_cut_off(store: Store) -> None:
    """S3 answers 416 if none of the range is in the file."""
    store.write("empty", b"")
    store.write("short", b"12345")
    assert store.read_range("empty", 0, 512) == b""
    assert [store.read_range("short", start, start + 512) for start in (0, 3, 5, 6)] == [b"12345", b"45", b"", b""]
    with pytest.raises(FileNotFoundError):
        store.read_range("absent", 0, 512)


def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `clean` would take its parts for orphans."""
    store, scandir = LocalStore(tmp_path), os.scandir
    store.write("commits/64x64/00000.json", b"")

    def fail(path: Any) -> Any:
        if str(path).endswith("64x64"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    for folder in ("", "commits", "commits/64x64"):
        with pytest.raises(OSError, match="Stale file handle"):
            store.listing(folder)
    assert store.listing("absent") == {}
    monkeypatch.setattr(os, "scandir", lambda path: fail("64x64"))
    monkeypatch.setattr(os, "lstat", lambda path: fail("64x64"))
    with pytest.raises(OSError, match="Stale file handle"):  # the whole mount is stale
        store.listing()


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    """Otherwise `clean` would take the parts of a bucket whose receipts are on another disk for orphans."""
    store, disk = LocalStore(tmp_path / "root"), LocalStore(tmp_path / "disk")
    disk.write("64x64/00000.json", b"")
    store.write("commits/128x128/00000.json", b"")
    link = tmp_path / "root" / "commits" / "64x64"
    link.symlink_to(tmp_path / "disk" / "64x64")
    assert store.files("commits") == ["128x128/00000.json", "64x64/00000.json"]
    assert store.files("commits/64x64") == ["00000.json"]
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    for folder in ("", "commits", "commits/64x64"):
        with pytest.raises(RequestError, match=r"commits/64x64 is a link to \S+/disk/64x64, which does not exist"):
            store.files(folder)


def test_an_empty_folder_is_removed_but_a_link_to_one_stays(tmp_path: Path) -> None:
    store, disk = LocalStore(tmp_path / "root"), LocalStore(tmp_path / "disk")
    store.write("64x64/part/a", b"")
    disk.write("b", b"")
    (tmp_path / "root" / "64x64" / "linked").symlink_to(tmp_path / "disk")
    store.remove(["64x64/part/a", "64x64/linked/b"])
    assert os.listdir(tmp_path / "root" / "64x64") == ["linked"] and disk.files() == []


def test_folders_are_removed_after_their_subfolders(tmp_path: Path) -> None:
    """If parents came first, `clean` would leave empty folders of attempts behind."""
    store = LocalStore(tmp_path)
    names = [f"{number}/64x64/{'/'.join('abc'[:depth])}/file" for number in range(8) for depth in range(4)]
    for name in names:
        store.write(name, b"")
    store.remove([*names, *(f"{number}/.owner" for number in range(8))])
    assert os.listdir(tmp_path) == [STAGING_FOLDER]


def test_markers_of_folders_are_no_files(s3: str) -> None:
    """Consoles create them."""
    store = RemoteStore(f"{s3}/root")
    bucket = s3.removeprefix("s3://")
    client = boto3.client("s3")
    for key in ("root/", "root/commits/"):
        client.put_object(Bucket=bucket, Key=key)
    assert store.files() == [] and store.files("commits") == [] and store.entries() == ["commits"]
    store.write("commits/a.json", b"")
    assert store.files() == ["commits/a.json"] and store.files("commits") == ["a.json"]


def test_names_are_not_patterns(store: Store) -> None:
    """Names with characters that fsspec expands are read and removed as they are, and no others with them."""
    names = ["a/data[1].tar", "a/data*.tar", "a/data?.tar", "a/**", "a/data1.tar", "a/other.tar"]
    for name in names:
        store.write(name, name.encode())
    assert store.read_many([*names, "a/[none].tar"]) == {name: name.encode() for name in names}
    store.remove([*names[:4], "a/other.tar"])
    assert store.files("a") == ["data1.tar"]
    with store.local("a") as local:
        assert [path.name for path in local.iterdir()] == ["data1.tar"]


def test_a_file_that_cannot_be_removed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore("memory://refusing/root")

    def refuse(path: str) -> None:
        if path.endswith("/b"):
            raise PermissionError("Access Denied")
        raise FileNotFoundError(path)

    monkeypatch.setattr(store.fs, "rm_file", refuse)
    store.remove(["a", "c"])
    with pytest.raises(Outage, match=r"memory://refusing/root/b cannot be read or written: .*Access Denied"):
        store.remove(["a", "b", "c"])


def test_two_callers_remove_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other caller removes the folder, or writes into it, before this one does."""
    store, rmdir = LocalStore(tmp_path), Path.rmdir

    def remove_first(path: Path) -> None:
        rmdir(path)
        rmdir(path)

    def write_first(path: Path) -> None:
        store.write("b/new", b"")
        rmdir(path)

    for race, left in ((remove_first, []), (write_first, ["new"])):
        store.write("b/old", b"")
        monkeypatch.setattr(Path, "rmdir", race)
        store.remove(["b/old", "absent/file"])
        monkeypatch.undo()
        assert store.files("b") == left


def test_a_download_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore("memory://downloads/root")
    store.write("a/b", b"")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.fs, "get_file", fail)
    with pytest.raises(Outage, match=rf"downloads/root/a/b .* the disk of {tmp_path} is full .* data\.cache_limit"):
        store.get("a/b", tmp_path / "b")
    monkeypatch.setattr(store.fs, "get", fail)
    full = r"downloads/root/a cannot be downloaded, because the disk of .*latentmill-"
    with pytest.raises(Outage, match=full), store.local("a"):
        pass


def test_a_folder_is_moved_once_and_files_are_put_over_what_is_there(store: Store, tmp_path: Path) -> None:
    def folder(number: int) -> Path:
        for name in ("a", "b/c"):
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {number}")
        return tmp_path / str(number)

    moved = store.move(folder(0), "64x64/00000")
    assert moved == isinstance(store, LocalStore)
    if not moved:
        store.put({f"64x64/00000/{name}": folder(0) / name for name in ("a", "b/c")})
    assert not store.move(folder(1), "64x64/00000") and store.read("64x64/00000/a") == b"a 0"
    before = store.listing("64x64/00000")
    store.put({"64x64/00000/a": folder(1) / "a"})
    assert store.files("64x64/00000") == ["a", "b/c"] and store.read("64x64/00000/a") == b"a 1"
    after = store.listing("64x64/00000")
    assert after["a"].etag != before["a"].etag and after["a"].modified >= before["a"].modified > 1e9
    assert after["b/c"] == before["b/c"] and after["b/c"].bytes == 5
    with store.local("64x64/00000") as local:
        assert (local / "b/c").read_text() == "b/c 0"
        assert (local / "a").read_text() == "a 1"
    store.remove(["64x64/00000/a", "64x64/00000/b/c"])
    assert store.files() == []


def test_of_many_creators_one_is_told_so(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda number: store.create("commits/a.json", b"%d" % number), range(8)))
    if "memory" not in store.where() and "s3" not in store.where():  # there, two writers may win
        assert told.count(True) == 1 and store.read("commits/a.json") == b"%d" % told.index(True)
    assert not store.create("commits/a.json", b"9") and store.files() == ["commits/a.json"]
    assert list_commits(store).keys() == {"commits/a.json"}


def test_a_store_without_conditions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not support create-if-absent"):
        RemoteStore(f"local://{tmp_path}/root").create("a", b"1")


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
    name = f"{load_receipts(remote)[1].folder}/shard.00000.mds"
    remote.write(name, b"x" + remote.read(name)[1:])
    assert [line.split(" is damaged")[0] for line in verify_root(open_store(address))] == [f"{address}/{name}"]
    remote.fs.store.clear()


@pytest.fixture
def web() -> Iterator[str]:
    """Address of a server that answers with the status at the start of the path, and does not answer if that is 0."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if status := int(self.path.split("/")[1]):
                self.send_response(status)
                self.send_header("Content-Length", "5")
                self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_failed_request_does_not_mean_that_a_file_is_missing(web: str) -> None:
    """For all of these statuses except 200, fsspec raises FileNotFoundError."""
    assert RemoteStore(f"{web}/200").size("tar") == 5
    assert [RemoteStore(f"{web}/{status}").size("tar") for status in (403, 404, 410)] == [None] * 3
    for address in (f"{web}/0", f"{web}/429", f"{web}/503", "http://127.0.0.1:9"):  # the last is a closed port
        store = RemoteStore(address)
        for ask in (store.size, store.sha256):
            with pytest.raises(Outage, match=f"{address}/tar cannot be read or written"):
                ask("tar")


def test_places() -> None:
    class Config(BaseModel):
        output: Place

    def place(value: object) -> Path | str:
        return Config.model_validate({"output": value}).output

    assert place("runs/latents") == Path("runs/latents") == place(Path("runs/latents"))
    assert place("~/runs") == Path.home() / "runs" and place("runs/~") == Path("runs/~")
    assert place("file:///mnt/latents") == Path("/mnt/latents")
    assert place("s3://bucket/latents/") == "s3://bucket/latents"
    assert Config(output="s3://b/x").model_dump(mode="json") == Config(output="s3://b/x").model_dump(mode="json")
    assert isinstance(open_store("file:///mnt/latents"), LocalStore)
    with pytest.raises(RequestError, match="The URL nonsense://x cannot be opened"):
        open_store("nonsense://x")


def test_a_store_that_fails_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(f"memory://{tmp_path.name}/root")

    def fail(*_: object, **__: object) -> None:
        raise TimeoutError("no route to host")

    monkeypatch.setattr(type(store.fs), "cat_file", fail)
    with pytest.raises(WorkError, match=r"root/encoding\.json cannot be read or written: TimeoutError: no route"):
        EncodingRecord.load(store)
