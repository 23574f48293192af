"""Where and when a shard is tried again, and how long a job waits for a node that can take it: without Ray."""

from collections import deque
from typing import Any

import pytest

from precompute.cluster.attempts import Attempts, Nodes, backoff
from precompute.cluster.job import take_due
from precompute.cluster.nodes import Watch, describe, missing, needs
from precompute.config import WorkersConfig
from precompute.input.tars import InputShard
from shards.base.errors import WorkError

SHARD = InputShard("00000", "/tars/00000.tar")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_errors_and_losses_have_bounds_of_their_own() -> None:
    workers = WorkersConfig(attempts=2, lost_attempts=3)
    attempts = Attempts(SHARD)
    assert attempts.fail(True, "a", workers) and attempts.fail(True, "b", workers)
    assert attempts.last(True, workers) == "an attempt was lost (2 of 3)"
    assert attempts.fail(False, "a", workers) and attempts.last(False, workers) == "attempt 1 of 2 failed"
    assert attempts.number == 4 and attempts.failed_on == "a"
    assert not attempts.fail(False, "a", workers)
    assert not Attempts(SHARD, lost=2).fail(True, "a", workers)


def test_the_wait_doubles_up_to_five_minutes() -> None:
    assert [backoff(n, 5) for n in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert backoff(3, 0) == 0


def test_only_so_many_start_and_none_before_its_time(clock: list[float]) -> None:
    waiting = deque(Attempts(InputShard(str(i), ""), not_before=1000 + 10 * (i % 2)) for i in range(6))
    assert [a.shard.name for a in take_due(waiting, 2)] == ["0", "2"]
    assert list(take_due(waiting, 0)) == []
    assert [a.shard.name for a in take_due(waiting, 9)] == ["4"]
    clock[0] = 1010
    assert [a.shard.name for a in take_due(waiting, 9)] == ["1", "3", "5"] and not waiting


def test_a_node_that_fails_again_and_again_is_avoided_while_there_are_others(clock: list[float]) -> None:
    nodes, fresh = Nodes(WorkersConfig(node_failures=3)), Attempts(SHARD)
    assert [nodes.failed("bad") for _ in range(3)] == [False, False, True]
    assert nodes.avoid(fresh, ["bad", "good"]) == ["bad"]
    assert nodes.avoid(fresh, ["bad"]) == [] == nodes.avoid(fresh, [])
    clock[0] += 601  # parole
    assert nodes.avoid(fresh, ["bad", "good"]) == []
    assert nodes.failed("bad") and nodes.avoid(fresh, ["bad", "good"]) == ["bad"]
    nodes.succeeded("bad")  # an attempt that was under way
    assert nodes.avoid(fresh, ["bad", "good"]) == [] and not nodes.failed("bad")
    assert not nodes.failed(None)


def test_a_shard_is_tried_on_another_node_than_where_it_failed() -> None:
    nodes = Nodes(WorkersConfig(node_failures=1))
    attempts = Attempts(SHARD, errors=1, failed_on="a")
    assert nodes.avoid(attempts, ["a", "b"]) == ["a"]
    nodes.failed("b")
    assert nodes.avoid(attempts, ["a", "b", "c"]) == ["a", "b"]
    assert nodes.avoid(attempts, ["a", "b"]) == ["b"]  # rather where it failed once than where all fails


def test_resources_for_people() -> None:
    workers = WorkersConfig(num_gpus=1, num_cpus=8, resources={"encoder": 0.5})
    assert describe(needs(workers)) == "1 GPUs, 8 CPUs and 0.5 encoder"
    assert missing({"GPU": 8, "CPU": 64}, workers) and not missing({"GPU": 1, "CPU": 8, "encoder": 1}, workers)


def test_a_job_that_no_node_can_take_says_so_and_gives_up(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    alive: list[dict[str, Any]] = [{"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0}}]
    alive.append({"NodeID": "gone", "Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    monkeypatch.setattr("ray.nodes", lambda: alive)
    watch = Watch(WorkersConfig(num_gpus=1, num_cpus=1, wait_for_resources=100))
    assert watch.look() == (
        "No node of the cluster can take a worker of 1 GPUs and 1 CPUs (alive: 0 GPUs and 2 CPUs): waiting for one to "
        "join, for 100 s more"
    )
    clock[0] += 3
    assert watch.look() is None
    clock[0] += 30
    assert "for 67 s more" in str(watch.look())
    alive.append({"NodeID": "late", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}})
    clock[0] += 3
    assert watch.look() is None and watch.able == {"late"}
    alive.pop()
    clock[0] += 3
    assert "for 97 s more" in str(watch.look())
    clock[0] += 101
    with pytest.raises(WorkError, match=r"none joined within 100 s \(workers.wait_for_resources\)"):
        watch.look()
