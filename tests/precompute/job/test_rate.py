"""The rate and the time left while workers come and go, on a simulated clock."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.fleet import Done, UnderWay
from precompute.job.ledger import WINDOW_SECONDS, Ledger, RecentRate
from tests.cluster.played import Clock

SPEED, SIZE = 500.0, 9000
"""Samples/s of a worker, and samples of a tar: one takes 18 s."""


class Job:
    """Tars in progress side by side, and their reports to the ledger."""

    def __init__(self, clock: Clock, total: int):
        self.clock, self.ledger = clock, Ledger(total)
        self.names = itertools.count()
        self.at_work: list[float] = []
        """Samples that each worker has read from its tar."""

    def second(self, workers: int) -> None:
        self.clock.sleep(1)
        self.at_work = (self.at_work + workers * [0.0])[:workers]
        for i in range(workers):
            self.at_work[i] += SPEED
            if self.at_work[i] >= SIZE:
                self.at_work[i] = 0.0
                self.ledger.record(Done(f"{next(self.names):05d}", "a", books()))
        self.ledger.record(UnderWay(workers, int(sum(self.at_work))))

    def left(self, workers: int) -> float:
        ledger = self.ledger
        return (SIZE * (ledger.total - ledger.done) - sum(self.at_work)) / (SPEED * workers)


def books() -> Any:
    seconds = {"total": SIZE / SPEED}
    return SimpleNamespace(
        samples_in=SIZE,
        encoded=SIZE,
        rejected={},
        parts={"256x256": SimpleNamespace(started="", seconds=seconds, token="")},
    )


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1)])
def test_the_time_left_follows_the_workers_within_two_minutes(
    monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    job = Job(Clock(monkeypatch), total=1000)
    monkeypatch.setattr(Ledger, "_show", lambda self: None)
    for _ in range(600):
        job.second(before)
    for _ in range(120):
        job.second(after)
    seconds = job.ledger.figures()["eta_seconds"]
    print(f"{before} → {after} workers, two minutes after: {seconds:.0f} s said, {job.left(after):.0f} s left")
    assert seconds is not None and abs(seconds - job.left(after)) < 0.2 * job.left(after)
    rate = job.ledger.figures()["images_per_second"]
    assert rate is not None and abs(rate - after * SPEED) < 0.05 * after * SPEED


def test_a_rate_looks_back_so_far_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rate = RecentRate()
    assert rate.per_second == 0
    for count in range(1000):
        clock.sleep(0.25)
        rate.add(4 * count)
    assert rate.per_second == pytest.approx(16)
    assert WINDOW_SECONDS <= len(rate.points) <= WINDOW_SECONDS + 2  # one point per second
    for _ in range(2 * int(WINDOW_SECONDS)):
        clock.sleep(1)
        rate.add(4000)
    assert rate.per_second == 0
    rate.add(0)
    clock.sleep(1)
    rate.add(0)  # an attempt was lost
    assert rate.per_second == 0


def test_nothing_is_said_of_the_time_left_where_nothing_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def eta(done: int, mean: int, under_way: int, rate: float) -> Any:
        ledger = Ledger(10)
        ledger.done, ledger.samples_in, ledger.under_way = done, done * mean, UnderWay(1, under_way)
        monkeypatch.setattr(RecentRate, "per_second", rate)
        return ledger.figures()["eta_seconds"]

    assert eta(2, 100, 50, 5) == (8 * 100 - 50) / 5
    assert eta(0, 0, 50, 5) is None and eta(2, 100, 50, 0) is None
    assert eta(10, 100, 0, 0) == 0 and eta(9, 100, 500, 5) == 0
