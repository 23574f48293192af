"""When and where a unit of work is retried, and how long a fleet waits for a node that can take a worker."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.nodes import NodeWatch, Resources, ResourcesConfig, describe, places
from cluster.retry import AVOID_SECONDS, NodeHealth, RetryConfig, Unit, UnitQueue, backoff
from shards.base.errors import WorkError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_errors_and_losses_have_separate_limits() -> None:
    config = RetryConfig(attempts=2, lost_attempts=3)
    unit = Unit("00000", None)
    assert unit.record_failure(True, "a", config) and not unit.runs_alone
    assert unit.record_failure(True, "b", config) and unit.runs_alone
    assert unit.describe_failure(True, config) == "an attempt was lost (2 of 3 allowed)"
    assert unit.record_failure(False, "a", config)
    assert unit.describe_failure(False, config) == "attempt 1 of 2 failed"
    assert unit.attempt == 4 and unit.failed_on == "a"
    assert not unit.record_failure(False, "a", config)
    assert not Unit("00000", None, lost=2).record_failure(True, "a", config)


def test_a_unit_waits_for_another_node_but_not_forever(clock: list[float]) -> None:
    """The other nodes may belong to another job."""
    unit = Unit("00000", None)
    for node in ("a", "b"):
        unit.record_failure(False, node, RetryConfig())
        clock[0] += 10_000  # new units came first
        assert unit.avoided_node() == node
        clock[0] += AVOID_SECONDS - 1
        assert unit.avoided_node() == node
        clock[0] += 2
        assert unit.avoided_node() is None


def test_the_backoff_doubles_up_to_five_minutes() -> None:
    assert [backoff(n, 5) for n in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert backoff(3, 0) == 0 and backoff(5000, 5.0) == 300  # an outage of several days


def take(queue: UnitQueue[Any], limit: int) -> list[str]:
    """Start all units that are due."""
    units = queue.due(limit)
    for unit in units:
        queue.remove(unit)
    return [unit.key for unit in units]


def test_failed_units_start_up_to_the_limit_and_after_their_backoff(clock: list[float]) -> None:
    queue: UnitQueue[None] = UnitQueue([])
    for i in range(6):
        queue.put_back(Unit(str(i), None, not_before=1000 + 10 * (i % 2)))
    assert [unit.key for unit in queue.due(2)] == ["0", "2"] == take(queue, 2)
    assert take(queue, 0) == [] == take(queue, -5)
    assert take(queue, 9) == ["4"]
    assert queue.seconds_until_due() == 10
    clock[0] = 1010
    assert queue.seconds_until_due() == 0
    queue.move_to_end(["3"])
    assert take(queue, 9) == ["1", "5", "3"] and not queue


def test_new_units_come_first_and_are_read_as_needed(clock: list[float]) -> None:
    read: list[str] = []

    def units() -> Iterator[tuple[str, int]]:
        for i in range(3):
            read.append(str(i))
            yield str(i), i

    queue = UnitQueue(units())
    queue.put_back(Unit("failed", 9, errors=1))
    assert take(queue, 0) == [] and read == []
    assert [(unit.key, unit.work) for unit in queue.due(2)] == [("0", 0), ("1", 1)] and read == ["0", "1"]
    assert take(queue, 2) == ["0", "1"] and read == ["0", "1"]
    assert take(queue, 2) == ["2", "failed"] and not queue


def test_a_node_that_keeps_failing_is_avoided_while_there_are_others(clock: list[float]) -> None:
    health, new = NodeHealth(node_failures=3), None
    assert [health.record_failure("bad") for _ in range(3)] == [False, False, True]
    assert health.avoid(new, ["bad", "good"]) == {"bad"}
    assert health.avoid(new, ["bad"]) == frozenset() == health.avoid(new, [])
    clock[0] += 601  # the suspension is over
    assert health.avoid(new, ["bad", "good"]) == frozenset()
    assert health.record_failure("bad") and health.avoid(new, ["bad", "good"]) == {"bad"}
    health.record_success("bad")  # of an attempt that was running
    assert health.avoid(new, ["bad", "good"]) == frozenset() and not health.record_failure("bad")
    assert not health.record_failure(None)


def test_a_unit_is_retried_on_another_node() -> None:
    health = NodeHealth(node_failures=1)
    assert health.avoid("a", ["a", "b"]) == {"a"}
    health.record_failure("b")
    assert health.avoid("a", ["a", "b", "c"]) == {"a", "b"}
    assert health.avoid("a", ["a", "b"]) == {"b"}  # rather where it failed once than where everything fails


def test_resources_for_people() -> None:
    needs = ResourcesConfig(num_gpus=1, num_cpus=8, resources={"encoder": 0.5}).needs
    assert describe(needs) == "1 GPU, 8 CPUs and 0.5 encoder"
    assert places({"GPU": 8, "CPU": 64}, needs) == {"GPU": 8, "CPU": 8, "encoder": 0}
    assert places({"GPU": 1, "CPU": 8, "encoder": 1}, needs) == {"GPU": 1, "CPU": 1, "encoder": 2}


def test_a_fleet_that_no_node_can_take_says_so_and_gives_up(clock: list[float]) -> None:
    alive: dict[str, Resources] = {"a": {"CPU": 2.0}}
    watch = NodeWatch(ResourcesConfig(num_gpus=1, num_cpus=1, wait_for_resources=100))
    assert watch.is_due and watch.look(alive) == (
        "No node in the cluster can take a worker that needs 1 GPU and 1 CPU (live nodes: 0 GPUs and 2 CPUs). "
        "Waiting up to 100 s for such a node to join."
    )
    assert not watch.is_due
    clock[0] += 3
    assert watch.is_due and watch.look(alive) is None
    clock[0] += 30
    assert "up to 67 s" in str(watch.look(alive))
    alive["late"] = {"CPU": 8.0, "GPU": 1.0}
    clock[0] += 3
    assert watch.look(alive) is None and watch.able == {"late"}
    del alive["late"]
    clock[0] += 3
    assert "up to 97 s" in str(watch.look(alive))
    clock[0] += 101
    with pytest.raises(WorkError, match=r"no such node joined within 100 s \(workers.wait_for_resources\)"):
        watch.look(alive)
