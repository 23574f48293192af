"""Where and when a unit of work is tried again, and how long a fleet waits for a node that can take it: without Ray."""

from collections.abc import Iterator

import pytest

from cluster.attempts import Attempts, Nodes, Queue, RetryConfig, backoff
from cluster.nodes import Resources, ResourcesConfig, Watch, describe, missing
from shards.base.errors import WorkError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_errors_and_losses_have_bounds_of_their_own() -> None:
    config = RetryConfig(attempts=2, lost_attempts=3)
    attempts = Attempts("00000", None)
    assert attempts.fail(True, "a", config) and attempts.fail(True, "b", config)
    assert attempts.last(True, config) == "an attempt was lost (2 of 3)"
    assert attempts.fail(False, "a", config) and attempts.last(False, config) == "attempt 1 of 2 failed"
    assert attempts.number == 4 and attempts.failed_on == "a"
    assert not attempts.fail(False, "a", config)
    assert not Attempts("00000", None, lost=2).fail(True, "a", config)


def test_the_wait_doubles_up_to_five_minutes() -> None:
    assert [backoff(n, 5) for n in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert backoff(3, 0) == 0


def test_only_so_many_start_and_none_before_its_time(clock: list[float]) -> None:
    queue: Queue[None] = Queue([])
    for i in range(6):
        queue.put_back(Attempts(str(i), None, not_before=1000 + 10 * (i % 2)))
    assert [a.key for a in queue.take_due(2)] == ["0", "2"]
    assert list(queue.take_due(0)) == []
    assert [a.key for a in queue.take_due(9)] == ["4"]
    assert queue.seconds_until_due() == 10
    clock[0] = 1010
    assert queue.seconds_until_due() == 0
    assert [a.key for a in queue.take_due(9)] == ["1", "3", "5"] and not queue


def test_what_was_never_tried_comes_first_and_is_asked_for_as_there_is_room(clock: list[float]) -> None:
    asked: list[str] = []

    def units() -> Iterator[tuple[str, int]]:
        for i in range(3):
            asked.append(str(i))
            yield str(i), i

    queue = Queue(units())
    queue.put_back(Attempts("failed", 9, errors=1))
    assert list(queue.take_due(0)) == [] and asked == []
    assert [(a.key, a.work) for a in queue.take_due(2)] == [("0", 0), ("1", 1)] and asked == ["0", "1"]
    assert [a.key for a in queue.take_due(2)] == ["2", "failed"] and not queue


def test_a_node_that_fails_again_and_again_is_avoided_while_there_are_others(clock: list[float]) -> None:
    nodes, fresh = Nodes(node_failures=3), None
    assert [nodes.failed("bad") for _ in range(3)] == [False, False, True]
    assert nodes.avoid(fresh, ["bad", "good"]) == ["bad"]
    assert nodes.avoid(fresh, ["bad"]) == [] == nodes.avoid(fresh, [])
    clock[0] += 601  # the suspension is over
    assert nodes.avoid(fresh, ["bad", "good"]) == []
    assert nodes.failed("bad") and nodes.avoid(fresh, ["bad", "good"]) == ["bad"]
    nodes.succeeded("bad")  # an attempt that was under way
    assert nodes.avoid(fresh, ["bad", "good"]) == [] and not nodes.failed("bad")
    assert not nodes.failed(None)


def test_a_unit_is_tried_on_another_node_than_where_it_failed() -> None:
    nodes = Nodes(node_failures=1)
    assert nodes.avoid("a", ["a", "b"]) == ["a"]
    nodes.failed("b")
    assert nodes.avoid("a", ["a", "b", "c"]) == ["a", "b"]
    assert nodes.avoid("a", ["a", "b"]) == ["b"]  # rather where it failed once than where all fails


def test_resources_for_people() -> None:
    needs = ResourcesConfig(num_gpus=1, num_cpus=8, resources={"encoder": 0.5}).needs
    assert describe(needs) == "1 GPUs, 8 CPUs and 0.5 encoder"
    assert missing({"GPU": 8, "CPU": 64}, needs) and not missing({"GPU": 1, "CPU": 8, "encoder": 1}, needs)


def test_a_fleet_that_no_node_can_take_says_so_and_gives_up(clock: list[float]) -> None:
    alive: dict[str, Resources] = {"a": {"CPU": 2.0}}
    watch = Watch(ResourcesConfig(num_gpus=1, num_cpus=1, wait_for_resources=100))
    assert watch.is_due and watch.look(alive) == (
        "No node of the cluster can take a worker of 1 GPUs and 1 CPUs (alive: 0 GPUs and 2 CPUs): waiting for one to "
        "join, for 100 s more"
    )
    assert not watch.is_due
    clock[0] += 3
    assert watch.is_due and watch.look(alive) is None
    clock[0] += 30
    assert "for 67 s more" in str(watch.look(alive))
    alive["late"] = {"CPU": 8.0, "GPU": 1.0}
    clock[0] += 3
    assert watch.look(alive) is None and watch.able == {"late"}
    del alive["late"]
    clock[0] += 3
    assert "for 97 s more" in str(watch.look(alive))
    clock[0] += 101
    with pytest.raises(WorkError, match=r"none joined within 100 s \(workers.wait_for_resources\)"):
        watch.look(alive)
