"""The fleet on a scripted pool: retries, their nodes, and what remains after a stop signal."""

import os
import signal

import pytest

from cluster.fleet import Done, Failed, News, UnderWay
from cluster.pool import Failure
from shards.base.errors import Outage
from shards.base.stop import StopSignal
from tests.cluster.played import Clock, Outcome, PlayedPool, TimedPool, error, make_fleet, without_state

pytestmark = pytest.mark.usefixtures("clock")


def test_each_unit_is_done_or_given_up_and_none_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(key: str, number: int, node: str) -> Outcome:
        return {"x": error(), "y": error(final=True), "z": error(lost=number < 3) if number < 4 else "Z"}.get(key, "ok")

    fleet = make_fleet(monkeypatch, PlayedPool(play), "pxyzq", attempts=2, lost_attempts=3)
    events = [event for event in without_state(fleet) if not isinstance(event, News)]
    assert sorted(event.key for event in events if isinstance(event, Done)) == ["p", "q", "z"]
    failed = [(event.key, event.which, event.again) for event in events if isinstance(event, Failed)]
    assert sorted(failed, key=lambda failure: failure[0]) == [
        ("x", "attempt 1 of 2 failed", True),
        ("x", "attempt 2 of 2 failed", False),
        ("y", "attempt 1 of 2 failed", False),  # a retry would fail in the same way
        ("z", "an attempt was lost (1 of 3 allowed)", True),
        ("z", "an attempt was lost (2 of 3 allowed)", True),
        ("z", "attempt 1 of 2 failed", True),
    ]


def test_a_unit_goes_to_another_node_and_a_bad_node_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PlayedPool(lambda key, number, node: error() if node == "a" else "ok")
    events = without_state(make_fleet(monkeypatch, pool, "pqr", node_failures=2, max_in_flight=1))
    assert [event.text for event in events if isinstance(event, News)] == [
        "2 attempts in a row failed on node a, so the job will prefer other nodes for ten minutes"
    ]
    assert pool.begun == [("p", 1, "a"), ("q", 1, "a"), ("r", 1, "b"), ("p", 2, "b"), ("q", 2, "b")]
    assert sorted(event.key for event in events if isinstance(event, Done)) == ["p", "q", "r"]


def test_a_unit_goes_back_to_its_node_when_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(key: str, number: int, node: str) -> Outcome:
        pool.nodes.pop("b", None)  # the second attempt may go nowhere else
        return error() if number == 1 else "ok"

    pool = PlayedPool(play)
    done = [event for event in make_fleet(monkeypatch, pool, "p", max_in_flight=1) if isinstance(event, Done)]
    assert [event.key for event in done] == ["p"] and pool.begun == [("p", 1, "a"), ("p", 2, "a")]


def test_a_stop_signal_before_the_fleet_runs_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher runs several fleets, and receives the signal between two of them."""
    pool = PlayedPool(lambda key, number, node: "ok")
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received and without_state(make_fleet(monkeypatch, pool, "pq")) == []
    with StopSignal() as later:
        assert not later.received
    assert pool.begun == []


def test_no_more_are_in_flight_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PlayedPool(lambda key, number, node: "ok")
    events = list(make_fleet(monkeypatch, pool, "pqrs", max_in_flight=2))
    assert max(event.attempts for event in events if isinstance(event, UnderWay)) == 2
    assert max(event.reported for event in events if isinstance(event, UnderWay)) == 10  # of two, one had ended


def test_during_a_pause_nothing_starts_but_one_probe(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that were waiting for a worker when the outage began wait for its end, too."""
    slow_down = Failure(False, False, "503", "503", outage=Outage("503"))
    pool = TimedPool(clock, {"a": 2}, lambda key, node, now: (1, slow_down) if now < 1030 else (1, "ok"))
    events = without_state(make_fleet(monkeypatch, pool, "pqrstuvw", backoff=1))
    assert sorted(event.key for event in events if isinstance(event, Done)) == sorted("pqrstuvw")
    failed = [event for event in events if isinstance(event, Failed)]
    assert len(failed) == 2 + 2  # two were running when the job paused; probes after 5 and 10 s failed


def test_after_a_stop_signal_finished_attempts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    pool = PlayedPool(lambda key, number, node: "ok" if is_stopped and key == "p" else None)
    is_stopped = False
    done = []
    for event in make_fleet(monkeypatch, pool, "pqr", max_in_flight=2):
        if isinstance(event, UnderWay) and len(pool.running) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            is_stopped = True
        elif isinstance(event, Done):
            done.append(event.key)
    assert done == ["p"] and [key for key, _, _ in pool.begun] == ["p", "q"]
    assert signal.getsignal(signal.SIGTERM) == before
