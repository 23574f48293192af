"""Processes that die or fall silent, and the launcher that starts them again."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch

from shards.base.errors import Preempted, WorkError
from tests import ranks
from tests.runs import curve, environment, launcher, rank_processes, train_fields, write_config
from train.run.checkpoints.config import CheckpointConfig
from train.run.health.heartbeat import HeartbeatReporter
from train.run.launches import Pace
from train.run.preflight import LAUNCHER
from train.run.processes import (
    LOOK_SECONDS,
    MOST_STEPS,
    ShutdownCoordinator,
    die_with_launcher,
    join_processes,
    look_interval,
)
from train.run.reporting.json_lines import read_json_lines
from train.trainer import Trainer


def lines(run_dir: Path) -> int:
    """How many lines of metrics.jsonl are there; none while it is being replaced."""
    return len(read_json_lines(run_dir / "metrics.jsonl"))


def wait_for_lines(run_dir: Path, count: int, process: Any) -> None:
    """Until so many steps are logged, or the process has ended."""
    while lines(run_dir) < count:
        assert process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("rank", "number"),
    [(1, signal.SIGSTOP), (1, signal.SIGKILL), pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow)],
    ids=["stopped", "killed", "with the store"],
)
def test_a_process_that_does_not_answer_ends_the_run_with_an_error(
    latents: Path, tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    """The other one neither hangs nor trains on, and names it; what it saved goes on on one process."""
    # at the end of an epoch a loader without processes of its own waits too, for which `data.timeout` is there
    streams = [{"root": str(latents), "bucket": "64x64", "weight": 1000.0}]
    fields = train_fields(
        latents, tmp_path / "run", max_steps=100_000, data={"streams": streams}, collective_timeout=10.0
    )
    config = write_config(tmp_path, fields)
    processes = ranks.start(tmp_path / "log", ["--config", str(config)], 2)
    wait_for_lines(tmp_path / "run", 3, processes[0])
    lost = processes.pop(rank)
    assert lost.pid is not None
    os.kill(lost.pid, number)
    assert ranks.wait(processes, 120) == [1], (tmp_path / "log").read_text()
    lost.kill()
    lost.join()
    message = " ".join((tmp_path / "log").read_text().split())
    assert "error: After step" in message and "a collective failed: another process died, or did not answer" in message
    assert "the same command again resumes" in message
    if rank:
        named = rf"Rank 1 \(host \S+, process {lost.pid}\) has given no sign of life for \d+ s; it was after step \d+,"
        assert re.search(named, message), message
    else:
        assert "The store at 127.0.0.1:" in message and "look at that machine, rank 0's" in message
    steps = lines(tmp_path / "run")
    fields |= {"max_steps": steps + 2}
    assert "resuming" in ranks.run(tmp_path / "again", ["--config", str(write_config(tmp_path, fields))])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_job_outlives_a_killed_process_and_a_killed_launcher_leaves_none_behind(
    latents: Path, tmp_path: Path
) -> None:
    """The launcher starts a job again whose process was killed. Once it is killed itself, its processes are gone too,
    though they have sessions of their own; the next launch ends in one curve, as if nothing had happened."""
    fields = train_fields(latents, tmp_path / "whole", max_steps=60, checkpoint={"every": 5}, collective_timeout=120.0)
    ranks.run(tmp_path / "whole.log", ["--config", str(write_config(tmp_path, fields))], 2)
    config = write_config(tmp_path, fields | {"run_dir": str(tmp_path / "run")})
    ddp = ("--config_file", "configs/accelerate/ddp.yaml", "--num_processes", "2", "--main_process_port", "0")
    command = [*launcher(1)[:3], *ddp, "--max_restarts", "3", "-m", "train", "--config", str(config)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    wait_for_lines(tmp_path / "run", 7, process)
    rank_processes(process.pid)[1].kill()
    while "resuming" not in (tmp_path / "log").read_text():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.01)
    orphans = rank_processes(process.pid)
    assert len(orphans) == 2
    process.kill()
    process.wait()
    killed = time.monotonic()
    _, left = psutil.wait_procs(orphans, timeout=5)
    print(f"launcher killed: {len(orphans) - len(left)} of 2 ranks gone after {time.monotonic() - killed:.1f} s")
    alive = [each.pid for each in left if each.status() != psutil.STATUS_ZOMBIE]
    for each in left:
        each.kill()
    assert not alive
    assert "resuming" in ranks.run(tmp_path / "again.log", ["--config", str(config)], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_signal_to_the_launcher_alone_saves_the_run(latents: Path, tmp_path: Path) -> None:
    """Of SIGUSR2 it goes on; SIGUSR1 reaches the processes too, and they have time to save."""
    fields = train_fields(latents, tmp_path / "run", max_steps=100_000, checkpoint={"every": 100_000})
    command = [*launcher(2), "-m", "train", "--config", str(write_config(tmp_path, fields))]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    wait_for_lines(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGUSR2)
    while not (saved := list((tmp_path / "run" / "checkpoints").glob("step-*"))):
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.01)
    wait_for_lines(tmp_path / "run", int(saved[0].name[5:]) + 10, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(300) == 75
    assert "received a stop signal and saved after step" in " ".join((tmp_path / "log").read_text().split())
    assert (tmp_path / "log").read_text().count("SIGUSR2 received: writing a checkpoint") == 1
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 2


def test_a_process_whose_launcher_died_before_it_was_ready_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    monkeypatch.setattr("train.run.processes.ctypes.CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    with pytest.raises(WorkError, match="is not the parent of this process: it died, and this one leaves with it"):
        die_with_launcher()
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    die_with_launcher()


@pytest.mark.parametrize(
    ("seconds", "steps"), [(7.0, 1), (1.0, 1), (0.6, 1), (0.5, 2), (0.11, 9), (1e-6, MOST_STEPS), (0.0, MOST_STEPS)]
)
def test_looks_at_signals_are_a_second_apart_or_a_step(seconds: float, steps: int) -> None:
    assert look_interval(seconds) == steps
    assert steps * seconds <= max(LOOK_SECONDS, seconds)


def test_leaving_is_agreed_in_time_whatever_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of unlike clocks look after the same steps; a signal to one is heard by both in 2 s or a step."""
    clock, looking = [0.0, 0.0], 0
    monkeypatch.setattr("train.run.processes.time.monotonic", lambda: clock[looking])
    states = [SimpleNamespace(received=False), SimpleNamespace(received=False)]
    never = SimpleNamespace(received=False)
    said: list[torch.Tensor] = []
    accelerator: Any = SimpleNamespace(device="cpu", num_processes=2, reduce=lambda mine, _: torch.stack(said).sum(0))
    launch: Any = SimpleNamespace(superseded=False)
    both = [ShutdownCoordinator(accelerator, launch, state, never, step=5) for state in states]  # type: ignore[arg-type]
    told, waits, moments = 0.0, [], {*range(1000, 2900, 211), *range(3100, 4000, 97)}
    for step in range(6, 4000):
        seconds = 0.02 if step < 3000 else 3.0
        clock = [clock[0] + seconds, clock[1] + 1.5 * seconds]
        if step in moments:
            states[1].received, told = True, clock[0]
        assert (both[0].next <= step) == (both[1].next <= step)
        if both[0].next > step:
            continue
        said = []
        for looking, (state, leaving) in enumerate(zip(states, both, strict=True)):
            interval = look_interval((clock[looking] - leaving.since) / (step - leaving.looked))
            said.append(torch.tensor([float(state.received), 0.0, 0.0, float(interval)]))
        answers = []
        for looking, leaving in enumerate(both):  # noqa: B007
            answers.append(leaving.agreed(step).leave)
        assert answers == [states[1].received] * 2
        if answers[0]:
            waits.append((clock[0] - told, seconds))
            states[1].received = False
    for seconds in (0.02, 3.0):
        longest = max(wait for wait, step_seconds in waits if step_seconds == seconds)
        print(f"steps of {seconds} s: told to leave, all agree after {longest:.2f} s at most")
    assert len(waits) == len(moments) and all(wait <= max(2.0, seconds) for wait, seconds in waits)


class SimulatedRun:
    """The collaborators of a trainer of one process, on a simulated clock.

    A step takes 7 s, and a checkpoint `save` seconds. Signal `number` arrives at second `told`.
    """

    def __init__(self, save: float, asynchronous: bool, told: float, number: signal.Signals = signal.SIGTERM):
        self.clock, self.save_seconds, self.asynchronous, self.told, self.number = 0.0, save, asynchronous, told, number
        self.written: dict[int, float] = {}
        """Step → second at which its checkpoint was there."""
        self.printed = ""
        self.state, self.max_steps, self.collective_timeout = SimpleNamespace(step=0), 1000, 1.0
        self.heartbeat = HeartbeatReporter()
        self.launch = SimpleNamespace(superseded=False, pace=None, note=self.note)
        self.accelerator = SimpleNamespace(
            device="cpu", num_processes=1, scaler=None, reduce=lambda said, _: said, is_main_process=True,
            wait_for_everyone=lambda: None,
        )  # fmt: skip
        self.config = CheckpointConfig(every=3, grace=60, asynchronous=asynchronous)
        self.seconds: float | None = None

    def trainer(self) -> Trainer:
        """A real trainer of these collaborators."""
        step = MagicMock(side_effect=lambda *_: self.wait_until(self.clock + 7))
        loader = MagicMock(num_first=1)
        loader.__iter__.return_value = (None for _ in iter(int, 1))
        every: Any = MagicMock(config=SimpleNamespace(every=9))
        log: Any = MagicMock(main=False)
        return Trainer(
            self.accelerator, step, self.state, loader, MagicMock(), log, None, self, every, self.launch,  # type: ignore[arg-type]
            self.heartbeat, self.max_steps, self.collective_timeout,
        )  # fmt: skip

    def wait_until(self, second: float) -> None:
        """Let time pass; the signal comes meanwhile, or not."""
        if self.clock < self.told <= second:
            os.kill(os.getpid(), self.number)
        self.clock = max(self.clock, second)

    def write(self, *_: Any) -> None:
        """Begin to write a checkpoint, behind the one before."""
        self.finish()
        self.written[self.state.step], self.seconds = self.clock + self.save_seconds, self.save_seconds
        if not self.asynchronous:
            self.finish()

    def check(self) -> None:
        """Nothing ever goes wrong."""

    def finish(self) -> None:
        """Wait for what is being written."""
        self.wait_until(max(self.written.values(), default=0.0))

    def note(self, save_seconds: float, step_seconds: float) -> None:
        """As a launch does."""
        self.launch.pace = Pace(save_seconds, step_seconds)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SimulatedRun]]:
    """Makes a simulated run and trains until it leaves."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}

    def trained(*arguments: Any) -> SimulatedRun:
        run = SimulatedRun(*arguments)
        monkeypatch.setattr("train.run.processes.time.monotonic", lambda: run.clock)
        output = StringIO()
        with suppress(Preempted), redirect_stdout(output):
            run.trainer().fit()
        run.printed = output.getvalue()
        return run

    yield trained
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_of_7_seconds_and_60_of_grace_end_in_a_checkpoint_or_were_warned_of(
    simulated: Callable[..., SimulatedRun], asynchronous: bool
) -> None:
    """Told at any second of three steps, whatever a checkpoint takes; what fits is not warned of."""
    warned, runs, late, longest = set(), 0, 0, 0.0
    for save in (1, 13, 25, 26, 27, 28, 40):
        for told in range(100, 200, 7):
            run = simulated(float(save), asynchronous, float(told))
            last = run.written[run.state.step]
            assert last == max(run.written.values()) == run.clock
            said = "60 s pass before the kill" in run.printed
            assert last <= told + 60 or said
            runs, late = runs + 1, late + said
            longest = longest if said else max(longest, last - told)
            warned |= {save} if said else set()
    print(f"{runs} runs: {late} warned beforehand; the others saved, the last {longest:.0f} s after the signal")
    assert warned == {27, 28, 40}  # a step, and two saves, as one may be under way


def test_told_to_save_a_run_saves_and_goes_on(simulated: Callable[..., SimulatedRun]) -> None:
    run = simulated(1.0, True, 30.0, signal.SIGUSR2)
    assert run.state.step == run.max_steps
    assert [step for step in run.written if step % 3] == [5, 1000]  # the step after second 30, once; and the last


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_meets_nobody_says_so(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(WorkError, match="Before the first step, a collective failed: another process died, or did not"):
        join_processes(1.0, "cpu")
