"""Checkpoints of a run at a URL: which ones count, uploads in shares, and copies on this machine. Any store will do."""

import hashlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shards.base.durable import sealed_json, write_atomically, write_sealed_json
from shards.base.errors import Outage, RequestError, WorkError
from shards.base.store import LocalStore, Store
from tests.forks import fork, wait_for
from tests.runs import fetch, wait_until
from train.run.checkpoints import remote
from train.run.checkpoints.checkpoint import (
    TRACKER_ID,
    VERSION,
    Checkpoint,
    list_checkpoints,
    step_folder,
)
from train.run.checkpoints.local_copy import (
    copied,
    find,
    find_checkpoints,
    install,
    local_checkpoints,
    obtain_same,
    sha256_of_state,
)
from train.run.checkpoints.remote import RemoteRun
from train.run.health.output import outdated
from train.run.lease.backend import Seen
from train.run.lease.lease import Lease, LeaseLost
from train.run.lease.store import StoreBackend


def hold(address: str, ready: Path) -> None:
    """Hold a copy of a run until this process is killed."""
    with copied(address, None) as (run, _):
        write_atomically(ready, str(run).encode())
        time.sleep(600)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "there")


def acquire(store: Store, copies: Path, seen: Seen = Seen()) -> RemoteRun:  # noqa: B008 (immutable)
    """Acquire the run. Earlier launches of this process count as dead."""
    lease = Lease.acquire(StoreBackend(store, copies, partial(find_checkpoints, store)), 1.0, seen)
    lease.folder.mkdir(parents=True)
    return RemoteRun(store, lease)


def start(store: Store, copies: Path, single_node: bool = False) -> tuple[RemoteRun, Checkpoint | None]:
    """Find the newest checkpoint, acquire the run, and set up its local folder, as a launch does."""
    with ExitStack() as downloads:
        found, checkpoint = find(store, copies, downloads, single_node)
        orphans = {}
        if checkpoint is not None and checkpoint.folder.name not in found:
            orphans = {checkpoint.folder.name: sha256_of_state(checkpoint.folder) or ""}
        run = acquire(store, copies, Seen(None, found, orphans))
        install(checkpoint, run.lease, store, copies)
    return run, checkpoint


def checkpoint(run: RemoteRun, step: int, text: str = "weights", token: str = "") -> Path:
    """Write a launch's checkpoint of a single file. `token`: that of a different run."""
    folder = step_folder(run.lease.run_dir, step)
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "weights").write_text(text)
    content = {
        "version": VERSION,
        "launch": run.lease.number,
        "token": token or run.lease.token,
        "files": {"unet/weights": hashlib.sha256(text.encode()).hexdigest()},
    }
    write_sealed_json(folder / "state.json", content)
    return folder


def test_readers_ignore_what_a_superseded_launch_uploads(store: LocalStore, tmp_path: Path) -> None:
    first = acquire(store, tmp_path / "first")
    first.upload(checkpoint(first, 1))
    second = acquire(store, tmp_path / "second")
    assert list(find_checkpoints(store)) == ["step-00000001"]  # accepted
    late = checkpoint(first, 2)
    taken_over = r"there is in use: launch 2 \(host .* took over from this launch \(launch 1\),"
    with pytest.raises(LeaseLost, match=taken_over):
        first.upload(late)
    with pytest.raises(LeaseLost):
        first.drop_old(2, lambda ages: sorted(ages))
    # as if it had been suspended between its check and its requests
    files = {f"checkpoints/step-00000002.0001/{name}": late / name for name in ("unet/weights", "state.json")}
    store.put(files)
    assert list(find_checkpoints(store)) == ["step-00000001"]
    second.upload(checkpoint(second, 2, "the second launch's"))
    second.upload(checkpoint(second, 3))
    for step in (0, 9):  # interrupted uploads of an earlier and a later step
        store.write(f"checkpoints/step-{step:08d}/unet/weights", b"")
    second.drop_old(3, lambda ages: [1] if sorted(ages) == [1, 2, 3] else [])
    stored = {name.partition("/")[0] for name in store.files("checkpoints")}
    assert stored == {"step-00000002.0002", "step-00000003.0002", "step-00000009"}
    copy = fetch(store, tmp_path / "copy", "step-00000002").folder
    assert (copy / "unet/weights").read_text() == "the second launch's"
    acquire(store, tmp_path / "third")
    assert sorted(find_checkpoints(store)) == ["step-00000002", "step-00000003"]


def test_snapshots_of_averages_are_kept_apart_by_launch(store: LocalStore, tmp_path: Path) -> None:
    """So a superseded launch that wakes up during an upload cannot damage its successor's snapshot."""
    for number, name in enumerate(("first", "second"), start=1):
        run = acquire(store, tmp_path / name)
        saved = run.lease.run_dir / "posthoc"
        shutil.copytree(checkpoint(run, 1, name).parent, saved / "checkpoints")
        run.upload(step_folder(saved, 1))
        stored = f"posthoc/checkpoints/step-00000001.{number:04d}"
        assert store.read(f"{stored}/unet/weights").decode() == name
        assert store.files(stored) == ["state.json", "unet/weights"]


def test_a_launch_stops_if_the_checkpoints_changed_since_it_looked(store: LocalStore, tmp_path: Path) -> None:
    first, seen = acquire(store, tmp_path / "first"), find_checkpoints(store)
    first.upload(checkpoint(first, 1))
    with pytest.raises(WorkError, match="changed while this launch was starting: the previous launch was still run"):
        acquire(store, tmp_path / "second", Seen(None, seen))
    assert list(find_checkpoints(store)) == ["step-00000001"]
    assert "ended" in json.loads(store.read("launches/0002.sign"))  # so that the next launch need not wait
    assert acquire(store, tmp_path / "third").lease.number == 3


def test_a_deleted_and_restarted_run_is_not_mixed_with_the_earlier_one(store: LocalStore, tmp_path: Path) -> None:
    earlier = acquire(store, tmp_path / "copies")
    earlier.upload(checkpoint(earlier, 1, "earlier"))
    (earlier.lease.run_dir / TRACKER_ID).write_text("{}")
    store.remove(store.files())
    run, found = start(store, tmp_path / "copies")
    assert found is None and not (run.lease.run_dir / TRACKER_ID).exists() and run.lease.number == 1
    late = checkpoint(earlier, 2, "earlier")
    run.upload(checkpoint(run, 2))
    conflict = r"already exists with different content\. Either another launch with the number 1 wrote"
    with pytest.raises(WorkError, match=conflict):
        earlier.upload(late)


def test_damaged_checkpoints_are_skipped(store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = acquire(store, tmp_path / "copies")
    for step in (1, 2):
        run.upload(checkpoint(run, step))
    store.write("checkpoints/step-00000002.0001/unet/weights", b"flipped")
    _, found = start(store, tmp_path / "other")
    assert found is not None and found.folder.name == "step-00000001"
    assert "step-00000002 is damaged and will be skipped" in capsys.readouterr().out
    store.remove(["checkpoints/step-00000001.0001/unet/weights"])
    with pytest.raises(RequestError, match=r"Every checkpoint in .* is damaged \(step-00000001, step-00000002\)"):
        start(store, tmp_path / "third")


def test_a_launch_resumes_from_a_local_checkpoint_that_was_never_uploaded(store: LocalStore, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    first = acquire(store, copies)
    first.upload(checkpoint(first, 1))
    orphan = checkpoint(first, 2)
    damaged = checkpoint(first, 3)
    (damaged / "unet" / "weights").write_text("flipped")
    other = acquire(LocalStore(tmp_path / "elsewhere"), tmp_path / "other")
    checkpoint(other, 2, token="of a different run at this URL")
    for folder, single_node, expected in (
        (tmp_path / "other", True, "step-00000001"),
        (copies, True, "step-00000002"),
        (copies, False, "step-00000001"),  # other nodes would not have it
    ):
        with ExitStack() as downloads:
            found, newest = find(store, folder, downloads, single_node)
            assert list(found) == ["step-00000001"] and newest is not None and newest.folder.name == expected
    assert orphan.is_dir()  # looking moves nothing
    for _ in range(2):  # the first of them is killed before it has uploaded the checkpoint that it accepted
        run, newest = start(store, copies, single_node=True)
        assert newest is not None and newest.folder.name == "step-00000002"
        assert [folder.name for folder in list_checkpoints(run.lease.run_dir)] == ["step-00000002"]
        assert len(local_checkpoints(copies)) == 1  # the folders of earlier launches are gone
        assert list(find_checkpoints(store)) == ["step-00000001"]
    run.upload(step_folder(run.lease.run_dir, 2))
    assert list(find_checkpoints(store)) == ["step-00000001", "step-00000002"]


def test_a_superseded_launch_neither_installs_nor_removes(store: LocalStore, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    first = acquire(store, copies)
    first.upload(checkpoint(first, 1))
    with ExitStack() as downloads:
        _, found = find(store, copies, downloads)
        second = acquire(store, copies)
        third, _ = start(store, copies)
        with pytest.raises(LeaseLost):
            install(found, second.lease, store, copies)
    assert [folder.name for folder in list_checkpoints(third.lease.run_dir)] == ["step-00000001"]


def test_each_node_obtains_the_checkpoint_that_the_main_process_found(store: LocalStore, tmp_path: Path) -> None:
    run = acquire(store, tmp_path / "copies")
    run.upload(checkpoint(run, 1))
    other = acquire(LocalStore(tmp_path / "elsewhere"), tmp_path / "other")
    folder = checkpoint(other, 1, "of an earlier run, and intact")
    with ExitStack() as downloads:
        _, found = find(store, tmp_path / "copies", downloads)
        assert found is not None and found.folder == step_folder(run.lease.run_dir, 1)
        same = obtain_same(store, found, tmp_path / "other", downloads)
        assert same.content == found.content and (same.folder / "unet/weights").read_text() == "weights"
        store.remove([f"checkpoints/{name}" for name in store.files("checkpoints")])
        with pytest.raises(WorkError, match=r"no longer has the checkpoint step-00000001 that this launch found"):
            obtain_same(store, found, tmp_path / "other", downloads)
    assert (folder / "unet/weights").read_text() == "of an earlier run, and intact"


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_shares_of_killed_processes_never_form_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes upload shares, and both die at the same request. A later launch repeats the step."""
    left, complete = [0], 0

    def count(name: str) -> None:
        method = getattr(LocalStore, name)

        def until_killed(self: LocalStore, *arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return method(self, *arguments)

        monkeypatch.setattr(LocalStore, name, until_killed)

    for name in ("put", "write", "create", "remove"):
        count(name)
    for last in range(12):
        left[0], store = 100, LocalStore(tmp_path / f"there-{last}")
        first = acquire(store, tmp_path / f"copies-{last}")
        first.upload(checkpoint(first, 1))
        left[0] = last
        with suppress(Killed):
            upload_shares(first, "one")
        left[0] = 100
        found = find_checkpoints(store)
        for name in found:
            fetch(store, tmp_path / f"copy-{last}", name)
        complete += len(found) - 1
        if len(found) == 1:
            second = acquire(store, tmp_path / f"copies-{last}")
            upload_shares(second, "two")
            assert list(find_checkpoints(store)) == ["step-00000001", "step-00000002"]
            fetched = fetch(store, tmp_path / f"second-copy-{last}", "step-00000002")
            assert (fetched.folder / "unet-2").read_text() == "two" and fetched.content["launch"] == 2
    assert 0 < complete < 12


def upload_shares(run: RemoteRun, text: str) -> None:
    """Upload a checkpoint of step 2 as two processes do, the second of which finishes first."""
    name, hashes = "checkpoints/step-00000002", {}
    for rank in (1, 0):
        private = run.lease.run_dir / f"{text}-{rank}"
        private.mkdir(parents=True)
        (private / f"unet-{rank + 1}").write_text(text)
        hashes[f"unet-{rank + 1}"] = hashlib.sha256(text.encode()).hexdigest()
        run.upload_share(name, private)
    content = {"version": VERSION, "launch": run.lease.number, "token": run.lease.token, "lines": {}, "files": hashes}
    run.complete(name, sealed_json(content))


def test_the_copy_of_a_killed_export_is_removed_by_the_next(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = acquire(store, tmp_path / "copies")
    run.upload(checkpoint(run, 1))
    store.write("config.yaml", b"")
    address, ready = f"file://{store.root}", tmp_path / "ready"
    child = fork(lambda: hold(address, ready))
    wait_until(ready.exists)
    left = Path(ready.read_text())
    assert (left / "checkpoints/step-00000001/unet/weights").is_file()
    os.kill(child, signal.SIGKILL)
    wait_for(child)
    with copied(address, None):
        assert not left.exists()


def test_old_output_is_removed(store: LocalStore, tmp_path: Path) -> None:
    run = acquire(store, tmp_path / "copies")
    for name in ("0001", "0002", "0012"):
        store.write(f"logs/{name}/rank-00000.log", b"")
    for _ in range(2):
        run.drop_logs(lambda names: outdated(names, 12, 11))
    assert store.files("logs") == ["0002/rank-00000.log", "0012/rank-00000.log"]


def test_uploads_are_retried_during_an_outage(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, left = acquire(store, tmp_path / "copies"), [3]
    put, pauses = LocalStore.put, list[float]()

    def failing(self: LocalStore, files: dict[str, Path]) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise Outage("the store is unreachable.")
        put(self, files)

    monkeypatch.setattr(LocalStore, "put", failing)
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    run.upload(checkpoint(run, 1))
    assert pauses == [2.0, 4.0, 8.0] and list(find_checkpoints(store)) == ["step-00000001"]
    assert "failed: the store is unreachable. Retrying in 2 s." in capsys.readouterr().out
    left[0] = 10**6
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(remote.time, "monotonic", lambda: float(next(clock)))
    folder = checkpoint(run, 2)
    for run.patience, tries in ((900.0, 8), (480.0, 4)):
        pauses.clear()
        with pytest.raises(Outage):
            run.upload(folder)
        assert len(pauses) == tries


def test_a_checkpoint_counts_although_the_logs_could_not_be_uploaded(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, put = acquire(store, tmp_path / "copies"), LocalStore.put

    def without_logs(self: LocalStore, files: dict[str, Path]) -> None:
        if "metrics.jsonl" in files:
            raise Outage("the store is unreachable.")
        put(self, files)

    monkeypatch.setattr(LocalStore, "put", without_logs)
    monkeypatch.setattr(LocalStore, "remove", lambda self, names: pytest.fail(f"{names} removed"))
    folder = checkpoint(run, 1)
    (run.lease.run_dir / "metrics.jsonl").write_text("{}\n")
    run.upload(folder)
    assert list(find_checkpoints(store)) == ["step-00000001"]
    said = capsys.readouterr().out
    assert "The logs could not be uploaded to " in said and "and will be retried: the store is unreachable." in said


def test_checkpoints_may_come_and_go_while_logs_are_uploaded(store: LocalStore, tmp_path: Path) -> None:
    run, stopped = acquire(store, tmp_path / "copies"), threading.Event()
    (run.lease.run_dir / "tracker").mkdir(parents=True)
    (run.lease.run_dir / "tracker" / "events").write_text("1")

    def come_and_go() -> None:
        while not stopped.is_set():
            shutil.rmtree(checkpoint(run, 7))

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(200):
            run.upload_logs()
    finally:
        stopped.set()
        thread.join()
    assert store.read("tracker/events") == b"1" and not any("checkpoints" in name for name in store.entries())
    assert json.loads(store.read("launches/0001.json"))["token"] == run.lease.token
