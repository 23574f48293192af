"""One launch per run folder: the others are refused, and one that slept is neither heard nor seen."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shards.base.errors import RequestError, exit_code_of
from tests import ranks
from tests.runs import curve, environment, train_fields, write_config
from train.run import launches
from train.run.checkpoints.checkpoint import list_checkpoints, verify_checkpoint
from train.run.launches import Launch, launch_folder, publish, remove, take, wait_until_free
from train.run.reporting.json_lines import JsonLines, read_json_lines

HOLDER = """
import sys, time
from pathlib import Path
from shards.base.errors import exit_code_of
from train.run.launches import Launch, publish, take

def hold():
    folder = take(Path(sys.argv[1]), 60)
    with Launch(folder):
        for number in range(100_000):
            (folder / "mine").mkdir()
            (folder / "mine" / "said").write_text(f"{folder.name} {number}")
            publish(folder / "mine", Path(sys.argv[1]) / "shown", folder)
            time.sleep(0.002)

sys.exit(exit_code_of(hold))
"""


def holders(run_dir: Path, count: int) -> list[subprocess.Popen[str]]:
    """Processes that take the run, and show something in it again and again."""
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    return [subprocess.Popen(command, env=environment(), text=True, stderr=subprocess.PIPE) for _ in range(count)]


def wait_for(what: Callable[[], Any]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_several_launches_at_once_one_proceeds_and_the_others_say_who_does(tmp_path: Path) -> None:
    several = holders(tmp_path, 4)
    wait_for(lambda: sum(process.poll() is None for process in several) == 1)
    (alive,) = [process for process in several if process.returncode is None]
    for process in several:
        if process is not alive:
            message = " ".join(process.communicate()[1].split())
            assert process.returncode == 2
            assert f"{tmp_path} is in use: launch 1 (host " in message
            assert f"process {alive.pid}, since" in message and "one launch at a time may" in message
    alive.kill()
    alive.communicate()
    # dead of SIGKILL on this machine, which is known at once, and gone with all that it had not shown yet
    folder = take(tmp_path, 1000)
    assert folder == launch_folder(tmp_path, 2)
    assert json.loads((tmp_path / "launches" / "0001.json").read_text())["pid"] == alive.pid
    assert sorted(path.name for path in (tmp_path / "launches").iterdir()) == ["0001.json", "0002"]


def test_nothing_of_one_that_slept_is_seen_and_it_says_who_took_over(tmp_path: Path) -> None:
    """Stopped anywhere between two renames, and woken when another has the run."""
    (sleeper,) = holders(tmp_path, 1)
    wait_for(lambda: (tmp_path / "shown").is_dir())
    sleeper.send_signal(signal.SIGSTOP)
    with Launch(take(tmp_path, 1.5)) as launch:
        (launch.folder / "mine").mkdir()
        publish(launch.folder / "mine", tmp_path / "shown", launch.folder)
        sleeper.send_signal(signal.SIGCONT)
        message = " ".join(sleeper.communicate(timeout=60)[1].split())
        assert sleeper.returncode == 2
        assert f"is in use: launch 2 (host {os.uname().nodename}, process {os.getpid()}" in message
        assert "took it over from this launch, 1, which gave no sign of life" in message
        assert not list((tmp_path / "shown").iterdir())
        assert sorted(path.name for path in (tmp_path / "launches").iterdir()) == ["0001.json", "0002"]


def test_every_way_to_change_a_run_is_closed_to_a_launch_that_was_superseded(tmp_path: Path) -> None:
    old = take(tmp_path, 1)
    lines = JsonLines(tmp_path / "metrics.jsonl", 0, old)
    lines.write(step=1)
    launch = Launch(take(tmp_path, 1))  # this process's own earlier launch counts as over
    JsonLines(tmp_path / "metrics.jsonl", 1, launch.folder).write(step=2)
    lines.write(step=99)  # into a file that has no name any more
    assert [row["step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    (tmp_path / "kept").mkdir()
    with pytest.raises(FileNotFoundError):
        remove(tmp_path / "kept", old)
    with pytest.raises(FileNotFoundError):
        JsonLines(tmp_path / "metrics.jsonl", 0, old)
    with pytest.raises(FileNotFoundError):
        Launch(old).note(save_seconds=1.0)
    assert (tmp_path / "kept").is_dir() and not old.exists()


def test_a_sleeper_between_its_look_and_its_claim_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw that the run was free. Others held the run since, and the number that it claims is long gone."""
    wait = launches.wait_until_free

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr(launches, "wait_until_free", wait)
        seen = wait(*arguments)
        take(tmp_path, 1)
        take(tmp_path, 1)
        return seen

    monkeypatch.setattr(launches, "wait_until_free", slow)
    assert take(tmp_path, 1) == launch_folder(tmp_path, 3)
    assert [path.name for path in (tmp_path / "launches").iterdir() if path.is_dir()] == ["0003"]


def test_a_launch_that_ended_or_never_said_who_it_is_is_no_obstacle_for_long(tmp_path: Path) -> None:
    with Launch(take(tmp_path, 1)):
        pass
    assert "ended" in json.loads((launch_folder(tmp_path, 1) / "launch.json").read_text())
    elsewhere = {"host": "far", "pid": 1, "job": "77", "began": "then", "machine": "far/boot", "process": 1}
    launches.write_record(launch_folder(tmp_path, 1), elsewhere)
    began = time.monotonic()
    sign = wait_until_free(tmp_path, 0.5)
    assert time.monotonic() - began >= 0.5  # another machine's: its silence alone tells
    assert take(tmp_path, 1000, sign) == launch_folder(tmp_path, 2)
    (tmp_path / "launches" / "0003").mkdir()  # killed before it wrote its record
    assert take(tmp_path, 0.5) == launch_folder(tmp_path, 4)


def test_a_trainer_that_was_stopped_and_wakes_leaves_the_run_as_if_it_had_not(latents: Path, tmp_path: Path) -> None:
    """Its successor goes on from what it saved; it ends with 2; curve and checkpoints are the undisturbed run's."""
    fields = train_fields(latents, tmp_path / "whole", max_steps=30, takeover_after=1.5, log={"tracker": "none"})
    ranks.run(tmp_path / "whole.log", ["--config", str(write_config(tmp_path, fields))])
    command = ["--config", str(write_config(tmp_path, fields | {"run_dir": str(tmp_path / "run")}))]
    (sleeper,) = ranks.start(tmp_path / "sleeper.log", command)
    wait_for(lambda: len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) >= 5)
    assert sleeper.pid is not None
    os.kill(sleeper.pid, signal.SIGSTOP)
    try:
        (successor,) = ranks.start(tmp_path / "log", command)
        wait_for(lambda: (tmp_path / "log").exists() and "resuming" in (tmp_path / "log").read_text())
    finally:
        os.kill(sleeper.pid, signal.SIGCONT)
        codes = ranks.wait([sleeper, successor], 120)
    assert codes == [2, 0], (tmp_path / "log").read_text()
    assert "took it over from this launch, 1" in " ".join((tmp_path / "sleeper.log").read_text().split())
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    saved = [verify_checkpoint(list_checkpoints(tmp_path / run)[-1]).content["files"] for run in ("run", "whole")]
    assert saved[0] == saved[1]


def test_a_request_that_is_refused_takes_nothing(latents: Path, tmp_path: Path) -> None:
    from train.__main__ import run

    fields = train_fields(latents, tmp_path / "run", num_processes=2)
    assert exit_code_of(lambda: run(["--config", str(write_config(tmp_path, fields))])) == RequestError.exit_code
    assert not (tmp_path / "run").exists()
