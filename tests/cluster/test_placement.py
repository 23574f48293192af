"""Placement of units on workers, and the number of workers, by hand and for arbitrary numbers of both."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import Worker, assign, missing_workers, surplus_workers
from cluster.retry import Unit


def new_units(number: int) -> list[Unit[None]]:
    return [Unit(f"{i:05d}", None) for i in range(number)]


def picky_units(number: int) -> list[Unit[None]]:
    """Units that avoid node a."""
    return [Unit(f"picky{i:05d}", None, errors=1, failed_on="a") for i in range(number)]


def avoided(unit: Unit[None]) -> frozenset[str]:
    return frozenset({unit.failed_on} if unit.failed_on else ())


def make_workers(nodes: str, starting: int = 0) -> list[Worker]:
    """One worker on each of the nodes, and some that have not started."""
    return [Worker(None, None, node=node) for node in nodes] + [Worker(None, None) for _ in range(starting)]


def nodes_of(units: list[Unit[None]], workers: list[Worker], at_once: int, places: int) -> Counter[str | None]:
    """Assign units, remove them from the list, and count them by node."""
    pairs = list(assign(list(units), workers, at_once, places, avoided))
    for unit, _ in pairs:
        units.remove(unit)
    return Counter(worker.node for _, worker in pairs)


def keys_of(units: list[Unit[None]], worker: Worker) -> list[str]:
    return [unit.key for unit, _ in assign(units, [worker], 3, 1, avoided)]


def test_each_worker_has_one_unit_before_any_has_two() -> None:
    units = new_units(4)
    assert nodes_of(units, make_workers("abc"), 3, places=3) == {"a": 2, "b": 1, "c": 1} and not units
    units = new_units(20)
    workers = make_workers("ab")
    assert nodes_of(units, workers, 3, places=2) == {"a": 3, "b": 3} and len(units) == 14
    assert not nodes_of(units, workers, 3, places=2)
    workers[0].running.pop()
    assert nodes_of(units, workers, 3, places=2) == {"a": 1}


def test_units_are_kept_for_workers_that_are_starting() -> None:
    """Eight tars on eight GPUs: the first worker to start must not take three."""
    units = new_units(8)
    assert nodes_of(units, make_workers("a", starting=7), 3, places=8) == {"a": 1} and len(units) == 7
    units = new_units(10)
    assert nodes_of(units, make_workers("a", starting=7), 3, places=8) == {"a": 3} and len(units) == 7
    units = new_units(8)  # seven more workers were requested, and the cluster has no room for them
    assert nodes_of(units, make_workers("a", starting=7), 3, places=1) == {"a": 3}


def test_a_unit_stays_off_the_nodes_that_it_avoids() -> None:
    units = picky_units(2) + new_units(1)
    assert nodes_of(units, make_workers("ab"), 1, places=2) == {"b": 1, "a": 1}
    assert [unit.failed_on for unit in units] == ["a"]


def test_workers_are_requested_as_far_as_there_is_work() -> None:
    assert missing_workers(new_units(3), 0, [], 8, avoided) == 3 * [frozenset()]
    assert missing_workers(new_units(30), 0, make_workers("ab"), 8, avoided) == 6 * [frozenset()]
    assert missing_workers(new_units(1), 1, make_workers("ab"), 8, avoided) == []
    assert missing_workers([], 0, [], 8, avoided) == []


def test_a_unit_that_no_worker_may_take_gets_another_worker() -> None:
    units = picky_units(1)
    assert missing_workers(units, 0, make_workers("a"), 1, avoided) == [frozenset("a")]
    assert missing_workers(units, 0, make_workers("a", starting=1), 1, avoided) == []  # that one may do
    assert missing_workers(units, 0, make_workers("ab"), 2, avoided) == []


def test_starting_workers_without_work_are_withdrawn() -> None:
    workers = make_workers("ab", starting=3)
    assert surplus_workers(new_units(5), 0, workers, avoided) == []
    assert surplus_workers(new_units(2), 2, workers, avoided) == workers[2:3]
    assert surplus_workers([], 1, workers, avoided) == workers[2:]
    assert surplus_workers([], 0, make_workers("ab"), avoided) == []


@given(
    st.integers(0, 30), st.integers(0, 30), st.integers(0, 5), st.integers(0, 5), st.integers(1, 4), st.integers(0, 12)
)
def test_no_worker_idles_while_a_unit_could_run_on_it(
    free: int, picky: int, on_a: int, on_b: int, at_once: int, places: int
) -> None:
    units, workers = new_units(free) + picky_units(picky), make_workers("a" * on_a + "b" * on_b, starting=2)
    pairs = list(assign(units, workers, at_once, places, avoided))
    assigned = [unit for unit, _ in pairs]
    assert len(set(map(id, assigned))) == len(assigned)
    assert all(worker.node not in avoided(unit) and unit in worker.running for unit, worker in pairs)
    assert all(len(worker.running) <= at_once for worker in workers) and not workers[-1].running
    left = [unit for unit in units if unit not in assigned]
    idle = [worker for worker in workers[:-2] if not worker.running]
    assert not any(worker.node not in avoided(unit) for worker in idle for unit in left)
    if places <= on_a + on_b and any(not unit.failed_on for unit in left):  # no worker will start: all slots are full
        assert all(len(worker.running) == at_once for worker in workers[:-2])


def test_a_worker_for_a_unit_that_no_other_may_take_is_not_withdrawn() -> None:
    """Requested and withdrawn in turns, it would never start."""
    workers, units = make_workers("a"), picky_units(1)
    for _ in range(5):
        assert surplus_workers(units, 0, workers, avoided) == []
        workers += [Worker(None, None) for _ in missing_workers(units, 0, workers, 4, avoided)]
    assert len(workers) == 2
    workers[1].node = "b"
    ((unit, worker),) = assign(units, workers, 3, 2, avoided)
    assert worker is workers[1] and unit is units[0]


def test_a_unit_that_was_lost_twice_runs_alone() -> None:
    """Otherwise it would take its neighbours with it, each time."""
    (worker,) = make_workers("a")
    bad, good, late = Unit("bad", None, lost=2), Unit("good", None, lost=1), Unit("late", None)
    assert keys_of([bad, good], worker) == ["bad"]
    assert keys_of([good], worker) == []
    worker.running.remove(bad)
    assert keys_of([good, late], worker) == ["good", "late"]
    assert keys_of([bad], worker) == []
