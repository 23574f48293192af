"""Loader workers deliver batches in order, and neither their deaths nor the trainer's leave anything hanging."""

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch

from shards.base.errors import WorkError
from train.data.batch import Batch
from train.data.workers import LoaderWorkers, LoadFailure

STUCK, LOST, EXITS = 1000, 1001, 2000


class Fake:
    """Batches whose only column holds the step and the process id of the worker."""

    connected = False

    def load(self, step: int) -> Batch | LoadFailure:
        assert self.connected
        if step == STUCK:
            time.sleep(3600)
        if step == LOST:
            return LoadFailure("the file is gone")
        if step >= EXITS:
            os._exit(step - EXITS)
        return Batch([str(step)], torch.zeros(1), {"size": torch.tensor([step, os.getpid()]).share_memory_()})

    def reconnect(self) -> None:
        """Called in the worker, which inherits pytest's fault handler. Writing a stack trace may crash in a fork."""
        faulthandler.disable()
        self.connected = True


class Locking(Fake):
    """Batches whose loading takes a lock. The worker of step 1 is killed while it holds the lock."""

    def __init__(self) -> None:
        self.lock, self.is_taken = multiprocessing.Lock(), multiprocessing.Event()

    def load(self, step: int) -> Batch | LoadFailure:
        if step == 0:
            self.is_taken.wait()
        with self.lock:
            self.is_taken.set()
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@contextmanager
def workers(num: int, ahead: int = 2, first: int = 0, batches: Fake | None = None) -> Iterator[LoaderWorkers]:
    started = LoaderWorkers(batches or Fake(), num, ahead, first)
    try:
        yield started
    finally:
        started.kill()


def read(started: LoaderWorkers, step: int, timeout: float = 60.0) -> list[int]:
    batch = started.get(step, timeout)
    assert isinstance(batch, Batch) and batch.keys == [str(step)] and batch.columns["size"].is_shared()
    return batch.columns["size"].tolist()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until_ended(pids: set[int]) -> bool:
    deadline = time.monotonic() + 30
    while not (ended := all(map(has_ended, pids))) and time.monotonic() < deadline:
        time.sleep(0.02)
        multiprocessing.active_children()  # reaps them
    return ended


@pytest.mark.parametrize("code", [0, 7])
def test_a_workers_exit_code_is_reported(code: int) -> None:
    message = rf"A loader worker exited unexpectedly with code {code}\."
    with workers(1, 1, first=EXITS + code) as started, pytest.raises(WorkError, match=message):
        read(started, EXITS + code)


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("ahead", [1, 4])
def test_batches_arrive_in_order_each_worker_in_turn(num: int, ahead: int) -> None:
    with workers(num, ahead, first=5) as started:
        found = [read(started, step) for step in range(5, 25)]
    assert [step for step, _ in found] == list(range(5, 25))
    assert [pid for _, pid in found] == [pid for _, pid in found[:num]] * (20 // num) + [
        pid for _, pid in found[: 20 % num]
    ]
    assert wait_until_ended({pid for _, pid in found})


def test_a_failure_is_delivered_in_place_of_its_batch() -> None:
    with workers(2, first=LOST - 1) as started:
        with pytest.raises(WorkError, match=r"No batch arrived within 0\.1 s\."):
            started.get(STUCK, 0.1)
        assert started.get(LOST, 60) == "the file is gone"


@pytest.mark.parametrize(("killer", "cause"), [("SIGKILL", "run out of memory"), ("SIGBUS", "/dev/shm")])
def test_a_killed_worker_is_reported_with_a_cause(killer: str, cause: str) -> None:
    with workers(1) as started:
        _, pid = read(started, 0)
        os.kill(pid, getattr(signal, killer))
        with pytest.raises(WorkError, match=f"A loader worker was killed by {killer}.*{cause}"):
            for step in range(1, 10):
                read(started, step)


def test_a_worker_killed_with_a_lock_is_reported_while_another_waits_for_the_lock() -> None:
    with (
        workers(2, batches=Locking()) as started,
        pytest.raises(WorkError, match="A loader worker was killed by SIGKILL"),
    ):
        read(started, 0, timeout=20)


def test_stopped_workers_are_killed_at_once() -> None:
    with workers(2) as started:
        pids = {read(started, step)[1] for step in range(2)}
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    assert wait_until_ended(pids)


def start_and_hang(report: Connection) -> None:
    with workers(3) as started:
        report.send({read(started, step)[1] for step in range(3)})
        time.sleep(3600)


def test_workers_end_with_the_trainer() -> None:
    here, there = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("fork").Process(target=start_and_hang, args=(there,))
    trainer.start()
    assert here.poll(60)
    pids = here.recv()
    trainer.kill()
    trainer.join()
    assert wait_until_ended(pids)


def test_interrupts_do_not_reach_the_workers() -> None:
    """Ctrl-C and a scheduler's SIGTERM go to every process, but the trainer still needs batches until it has saved."""
    with workers(1) as started:
        _, pid = read(started, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
        assert [read(started, step)[1] for step in range(1, 10)] == [pid] * 9
