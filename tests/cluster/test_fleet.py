"""The fleet, over a cluster that the test plays: who is tried again, where, and what an end leaves."""

import os
import signal

import pytest

from cluster.fleet import Done, Failed, News, UnderWay
from tests.cluster.played import Cluster, Outcome, error, make_fleet, told


def test_each_unit_is_done_or_given_up_and_none_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(key: str, number: int, node: str) -> Outcome:
        return {"x": error(), "y": error(final=True), "z": error(lost=number < 3) if number < 4 else "Z"}.get(key, "ok")

    cluster = Cluster(play)
    fleet = make_fleet(monkeypatch, cluster, "pxyzq", attempts=2, lost_attempts=3)
    events = [event for event in told(iter(fleet)) if not isinstance(event, News)]
    assert [event.key for event in events if isinstance(event, Done)] == ["p", "q", "z"]
    failed = [(event.key, event.which, event.again) for event in events if isinstance(event, Failed)]
    assert failed == [
        ("x", "attempt 1 of 2 failed", True),
        ("y", "attempt 1 of 2 failed", False),  # another would find the same
        ("z", "an attempt was lost (1 of 3)", True),
        ("x", "attempt 2 of 2 failed", False),
        ("z", "an attempt was lost (2 of 3)", True),
        ("z", "attempt 1 of 2 failed", True),
    ]


def test_a_unit_goes_to_another_node_and_a_bad_node_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(lambda key, number, node: error() if node == "a" else "ok")
    events = told(iter(make_fleet(monkeypatch, cluster, "pqr", node_failures=2, max_in_flight=1)))
    assert [event.text for event in events if isinstance(event, News)] == [
        "node a failed 2 attempts in a row, and is avoided"
    ]
    first, second, third = [a for a in cluster.attempts if a[1] == 1]
    assert (first[2], second[2], third[2]) == ([], [], ["a"])
    assert [a for a in cluster.attempts if a[1] == 2] == [("p", 2, ["a"]), ("q", 2, ["a"])]
    assert sorted(event.key for event in events if isinstance(event, Done)) == ["p", "q", "r"]


def test_an_attempt_whose_every_node_is_gone_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(key: str, number: int, node: str) -> Outcome | None:
        if number == 1:
            return error()
        if "b" in cluster.nodes and len(cluster.attempts) == 2:
            del cluster.nodes["b"]  # the second attempt may go nowhere else
        return "ok" if len(cluster.attempts) == 3 else None

    cluster = Cluster(play)
    fleet = make_fleet(monkeypatch, cluster, "p")
    done = [event for event in fleet if isinstance(event, Done)]
    assert [event.key for event in done] == ["p"]
    assert cluster.attempts == [("p", 1, []), ("p", 2, ["a"]), ("p", 2, [])] and cluster.cancelled == {1}


def test_no_more_are_under_way_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(lambda key, number, node: "ok")
    under_way = [event for event in make_fleet(monkeypatch, cluster, "pqrs", max_in_flight=2)]
    counts = [(event.attempts, event.reported) for event in under_way if isinstance(event, UnderWay)]
    assert max(counts) == (1, 10)  # of two that were started, one had ended


def test_told_to_leave_it_keeps_what_was_through(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(lambda key, number, node: "ok" if told_to_leave and key == "p" else None)
    told_to_leave = False
    done = []
    for event in make_fleet(monkeypatch, cluster, "pqr", max_in_flight=2):
        if isinstance(event, UnderWay):
            os.kill(os.getpid(), signal.SIGTERM)
            told_to_leave = True
        elif isinstance(event, Done):
            done.append(event.key)
    assert done == ["p"] and [key for key, _, _ in cluster.attempts] == ["p", "q"]
    assert signal.getsignal(signal.SIGTERM) == before
