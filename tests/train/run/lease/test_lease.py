"""Leases between real processes and threads: who gets a run, who waits, and what a superseded launch can still do."""

import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shards.base.errors import WorkError
from shards.base.store import LocalStore
from tests import ranks
from tests.runs import acquire, curve, train_fields, wait_until, write_config
from train.__main__ import run as train
from train.run.checkpoints.checkpoint import list_checkpoints, verify_checkpoint
from train.run.lease.backend import Backend, Seen
from train.run.lease.folder import FolderBackend, remove
from train.run.lease.lease import Lease, LeaseLost, RunInUse, wait_until_free
from train.run.lease.owner import Pace, has_ended, process_start, this_process
from train.run.lease.store import StoreBackend
from train.run.reporting.json_lines import JsonLines, read_json_lines

pytestmark = pytest.mark.heavy


@pytest.fixture(params=["folder", "store"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """Each kind of storage, for a run without checkpoints."""
    if request.param == "folder":
        return FolderBackend(tmp_path / "run")
    return StoreBackend(LocalStore(tmp_path / "run"), tmp_path / "copies", dict)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each launch run on a different machine, so that only heartbeats say whether it is alive."""
    monkeypatch.setattr("train.run.lease.owner.machine", lambda: None)


def test_a_superseded_launch_can_change_nothing(tmp_path: Path) -> None:
    old = acquire(tmp_path)
    lines = JsonLines(tmp_path / "metrics.jsonl", 0, old.folder)
    lines.write(step=1)
    new = acquire(tmp_path)
    JsonLines(tmp_path / "metrics.jsonl", 1, new.folder).write(step=2)
    lines.write(step=99)  # to the replaced file
    assert [row["step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    (tmp_path / "kept").mkdir()
    with pytest.raises(FileNotFoundError):
        remove(tmp_path / "kept", old.folder)
    with pytest.raises(FileNotFoundError):
        JsonLines(tmp_path / "metrics.jsonl", 0, old.folder)
    with pytest.raises(LeaseLost, match=r"launch 2 .* took over from this launch \(launch 1\),"):
        old.renew()
    old.release()
    assert (
        "ended" not in new.backend.read(2)
        and new.backend.newest().number == 2
        and (tmp_path / "kept").is_dir()
        and not old.folder.exists()
        and not (new.folder / old.folder.name).exists()
    )
    remove(tmp_path / "kept", new.folder)
    assert not (tmp_path / "kept").exists() and not list(new.folder.iterdir())


def test_a_launch_passes_its_pace_to_the_next_and_says_when_it_ended(backend: Backend, far: None) -> None:
    with Lease.acquire(backend, 0.1) as lease:
        assert lease.pace is None and lease.run_dir.name == "run"
        lease.note(Pace(save=3.0, step=0.5))
    assert "ended" in backend.read(1)
    with Lease.acquire(backend, 1000) as lease:
        assert lease.number == 2 and lease.pace == Pace(3.0, 0.5)
    assert Lease.acquire(backend, 1000).pace == Pace(3.0, 0.5)  # although launch 2 wrote no checkpoint


def test_files_of_others_among_the_launches_are_left_alone(backend: Backend, far: None) -> None:
    """macOS and file systems such as NFS leave some."""
    with Lease.acquire(backend, 0.1):
        for name in (".DS_Store", "._0001.json", ".nfs0000000300", "note"):
            backend.store.write(f"launches/{name}", b"")
    assert Lease.acquire(backend, 1000).number == 2


def test_a_failed_heartbeat_is_reported_and_the_next_one_succeeds(
    backend: Backend, far: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(backend), "interval", 0.01)
    beat = backend.beat
    failures: list[int] = []

    def fail_twice(number: int, notes: dict[str, Any]) -> None:
        if len(failures) < 2:
            failures.append(number)
            raise OSError(errno.EIO, "Input/output error")
        beat(number, notes)

    with Lease.acquire(backend, 60) as lease:
        monkeypatch.setattr(backend, "beat", fail_twice)
        lease.note(Pace(save=3.0, step=0.5))  # written by the first heartbeat that succeeds
        wait_until(lambda: "save" in str(backend.read(1)))
        assert not lease.superseded
        assert backend.create(2, this_process() | {"token": "another launch"})
        wait_until(lambda: lease.superseded, 30)
    assert capsys.readouterr().out.count("the heartbeat of launch 1 failed: [Errno 5] Input/output error") == 2


def test_a_launch_that_cannot_record_its_end_says_so(
    backend: Backend, far: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(number: int, notes: dict[str, Any]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Lease.acquire(backend, 0.1) as lease:
        monkeypatch.setattr(backend, "beat", fail)
    assert "Input/output error" in capsys.readouterr().err and not lease.superseded
    monkeypatch.undo()
    assert "ended" not in backend.read(1)


def test_a_silent_launch_is_superseded_and_a_live_one_is_not(backend: Backend, far: None) -> None:
    lease = Lease.acquire(backend, 0.1)
    began = time.monotonic()
    free = wait_until_free(backend, 0.3)
    assert free.number == 1 and time.monotonic() - began > 0.3
    stopped = threading.Event()

    def send_heartbeats() -> None:
        while not stopped.wait(0.05):
            lease.renew()

    thread = threading.Thread(target=send_heartbeats)
    thread.start()
    try:
        for seen in (Seen(), Seen(free)):  # also if it was silent earlier
            with pytest.raises(RunInUse, match=r"launch 1 \(host .*, process \d+, since 20.*\) is training there"):
                Lease.acquire(backend, 60, seen)
    finally:
        stopped.set()
        thread.join()
    lease.release()
    assert Lease.acquire(backend, 1000).number == 2


def test_the_staging_folder_of_a_launch_that_died_before_its_record_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished" / "0001.dead").mkdir(parents=True)
    for number in (1, 2):
        assert acquire(tmp_path).number == number
    assert [path.name[:4] for path in (tmp_path / ".unfinished").iterdir()] == ["0002"]


def test_a_launch_that_is_superseded_meanwhile_says_so_instead_of_its_own_error(backend: Backend) -> None:
    with pytest.raises(LeaseLost, match=r"took over from this launch \(launch 1\),"), Lease.acquire(backend, 0.1):
        Lease.acquire(backend, 0.1)
        raise FileNotFoundError("the staging folder")


def test_a_launch_that_is_superseded_at_its_end_knows_it(backend: Backend, far: None) -> None:
    with Lease.acquire(backend, 0.1) as lease:
        assert not backend.create(1, {"token": "a late launch"})
        assert backend.create(2, this_process() | {"token": "another launch"})
        assert not lease.superseded
    assert lease.superseded and "ended" not in backend.read(1)
    assert not list(lease.run_dir.rglob("0001.a late launch"))


def test_a_launch_that_gives_up_frees_the_run(backend: Backend, far: None) -> None:
    with pytest.raises(WorkError, match="changed while this launch was starting"):
        Lease.acquire(backend, 0.1, Seen(checkpoints={"step-00000001": "a checkpoint that has gone"}))
    assert "ended" in backend.read(1)


def test_a_process_is_known_by_its_start() -> None:
    started = process_start(os.getpid())
    assert started is not None and Pace.from_record({"save_seconds": 3.0}) == Pace(3.0, 0.0)
    since_boot = psutil.Process().create_time() - psutil.boot_time()
    assert started / os.sysconf("SC_CLK_TCK") == pytest.approx(since_boot, abs=2)


def test_a_killed_process_of_this_machine_is_known_to_have_ended(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    record = this_process() | {"pid": child.pid, "process": process_start(child.pid)}
    assert FolderBackend(tmp_path).create(1, record | {"token": "a killed launch"})
    assert not has_ended(record)
    child.kill()
    child.wait()
    assert has_ended(record)
    assert acquire(tmp_path, ttl=1000).number == 2  # at once
    assert not has_ended(record | {"machine": "another machine"})
    assert has_ended(record | {"pid": os.getppid()})  # the id now belongs to another process


def test_a_suspended_trainer_leaves_its_successors_run_unchanged(latents: Path, tmp_path: Path) -> None:
    """The successor resumes from its checkpoint. Curve and checkpoints are those of an undisturbed run."""
    fields = train_fields(latents, tmp_path / "whole", max_steps=20, takeover_after=1.5, log={"tracker": "none"})
    train(["--config", str(write_config(tmp_path, fields))])
    command = ["--config", str(write_config(tmp_path, fields | {"run_dir": str(tmp_path / "run")}))]
    (sleeper,) = ranks.start(tmp_path / "sleeper.log", command)
    wait_until(lambda: len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) >= 5)
    assert sleeper.pid is not None
    os.kill(sleeper.pid, signal.SIGSTOP)
    try:
        (successor,) = ranks.start(tmp_path / "log", command)
        wait_until(lambda: (tmp_path / "log").exists() and "resuming" in (tmp_path / "log").read_text())
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
        codes = ranks.wait([sleeper, successor], 120)
    assert codes == [2, 0], (tmp_path / "log").read_text()
    assert "took over from this launch (launch 1)" in " ".join((tmp_path / "sleeper.log").read_text().split())
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    saved = [verify_checkpoint(list_checkpoints(tmp_path / run)[-1]).content["files"] for run in ("run", "whole")]
    assert saved[0] == saved[1]
