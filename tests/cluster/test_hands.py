"""Which attempt goes to which worker, and how many there are: by hand, and by any number of them."""

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from cluster.hands import Attempt, Worker, assign, surplus, wanted


def attempts(number: int, avoid: str = "") -> deque[Attempt[str]]:
    return deque(Attempt(f"{i:05d}", "", 1, frozenset(avoid)) for i in range(number))


def workers(nodes: str, coming: int = 0) -> list[Worker]:
    """One on each node, and some that have not begun."""
    return [Worker(None, None, node) for node in nodes] + [Worker(None, None) for _ in range(coming)]


def nodes_of(waiting: deque[Attempt[str]], there: list[Worker], at_once: int, slots: int) -> Counter[str | None]:
    return Counter(worker.node for _, worker in assign(waiting, there, at_once, slots))


def test_each_has_one_before_any_has_two() -> None:
    waiting = attempts(4)
    assert nodes_of(waiting, workers("abc"), 3, slots=3) == {"a": 2, "b": 1, "c": 1} and not waiting
    waiting = attempts(20)
    there = workers("ab")
    assert nodes_of(waiting, there, 3, slots=2) == {"a": 3, "b": 3} and len(waiting) == 14
    assert not list(assign(waiting, there, 3, places=2))
    there[0].in_hand -= 1
    assert nodes_of(waiting, there, 3, slots=2) == {"a": 1}


def test_what_a_worker_on_its_way_could_begin_with_is_kept_for_it() -> None:
    """Eight tars on eight GPUs: the first worker that has loaded its models must not take three."""
    waiting = attempts(8)
    assert nodes_of(waiting, workers("a", coming=7), 3, slots=8) == {"a": 1} and len(waiting) == 7
    waiting = attempts(10)
    assert nodes_of(waiting, workers("a", coming=7), 3, slots=8) == {"a": 3} and len(waiting) == 7
    waiting = attempts(8)  # seven more were asked for, and the cluster has no room for them
    assert nodes_of(waiting, workers("a", coming=7), 3, slots=1) == {"a": 3}


def test_an_attempt_stays_off_the_nodes_that_it_avoids() -> None:
    waiting = attempts(2, avoid="a") + attempts(1)
    assert nodes_of(waiting, workers("ab"), 1, slots=2) == {"b": 1, "a": 1}
    assert [attempt.avoid for attempt in waiting] == [frozenset("a")]


def test_workers_are_asked_for_as_far_as_there_is_work() -> None:
    assert wanted(attempts(3), 0, [], most=8) == 3 * [frozenset()]
    assert wanted(attempts(30), 0, workers("ab"), most=8) == 6 * [frozenset()]
    assert wanted(attempts(1), 1, workers("ab"), most=8) == []
    assert wanted(attempts(0), 0, [], most=8) == []


def test_an_attempt_that_no_worker_may_take_gets_another_one() -> None:
    waiting = attempts(1, avoid="a")
    assert wanted(waiting, 0, workers("a"), most=1) == [frozenset("a")]
    assert wanted(waiting, 0, workers("a", coming=1), most=1) == []  # which may be it
    assert wanted(waiting, 0, workers("ab"), most=2) == []


def test_workers_that_nothing_waits_for_any_more_are_not_waited_for() -> None:
    there = workers("ab", coming=3)
    assert surplus(attempts(5), 0, there) == [] and surplus(attempts(2), 2, there) == there[2:3]
    assert surplus(attempts(0), 1, there) == there[2:] and surplus(attempts(0), 0, workers("ab")) == []


@given(
    st.integers(0, 30), st.integers(0, 30), st.integers(0, 5), st.integers(0, 5), st.integers(1, 4), st.integers(0, 12)
)
def test_everyone_has_work_or_none_waits(free: int, picky: int, on_a: int, on_b: int, at_once: int, slots: int) -> None:
    waiting, there = attempts(free) + attempts(picky, avoid="a"), workers("a" * on_a + "b" * on_b, coming=2)
    pairs = list(assign(waiting, there, at_once, slots))
    assert len(pairs) + len(waiting) == free + picky and len({id(attempt) for attempt, _ in pairs}) == len(pairs)
    assert all(worker.node not in attempt.avoid and attempt.worker is worker for attempt, worker in pairs)
    assert all(worker.in_hand <= at_once for worker in there) and not there[-1].in_hand
    idle = [worker for worker in there[:-2] if not worker.in_hand]
    assert not any(worker.node not in attempt.avoid for worker in idle for attempt in waiting)
    if slots <= on_a + on_b and any(not attempt.avoid for attempt in waiting):  # nobody is coming: all hands are full
        assert all(worker.in_hand == at_once for worker in there[:-2])


def test_who_may_go_to_nobody_that_has_begun_gets_a_worker_that_stays() -> None:
    """Asked for and given up in turns, it would never begin."""
    on_x = Worker(None, None, node="X")
    workers, waiting = [on_x], deque([Attempt("a", None, 2, frozenset({"X"}))])
    for _ in range(5):
        assert surplus(waiting, 0, workers) == []
        workers += [Worker(None, None) for _ in wanted(waiting, 0, workers, 4)]
    assert len(workers) == 2
    workers[1].node = "Y"
    ((attempt, worker),) = assign(waiting, workers, 3, 2)
    assert worker is workers[1] and attempt.key == "a"


def test_who_was_lost_goes_alone() -> None:
    """Or it would take those beside it with it, each time."""
    worker = Worker(None, None, node="X")
    waiting = deque([Attempt("bad", None, 3, frozenset(), alone=True), Attempt("good", None, 1, frozenset())])
    assert [attempt.key for attempt, _ in assign(waiting, [worker], 3, 1)] == ["bad"]
    assert list(assign(waiting, [worker], 3, 1)) == []
    worker.in_hand -= 1
    assert [attempt.key for attempt, _ in assign(waiting, [worker], 3, 1)] == ["good"]
    waiting.append(Attempt("bad", None, 4, frozenset(), alone=True))
    assert list(assign(waiting, [worker], 3, 1)) == []
