"""Temporary files of killed processes: the next process on the machine removes them, and no others."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from precompute.input.tars import local_copy
from shards.base.durable import locked, write_atomically
from shards.base.errors import RequestError
from shards.base.scratch import (
    OWNER,
    SWEEPER,
    attempt_folder,
    private_folder,
    sweep,
    sweep_attempts,
    sweep_scratch,
    use_scratch,
)
from shards.base.store import LocalStore, Store
from shards.open import open_store
from tests.forks import fork, wait_for
from tests.runs import environment, wait_until

KILLS = 4


def begin(scratch: Path, ready: Path) -> None:
    """Create a copy of a tar, an attempt at it and further files, and leave them."""
    folder = use_scratch(scratch)
    store: Store = open_store("memory://root")
    store.write("tars/00000.tar", bytes(1 << 16))
    with local_copy(store, "tars/00000.tar") as copy, attempt_folder(store, "00000") as attempt:
        (attempt / "shard.00000.mds").write_bytes(bytes(1 << 16))
        assert folder in copy.parents and folder in attempt.parents
        assert folder in Path(tempfile.mkdtemp()).parents and os.environ["TMPDIR"] == str(folder)
        ready.touch()
        time.sleep(600)


def test_kills_leave_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    held = []
    for number in range(KILLS):
        ready = tmp_path / f"ready-{number}"
        child = fork(lambda ready=ready: begin(scratch, ready))  # type: ignore[misc]
        if number % 2:  # every second process dies before it has finished
            wait_until(ready.exists)
        os.kill(child, signal.SIGKILL)
        assert wait_for(child) == -signal.SIGKILL
        held.append(len([folder for folder in scratch.glob("*/*.*") if folder.is_dir()]))
    assert max(held) == 1  # each process removed the previous one's files
    alive = fork(lambda: begin(scratch, tmp_path / "alive"))
    wait_until((tmp_path / "alive").exists)
    sweep_scratch(scratch)
    (top,) = scratch.iterdir()
    assert {path.name for path in top.iterdir()} == {SWEEPER, next(path.name for path in top.glob(f"{alive}.*"))}
    assert list(top.rglob("*.tar")) and list(top.rglob("*.mds"))
    os.kill(alive, signal.SIGKILL)
    wait_for(alive)
    sweep_scratch(scratch)
    assert [path.name for path in top.iterdir()] == [SWEEPER]


def hold(ready: Path) -> None:
    """Hold a private folder with a file until this process is killed."""
    with private_folder() as folder:
        (folder / "file").write_bytes(bytes(1 << 16))
        write_atomically(ready, str(folder).encode())
        time.sleep(600)


def test_a_killed_process_s_private_folder_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = fork(lambda: hold(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    other = Path((tmp_path / "ready").read_text())
    with private_folder() as ours:
        assert tmp_path in ours.parents and tmp_path in other.parents
        assert (other / "file").is_file()
    assert not ours.exists()
    os.kill(child, signal.SIGKILL)
    wait_for(child)
    with private_folder():
        assert not other.exists()


def end_while_removing(root: Path, after: int) -> None:
    """Make an attempt that is killed after it has removed `after` of its files."""
    removed = 0

    def unlink(*words: Any, **options: Any) -> None:
        nonlocal removed
        if removed == after:
            os._exit(9)
        removed += 1
        os_unlink(*words, **options)

    os_unlink = os.unlink
    with attempt_folder(LocalStore(root), "photos [1]") as attempt:
        for name in ("a", "b"):
            (attempt / name).write_bytes(b"latents")
        os.unlink = unlink


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_process_killed_while_removing_its_attempt(tmp_path: Path, after: int) -> None:
    assert wait_for(fork(lambda: end_while_removing(tmp_path, after))) == 9
    assert list((tmp_path / ".attempts").iterdir())
    sweep_attempts(LocalStore(tmp_path))
    assert not list((tmp_path / ".attempts").iterdir())


def test_who_ends_well_leaves_nothing(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from shards.base.scratch import use_scratch; "
    code += "print(use_scratch(Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert tmp_path in folder.parents and not folder.exists()
    sweep_scratch(tmp_path / "absent")  # without earlier workers, there is nothing to do
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("machine", "owner", "goes"),
    [
        ("m1", {"boot": "other", "host": "elsewhere"}, False),
        ("m1", {"boot": "other", "machine": "another"}, False),  # two machines called localhost
        ("m1", {"boot": "other"}, True),  # this machine, before it was restarted
        ("m1", {"host": "a-container-of-this-machine"}, True),
        ("", {"boot": "other"}, False),  # two containers called localhost, without a machine-id
        ("", {}, True),
    ],
)
def test_a_machine_cleans_up_only_after_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, owner: dict[str, str], goes: bool
) -> None:
    """Test a shared root whose locks are visible on one machine only, so every lock appears to be free."""
    ours = {"host": "localhost", "machine": machine, "boot": "b1"}
    monkeypatch.setattr("shards.base.scratch._this_machine", lambda: ours)
    store = LocalStore(tmp_path)
    with attempt_folder(store, "00000") as attempt:
        written = json.loads((attempt / OWNER).read_text())
        (attempt / OWNER).write_text(json.dumps(written | owner))
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        with attempt_folder(store, "00000"):
            assert attempt.exists() is not goes
        sweep_attempts(store)
        assert attempt.exists() is not goes


def test_folders_that_cannot_be_swept_do_not_hide_how_a_job_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".attempts" / "00000.abc").mkdir(parents=True)
    (tmp_path / ".attempts.locks").write_text("a file where a folder belongs")
    sweep(LocalStore(tmp_path), tmp_path / "scratch")
    assert "warning: temporary folders of killed processes remain: " in capsys.readouterr().err


def test_a_folder_that_does_not_name_its_owner_is_left_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    unknown, begun = tmp_path / ".attempts" / "00000.abc", tmp_path / ".attempts" / "00000.def.new"
    unknown.mkdir(parents=True)
    begun.mkdir()  # its owner was killed before it wrote anything, even its name
    sweep_attempts(store)
    assert unknown.exists() and not begun.exists()


def test_users_of_a_machine_do_not_share_attempts_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = open_store("memory://root")
    with attempt_folder(store, "00000"):
        assert [path.name for path in tmp_path.iterdir()] == [f"latentmill-{os.getuid()}.attempts"]  # and the locks
    other = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: other)
    sweep_attempts(store)  # ignores the first user's folder
    with attempt_folder(store, "00000"):
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(RequestError, match=rf"{tmp_path}.* does not support file locks \(flock: {os.strerror(number)}"),
        attempt_folder(LocalStore(tmp_path), "00000"),
    ):
        pass
    with pytest.raises(RequestError, match="does not support file locks"), locked(tmp_path / "lock"):
        pass
