"""Workers on Ray: several attempts in a process, which are lost together, failed starts, and stop signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.fleet import Done, Failed, Fleet, FleetConfig, UnderWay
from cluster.pool import Function
from cluster.start import start_ray
from shards.base.errors import WorkError

pytestmark = pytest.mark.heavy

AT_ONCE = 3
CONFIG = FleetConfig(num_gpus=0, num_cpus=1, backoff=0)


@pytest.fixture(scope="module")
def one_slot() -> Iterator[None]:
    """Ray on this machine, with room for one worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        init = ray.init
        patch.setattr("ray.init", lambda *args, **options: init(*args, num_cpus=1, **options))
        start_ray(CONFIG)
    yield
    ray.shutdown()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_before_or_after_the_fleet_handles_it(number: signal.Signals) -> None:
    """On SIGTERM Ray ends a process with code 15 and no message, but schedulers requeue on code 75."""
    program = """
import time
from cluster.fleet import FleetConfig
from cluster.start import start_ray
from shards.base.errors import exit_code_of
from shards.base.remote import RemoteStore

def publish():
    start_ray(FleetConfig(num_gpus=0, num_cpus=1))
    store = RemoteStore("memory://latents")
    store.fs.cat_file = lambda *_, **__: [print("publishing", flush=True), time.sleep(600)]
    store.read("x")

raise SystemExit(exit_code_of(publish))
"""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "publishing\n"
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 75
    assert "error: Stopped by a signal. Committed work is kept; run the same command again to continue." in said


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_stop_signal_while_ray_starts(
    address: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_: sys.exit(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        start_ray(CONFIG)
    assert ended.value.code == 75 and "error: Stopped by a signal." in capsys.readouterr().err


def test_ray_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore.")  # as Ray does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(WorkError, match=r"did not start on this machine: The current node timed out during startup\."):
        start_ray(CONFIG)


def fleet(function: Function[str, int], keys: str) -> Fleet[str, int]:
    return Fleet(CONFIG, function, ((key, key) for key in keys), AT_ONCE)


def test_a_worker_runs_several_units_and_loses_them_together(one_slot: None, tmp_path: Path) -> None:
    def meet(key: str, number: int, report: object) -> int:
        """Three of them meet in one process. Then one ends the process, once, and one raises, once."""
        import cluster.retry as shared  # any module's namespace is shared by the process

        lock = shared.__dict__.setdefault("_barrier", threading.Barrier(3))
        if number == 1:
            lock.wait(100)
        if key == "c" and number == 1:
            os._exit(1)
        time.sleep(0.5)  # the others are lost with it
        if key == "b" and number == 2:
            raise ValueError("b fails")
        return os.getpid()

    events = list(fleet(meet, "abc"))
    failed = [event for event in events if isinstance(event, Failed)]
    assert sorted(event.key for event in failed if event.failure.is_lost) == ["a", "b", "c"]
    assert all(event.which == "an attempt was lost (1 of 10)" for event in failed if event.failure.is_lost)
    (raised,) = (event for event in failed if not event.failure.is_lost)
    assert (raised.key, raised.which, raised.failure.line) == ("b", "attempt 1 of 3 failed", "ValueError: b fails")
    done = [event for event in events if isinstance(event, Done)]
    assert sorted(event.key for event in done) == ["a", "b", "c"] and len({event.result for event in done}) == 1
    assert raised.node == done[0].node and raised.node is not None
    log = Path(raised.log).read_text()
    for page in ("docs/reference/metrics.md", "docs/how-to/incidents.md"):
        assert "grep '^00042: attempt 2 ' LOG" in Path(page).read_text()
    found = subprocess.run(["grep", "^b: attempt 2 ", raised.log], capture_output=True, text=True, check=True).stdout
    second = [line.removeprefix("b: attempt 2 ") for line in found.splitlines()]
    assert second[:3] == ["begins", "failed: ValueError: b fails", "Traceback (most recent call last):"]
    assert second[-1] == "ValueError: b fails" and "b: attempt 3 is done" in log.splitlines()


def test_a_worker_that_cannot_start_costs_no_attempt(one_slot: None, tmp_path: Path) -> None:
    """Its process ends while it unpickles the function, once."""
    tried = tmp_path / "tried"

    def hand_over() -> Function[str, int]:
        if not tried.exists():
            tried.touch()
            os._exit(1)
        return lambda key, number, report: number

    class Fatal:
        def __reduce__(self) -> tuple[object, ...]:
            return hand_over, ()

    function: Any = Fatal()
    events = list(Fleet(CONFIG, function, [("a", "a")], AT_ONCE))
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.which == "an outage, which does not count as an attempt" and failed.again
    assert str(failed.failure.outage).startswith("a worker could not start: ActorDiedError: ")
    assert [event.result for event in events if isinstance(event, Done)] == [1]


def test_on_a_stop_signal_attempts_end_at_their_next_report_and_clean_up(one_slot: None, tmp_path: Path) -> None:
    place = str(tmp_path)

    def work(key: str, number: int, report: object) -> int:
        mine = Path(place) / key
        mine.touch()
        try:
            while True:
                time.sleep(0.02)
                report(1)  # type: ignore[operator]
        finally:
            mine.rename(mine.with_suffix(".left"))

    events = []
    for event in fleet(work, "abcd"):
        events.append(event)
        if isinstance(event, UnderWay) and len(list(tmp_path.iterdir())) == AT_ONCE:
            os.kill(os.getpid(), signal.SIGTERM)
    assert not [event for event in events if isinstance(event, Done | Failed)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.left", "b.left", "c.left"]
