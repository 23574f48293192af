"""Everything of the gate that needs Ray, in one session: workers, failed starts, stop signals, and a job."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.actor import Function
from cluster.fleet import Done, Failed, Fleet, FleetConfig, UnderWay
from cluster.nodes import ResourcesConfig
from cluster.pool import WorkerPool
from cluster.start import precision_on_worker, start_ray
from shards.base import device
from shards.base.errors import WorkError
from tests.runs import environment, wait_until

pytestmark = pytest.mark.heavy

AT_ONCE = 3
SLOT = {"slot": 1.0}
"""Resource of which the session has one, so that only one worker fits."""
CONFIG = FleetConfig(num_gpus=0, num_cpus=1, resources=SLOT, backoff=0)
SLEEPER = """
import atexit, os, signal, sys, time

from cluster.fleet import FleetConfig
from cluster.start import start_ray
from shards.base.errors import exit_code_of
from shards.base.remote import RemoteStore

def leave():  # just before Ray's exit handler
    os.kill(os.getpid(), signal.SIGTERM)
    print("the exit handlers continue", file=sys.stderr, flush=True)

def publish():
    atexit.register(leave)
    start_ray(FleetConfig(num_gpus=0, num_cpus=1))
    same = signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGUSR1)
    store = RemoteStore("memory://latents")

    def wait(*_, **__):
        # In short steps, as in fsspec, because a signal that arrives just before a sleep does not interrupt it.
        print("publishing", same, flush=True)
        while True:
            time.sleep(0.1)

    store.fs.cat_file = wait
    store.read("x")

raise SystemExit(exit_code_of(publish))
"""


@pytest.fixture(scope="module")
def session() -> Iterator[str]:
    """Ray on this machine, with a GPU by Ray's bookkeeping alone. Yields its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        init = ray.init
        resources: dict[str, Any] = {"num_cpus": 4, "num_gpus": 1, "resources": SLOT}
        patch.setattr("ray.init", lambda *args, **options: init(*args, **(options | resources)))
        start_ray(CONFIG)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def fleet(function: Function[str, Any], keys: str) -> Fleet[str, Any]:
    return Fleet(CONFIG, function, ((key, key) for key in keys), AT_ONCE)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not yet waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_pool_keeps_its_workers_for_the_next_job(session: str) -> None:
    def first(key: str, number: int, report: object) -> tuple[str, int]:
        return key, os.getpid()

    def second(key: str, number: int, report: object) -> tuple[str, int]:
        return key.upper(), os.getpid()

    pool = WorkerPool[str, Any](CONFIG)
    results = [
        [event.result for event in Fleet(CONFIG, function, [("a", "a")], pool=pool) if isinstance(event, Done)]
        for function in (first, second)
    ]
    pool.drain()
    ((one, pid),), ((two, same),) = results
    assert (one, two, pid) == ("a", "A", same) and not pool.workers
    wait_until(lambda: has_ended(pid))


def test_a_worker_runs_several_units_and_loses_them_together(session: str) -> None:
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
    assert all(event.which == "an attempt was lost (1 of 10 allowed)" for event in failed if event.failure.is_lost)
    (raised,) = (event for event in failed if not event.failure.is_lost)
    assert (raised.key, raised.which, raised.failure.line) == ("b", "attempt 1 of 3 failed", "ValueError: b fails")
    done = [event for event in events if isinstance(event, Done)]
    assert sorted(event.key for event in done) == ["a", "b", "c"] and len({event.result for event in done}) == 1
    assert {event.node for event in failed} == {done[0].node} and raised.node is not None
    (log_of_lost,) = {event.log for event in failed if event.failure.is_lost}
    assert "a: attempt 1 begins" in Path(log_of_lost).read_text().splitlines()
    log = Path(raised.log).read_text()
    for page in ("docs/reference/metrics.md", "docs/how-to/incidents.md"):
        assert "grep '^00042: attempt 2 ' LOG" in Path(page).read_text()
    found = subprocess.run(["grep", "^b: attempt 2 ", raised.log], capture_output=True, text=True, check=True).stdout
    second = [line.removeprefix("b: attempt 2 ") for line in found.splitlines()]
    assert second[:3] == ["begins", "failed: ValueError: b fails", "Traceback (most recent call last):"]
    assert second[-1] == "ValueError: b fails" and "b: attempt 3 is done" in log.splitlines()


def test_a_worker_that_cannot_start_costs_no_attempt(
    session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends while it unpickles the function, once."""
    monkeypatch.setattr("cluster.breaker.FIRST_PAUSE_SECONDS", 0.1)
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
    events = list(fleet(function, "a"))
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.which == "an attempt failed because of an outage and is not counted" and failed.again
    assert str(failed.failure.outage).startswith("a worker could not start: ActorDiedError: ")
    assert [event.result for event in events if isinstance(event, Done)] == [1]


def test_on_a_stop_signal_attempts_end_at_their_next_report_and_clean_up(session: str, tmp_path: Path) -> None:
    place = str(tmp_path)

    def work(key: str, number: int, report: object) -> None:
        mine = Path(place) / key
        mine.touch()
        try:
            for _ in range(3000):  # a minute, after which the test fails
                time.sleep(0.02)
                report(1)  # type: ignore[operator]
        finally:
            mine.rename(mine.with_suffix(".left"))

    events = []
    for event in fleet(work, "abcd"):
        events.append(event)
        if isinstance(event, UnderWay) and event.reported == AT_ONCE:
            os.kill(os.getpid(), signal.SIGTERM)
    assert not [event for event in events if isinstance(event, Done | Failed)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.left", "b.left", "c.left"]


def test_two_workers_are_on_one_gpu_at_once(session: str, tmp_path: Path) -> None:
    """Each worker waits at its first unit for the other one. If they ran one after the other, the first would fail."""
    place = str(tmp_path)

    def work(key: str, number: int, report: object) -> tuple[int, list[int], int]:
        (Path(place) / str(os.getpid())).touch()
        end = time.monotonic() + 240
        while (there := len(list(Path(place).iterdir()))) < 2:
            assert time.monotonic() < end, "the other worker did not come"
            time.sleep(0.05)
        return os.getpid(), ray.get_gpu_ids(), there

    half = FleetConfig(num_gpus=0.5, num_cpus=1, attempts=1)
    done = [event for event in Fleet(half, work, zip("abcd", "abcd", strict=True)) if isinstance(event, Done)]
    assert sorted(event.key for event in done) == ["a", "b", "c", "d"]
    assert len({event.result[0] for event in done}) == 2, "a third worker was on the GPU, or there was one"
    assert {(tuple(event.result[1]), event.result[2]) for event in done} == {((0,), 2)}


def test_on_a_cluster_a_worker_decides_the_precision(
    session: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver's own CPU is irrelevant, and a trial on it would fail the test."""
    monkeypatch.setenv("RAY_ADDRESS", session)
    with monkeypatch.context() as patch:
        patch.setattr(device, "cpu_slowdown", lambda precision: pytest.fail("a trial on the driver"))
        workers = ResourcesConfig(num_gpus=0, num_cpus=1)
        assert precision_on_worker("auto", workers) in ("float32", "bfloat16")
        assert precision_on_worker("float16", workers) == "float16"
    said = capsys.readouterr().err
    assert "precision: auto selects " in said
    is_emulated = device.cpu_slowdown("float16") >= device.WARN_SLOWDOWN
    assert ("warning: this CPU emulates float16" in said) == is_emulated


def test_a_stop_signal_before_or_after_the_fleet_handles_it(session: str) -> None:
    """On SIGTERM Ray ends a process with code 15 and no message, but schedulers requeue on code 75. A second signal
    does not interrupt the exit handlers."""
    joins = environment(RAY_ADDRESS=session, RAY_AUTH_MODE=os.environ.get("RAY_AUTH_MODE", "token"))
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], env=joins, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "publishing True\n"
            process.terminate()
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 75
    assert (
        said.count("error: Stopped by a signal. Committed work is kept. Run the same command again to continue.") == 1
    )
    assert "the exit handlers continue" in said


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
