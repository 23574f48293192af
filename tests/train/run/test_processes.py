"""Processes that die or fall silent, and the launcher that starts them again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shards.base.errors import WorkError
from tests import ranks
from tests.runs import curve, environment, launcher, rank_processes, train_fields, write_config
from train.run.metrics import read_json_lines
from train.run.processes import LAUNCHER, die_with_launcher


def lines(run_dir: Path) -> int:
    """How many lines of metrics.jsonl are there; none while it is being replaced."""
    return len(read_json_lines(run_dir / "metrics.jsonl"))


def wait_for_lines(run_dir: Path, count: int, process: Any) -> None:
    """Until so many steps are logged, or the process has ended."""
    while lines(run_dir) < count:
        assert process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_process_that_does_not_answer_ends_the_run_with_an_error(
    latents: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The other one neither hangs nor trains on; what it saved goes on on one process."""
    # at the end of an epoch a loader without processes of its own waits too, for which `data.timeout` is there
    streams = [{"root": str(latents), "bucket": "64x64", "weight": 1000.0}]
    fields = train_fields(
        latents, tmp_path / "run", max_steps=100_000, data={"streams": streams}, collective_timeout=15.0
    )
    config = write_config(tmp_path, fields)
    first, second = ranks.start(tmp_path / "log", ["--config", str(config)], 2)
    wait_for_lines(tmp_path / "run", 3, first)
    assert second.pid is not None
    os.kill(second.pid, number)
    assert ranks.wait([first], 120) == [1], (tmp_path / "log").read_text()
    second.kill()
    second.join()
    message = " ".join((tmp_path / "log").read_text().split())
    assert "error: After step" in message and "a collective failed: another process died, or did not answer" in message
    assert "the same command again resumes" in message
    steps = lines(tmp_path / "run")
    fields |= {"max_steps": steps + 2}
    assert "resuming" in ranks.run(tmp_path / "again", ["--config", str(write_config(tmp_path, fields))])


def test_the_launcher_starts_a_job_again_whose_process_was_killed(latents: Path, tmp_path: Path) -> None:
    """What is left is one curve and one log of samples, as if nothing had happened."""
    fields = train_fields(latents, tmp_path / "whole", max_steps=30, checkpoint={"every": 5}, collective_timeout=120.0)
    ranks.run(tmp_path / "whole.log", ["--config", str(write_config(tmp_path, fields))], 2)
    config = write_config(tmp_path, fields | {"run_dir": str(tmp_path / "run")})
    ddp = ("--config_file", "configs/accelerate/ddp.yaml", "--num_processes", "2", "--main_process_port", "0")
    command = [*launcher(1)[:3], *ddp, "--max_restarts", "3", "-m", "train", "--config", str(config)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    wait_for_lines(tmp_path / "run", 7, process)
    rank_processes(process.pid)[1].kill()
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    assert "resuming" in (tmp_path / "log").read_text()
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_signal_to_the_launcher_alone_saves_the_run(latents: Path, tmp_path: Path) -> None:
    """SIGUSR1 reaches the processes too, and they have time to save."""
    fields = train_fields(latents, tmp_path / "run", max_steps=100_000, checkpoint={"every": 100_000})
    command = [*launcher(2), "-m", "train", "--config", str(write_config(tmp_path, fields))]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    wait_for_lines(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(300) == 75
    assert "told to leave, saved after step" in " ".join((tmp_path / "log").read_text().split())
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_launcher_that_is_killed_leaves_no_process_behind(latents: Path, tmp_path: Path) -> None:
    """SIGKILL of it alone: its processes have sessions of their own, and would train on."""
    fields = train_fields(latents, tmp_path / "run", max_steps=100_000, checkpoint={"every": 100_000})
    command = [*launcher(2), "-m", "train", "--config", str(write_config(tmp_path, fields))]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    wait_for_lines(tmp_path / "run", 2, process)
    orphans = rank_processes(process.pid)
    assert len(orphans) == 2
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(orphans, timeout=5)
    alive = [each.pid for each in left if each.status() != psutil.STATUS_ZOMBIE]
    for each in left:
        each.kill()
    assert not alive


def test_a_process_whose_launcher_died_before_it_was_ready_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    monkeypatch.setattr("train.run.processes.ctypes.CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    with pytest.raises(WorkError, match="is not the parent of this process: it died, and this one leaves with it"):
        die_with_launcher()
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    die_with_launcher()
