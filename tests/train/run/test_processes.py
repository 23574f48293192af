"""Lost and suspended processes, restarts by the launcher, and signals to a run."""

import os
import re
import signal
import socket
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

from shards.base.errors import Preempted, RequestError, WorkError
from tests import ranks
from tests.runs import curve, launcher, train_fields, wait_until, write_config
from train.__main__ import run as command
from train.run.checkpoints.checkpoint import list_checkpoints
from train.run.checkpoints.retention import CheckpointConfig
from train.run.health.heartbeat import HeartbeatReporter
from train.run.lease.owner import Pace
from train.run.preflight import LAUNCHER, check_shared
from train.run.processes import (
    CHECK_SECONDS,
    MAX_CHECK_INTERVAL,
    ShutdownCoordinator,
    check_interval,
    die_with_launcher,
    join_processes,
)
from train.run.reporting.json_lines import read_json_lines
from train.step import StepResult, TrainStep
from train.trainer import Trainer


def num_lines(run_dir: Path) -> int:
    """Return the number of lines of metrics.jsonl, or 0 if the file is missing or being replaced."""
    return len(read_json_lines(run_dir / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("rank", "number"),
    [(1, signal.SIGSTOP), (1, signal.SIGKILL), pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow)],
    ids=["suspended", "killed", "rank 0 suspended"],
)
def test_a_lost_process_ends_the_run_with_an_error_that_names_it(
    latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, number: signal.Signals
) -> None:
    """The remaining process exits with an error. A single process then resumes from the last checkpoint."""
    # the weight makes the first epoch long, because a loader without workers waits up to `data.timeout` at its end
    streams = [{"root": str(latents), "bucket": "64x64", "weight": 1000.0}]
    fields = train_fields(
        latents, tmp_path / "run", max_steps=100_000, data={"streams": streams}, collective_timeout=10.0
    )
    config = write_config(tmp_path, fields)
    processes = ranks.start(tmp_path / "log", ["--config", str(config)], 2)
    wait_until(lambda: list_checkpoints(tmp_path / "run"), process=processes[0], log=tmp_path / "log")
    lost = processes.pop(rank)
    assert lost.pid is not None
    os.kill(lost.pid, number)
    assert ranks.wait(processes, 120) == [1], (tmp_path / "log").read_text()
    lost.kill()
    lost.join()
    message = " ".join((tmp_path / "log").read_text().split())
    assert "error: After step" in message and "a collective failed: another process died, or did not respond" in message
    assert "Run the same command again to resume" in message
    if rank:
        silent = rf"Rank 1 \(host \S+, process {lost.pid}\) has sent no heartbeat for \d+ s"
        named = rf"{silent}; its last known state was \w+ after step \d+"
        assert re.search(named, message), message
    else:
        assert "The store at 127.0.0.1:" in message and "check the machine that runs rank 0" in message
    fields |= {"max_steps": num_lines(tmp_path / "run") + 2}
    command(["--config", str(write_config(tmp_path, fields))])
    assert "resuming" in capsys.readouterr().out


def launch_slowly(arguments: list[str]) -> None:
    """Run the launcher. From the sixth on, each step takes a second, so that a test can kill processes meanwhile."""
    train_step = TrainStep.__call__

    def wait_and_train(self: TrainStep, batch: Any, step: int) -> StepResult:
        time.sleep(step >= 5)
        return train_step(self, batch, step)

    TrainStep.__call__ = wait_and_train  # type: ignore[method-assign]
    ranks.launch(arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux notifies a process of its parent's death")
def test_a_killed_rank_is_restarted_and_ranks_die_with_the_launcher(latents: Path, tmp_path: Path) -> None:
    """The launcher restarts the job after a rank was killed. When the launcher is killed, the ranks die too, although
    each has its own session. The next launch resumes, and the loss curve equals that of an undisturbed run."""
    fields = train_fields(latents, tmp_path / "whole", max_steps=12, collective_timeout=120.0)
    ranks.run(tmp_path / "whole.log", ["--config", str(write_config(tmp_path, fields))], 2)
    config = write_config(tmp_path, fields | {"run_dir": str(tmp_path / "run")})
    ddp = ("--config_file", "configs/accelerate/ddp.yaml", "--num_processes", "2", "--main_process_port", "0")
    words = [*ddp, "--max_restarts", "3", "-m", "train", "--config", str(config)]
    (process,) = ranks.start(tmp_path / "log", words, program=f"{__name__}:{launch_slowly.__name__}")
    wait_until(lambda: num_lines(tmp_path / "run") >= 5, process=process)
    psutil.Process(process.pid).children()[1].kill()
    log = tmp_path / "log"
    wait_until(lambda: "resuming" in log.read_text(), process=process, log=log)
    orphans = psutil.Process(process.pid).children()
    assert len(orphans) == 2
    process.kill()
    process.join()
    killed = time.monotonic()
    _, left = psutil.wait_procs(orphans, timeout=5)
    print(f"launcher killed: {len(orphans) - len(left)} of 2 ranks gone after {time.monotonic() - killed:.1f} s")
    alive = [orphan.pid for orphan in left if orphan.status() != psutil.STATUS_ZOMBIE]
    for orphan in left:
        orphan.kill()
    assert not alive
    assert "resuming" in ranks.run(tmp_path / "again.log", ["--config", str(config)], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_signals_to_the_launcher_alone_reach_its_processes(latents: Path, tmp_path: Path) -> None:
    """On SIGUSR2 the run saves and continues; on SIGUSR1 it saves and exits."""
    fields = train_fields(latents, tmp_path / "run", max_steps=100_000, checkpoint={"every": 100_000})
    words = [*launcher(2)[3:], "-m", "train", "--config", str(write_config(tmp_path, fields))]
    (process,) = ranks.start(tmp_path / "log", words, program="tests.ranks:launch")
    wait_until(lambda: num_lines(tmp_path / "run") >= 2, process=process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR2)
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_until(lambda: list(checkpoints.glob("step-*")), process=process, log=tmp_path / "log")
    (saved,) = checkpoints.glob("step-*")
    wait_until(lambda: num_lines(tmp_path / "run") >= int(saved.name[5:]) + 10, process=process)
    os.kill(process.pid, signal.SIGUSR1)
    assert ranks.wait([process], 300) == [75]
    printed = " ".join((tmp_path / "log").read_text().split())
    assert "received a stop signal and saved a checkpoint after step" in printed
    assert (tmp_path / "log").read_text().count("SIGUSR2 received: writing a checkpoint") == 1
    assert len(list(checkpoints.glob("step-*"))) == 2


def test_a_process_exits_if_its_launcher_died_during_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    monkeypatch.setattr("shards.base.pool.ctypes.CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    orphaned = r"is not the parent of this process, so this process exits\. Either the launcher died during startup"
    with pytest.raises(WorkError, match=orphaned):
        die_with_launcher()
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    die_with_launcher()


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        (7.0, 1),
        (1.0, 1),
        (0.6, 1),
        (0.5, 2),
        (0.11, 9),
        (1e-6, MAX_CHECK_INTERVAL),
        (0.0, MAX_CHECK_INTERVAL),
    ],
)
def test_signal_checks_are_at_most_a_second_or_a_step_apart(seconds: float, steps: int) -> None:
    assert check_interval(seconds) == steps
    assert steps * seconds <= max(CHECK_SECONDS, seconds)


def test_all_processes_respond_to_a_signal_within_two_seconds_or_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes whose clocks differ check after the same steps. Each signal reaches only the second process."""
    clocks, process = [0.0, 0.0], 0
    monkeypatch.setattr("train.run.processes.time.monotonic", lambda: clocks[process])
    stops = [SimpleNamespace(received=False), SimpleNamespace(received=False)]
    save = SimpleNamespace(received=False)
    sent: list[torch.Tensor] = []
    accelerator: Any = SimpleNamespace(device="cpu", num_processes=2, reduce=lambda own, _: torch.stack(sent).sum(0))
    launch: Any = SimpleNamespace(superseded=False)
    coordinators = [ShutdownCoordinator(accelerator, launch, stop, save, step=5) for stop in stops]  # type: ignore[arg-type]
    signalled_at, delays = 0.0, []
    signalled_steps = {*range(1000, 2900, 211), *range(3100, 4000, 97)}
    for step in range(6, 4000):
        seconds = 0.02 if step < 3000 else 3.0
        clocks = [clocks[0] + seconds, clocks[1] + 1.5 * seconds]
        if step in signalled_steps:
            stops[1].received, signalled_at = True, clocks[0]
        assert (coordinators[0].next_check <= step) == (coordinators[1].next_check <= step)
        if coordinators[0].next_check > step:
            continue
        # both contributions to the collective are computed first, because neither `check` returns before both are sent
        sent = []
        for process, (stop, coordinator) in enumerate(zip(stops, coordinators, strict=True)):
            step_seconds = (clocks[process] - coordinator.timing_since) / (step - coordinator.last_check)
            sent.append(torch.tensor([float(stop.received), 0.0, 0.0, float(check_interval(step_seconds))]))
        stopped = []
        for process, coordinator in enumerate(coordinators):  # noqa: B007
            stopped.append(coordinator.check(step).stop)
        assert stopped == [stops[1].received] * 2
        if stopped[0]:
            delays.append((clocks[0] - signalled_at, seconds))
            stops[1].received = False
    for seconds in (0.02, 3.0):
        longest = max(delay for delay, step_seconds in delays if step_seconds == seconds)
        print(f"steps of {seconds} s: all processes stop within {longest:.2f} s of the signal")
    assert len(delays) == len(signalled_steps) and all(delay <= max(2.0, seconds) for delay, seconds in delays)


class SimulatedRun:
    """Fakes for the parts of a single-process trainer, on a simulated clock. It also is the checkpoint writer.

    A step takes 7 s and a save `save_seconds`. The signal arrives at second `signalled_at`.
    """

    def __init__(
        self,
        save_seconds: float,
        asynchronous: bool,
        signalled_at: float,
        number: signal.Signals = signal.SIGTERM,
    ):
        self.clock, self.save_seconds, self.asynchronous = 0.0, save_seconds, asynchronous
        self.signalled_at, self.number = signalled_at, number
        self.written: dict[int, float] = {}
        """Step → second at which its checkpoint is complete."""
        self.printed = ""
        self.state, self.max_steps, self.collective_timeout = SimpleNamespace(step=0), 61, 1.0
        self.heartbeat = HeartbeatReporter()
        self.lease = SimpleNamespace(superseded=False, pace=None, note=self.note)
        self.accelerator = SimpleNamespace(
            device="cpu", num_processes=1, scaler=None, reduce=lambda own, _: own, is_main_process=True,
            wait_for_everyone=lambda: None,
        )  # fmt: skip
        self.config = CheckpointConfig(every=3, grace=60, asynchronous=asynchronous)
        self.seconds: float | None = None

    def trainer(self) -> Trainer:
        """Build a real trainer from these fakes."""
        step = MagicMock(side_effect=lambda *_: self.wait_until(self.clock + 7))
        loader = MagicMock(num_first=1)
        loader.__iter__.return_value = (None for _ in iter(int, 1))
        snapshots: Any = MagicMock(config=SimpleNamespace(every=9))
        log: Any = MagicMock(is_main=False)
        return Trainer(
            self.accelerator, step, self.state, loader, MagicMock(), log, None, self, snapshots, self.lease,  # type: ignore[arg-type]
            self.heartbeat, self.max_steps, self.collective_timeout,
        )  # fmt: skip

    def wait_until(self, second: float) -> None:
        """Advance the clock, and send the signal if its time is reached."""
        if self.clock < self.signalled_at <= second:
            os.kill(os.getpid(), self.number)
        self.clock = max(self.clock, second)

    def write(self, *_: Any) -> None:
        """Start writing a checkpoint once the previous one is complete."""
        self.finish()
        self.written[self.state.step], self.seconds = self.clock + self.save_seconds, self.save_seconds
        if not self.asynchronous:
            self.finish()

    def check(self) -> None:
        """Report no error, because simulated writes never fail."""

    def finish(self) -> None:
        """Wait until the checkpoint being written is complete."""
        self.wait_until(max(self.written.values(), default=0.0))

    def note(self, pace: Pace) -> None:
        """Record a pace, as a lease does."""
        self.lease.pace = pace


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SimulatedRun]]:
    """Return a function that builds a simulated run and trains until it ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}

    def simulate(*arguments: Any) -> SimulatedRun:
        run = SimulatedRun(*arguments)
        monkeypatch.setattr("train.run.processes.time.monotonic", lambda: run.clock)
        output = StringIO()
        with suppress(Preempted), redirect_stdout(output):
            run.trainer().fit()
        run.printed = output.getvalue()
        return run

    yield simulate
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_signalled_run_saves_within_the_grace_period_or_has_warned(
    simulated: Callable[..., SimulatedRun], asynchronous: bool
) -> None:
    """The signal arrives at any second of three steps, with saves of various durations. The grace period is 60 s."""
    warned_saves, num_runs, num_warned, longest = set(), 0, 0, 0.0
    for save_seconds in (1, 26, 27, 40):
        for signalled_at in range(100, 200, 11):
            run = simulated(float(save_seconds), asynchronous, float(signalled_at))
            last = run.written[run.state.step]
            assert last == max(run.written.values()) == run.clock
            warned = "the run is killed after 60 s" in run.printed
            assert warned or last <= signalled_at + 60
            num_runs, num_warned = num_runs + 1, num_warned + warned
            if warned:
                warned_saves.add(save_seconds)
            else:
                longest = max(longest, last - signalled_at)
    print(f"{num_runs} runs: {num_warned} had warned; the others saved within {longest:.0f} s of the signal")
    assert warned_saves == {27, 40}  # 7 s for a step and twice the save, because one may already be under way


def test_a_run_saves_and_continues_on_sigusr2(simulated: Callable[..., SimulatedRun]) -> None:
    run = simulated(1.0, True, 30.0, signal.SIGUSR2)
    assert run.state.step == run.max_steps
    # besides every third step: the step after the signal, and the last one
    assert [step for step in run.written if step % 3] == [5, 61]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_no_other_rank_joins_fails(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(WorkError, match="Before the first step, a collective failed: another process died, or did"):
        join_processes(1.0, "cpu")


def test_a_folder_that_a_machine_does_not_share_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[str | None] = [None]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda own: [*own, *others])
    monkeypatch.setattr("train.run.preflight.VISIBLE_SECONDS", 0.0)
    accelerator = MagicMock(is_local_main_process=True)
    check_shared(accelerator, "run_dir", tmp_path)
    others = ["gpu004", None, "gpu003"]
    with pytest.raises(RequestError, match="in run_dir exists on the run's first machine, but not on gpu003, gpu004"):
        check_shared(accelerator, "run_dir", tmp_path)
    others = []
    with pytest.raises(RequestError, match=f"but not on {re.escape(socket.gethostname())}. All machines"):
        check_shared(accelerator, "init_from", tmp_path / "absent")
