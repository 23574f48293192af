"""Overlapping stages keep the order, bound the number of items in flight, and pass on errors."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from precompute.encode.overlap import map_in_order, threads
from shards.base.errors import Stuck
from shards.base.pool import in_background
from tests.runs import wait_until


def test_order_is_kept_and_the_number_ahead_is_bounded() -> None:
    under_way, most = 0, 0
    lock = threading.Lock()

    def work(item: int) -> int:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.002 * (item % 3))
        with lock:
            under_way -= 1
        return item * item

    with threads(8) as pool:
        assert list(map_in_order(pool, work, range(40), ahead=4)) == [i * i for i in range(40)]
        assert 1 < most <= 4
        assert list(map_in_order(pool, work, range(41), ahead=6, in_a_row=3)) == [i * i for i in range(41)]
        for ahead, in_a_row in ((4, 1), (6, 3)):
            left = iter(range(40))
            next(map_in_order(pool, work, left, ahead, in_a_row=in_a_row))
            assert next(left) == ahead


def test_background_runs_ahead_by_its_depth_and_no_further() -> None:
    made = []

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    background = in_background(items(), ahead=3)
    assert next(background) == 0
    wait_until(lambda: len(made) >= 5)  # one is consumed, three wait, and the next one is ready
    time.sleep(0.3)
    assert len(made) == 5
    assert list(background) == list(range(1, 100))


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken tar")

    background = in_background(items(), ahead=2)
    assert next(background) == 1
    with pytest.raises(ValueError, match="broken tar"):
        next(background)


def test_a_consumer_that_stops_early_stops_the_thread() -> None:
    before = threading.active_count()
    background = in_background(iter(range(10**9)), ahead=2)
    next(background)
    background.close()
    assert threading.active_count() == before


def test_a_stage_that_is_stopped_stops_those_before_it() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            ended.set()

    def doubled(numbers: Iterator[int]) -> Iterator[int]:
        for number in numbers:
            yield 2 * number

    before = threading.active_count()
    last = in_background(doubled(in_background(items(), ahead=1)), ahead=1)
    assert next(last) == 0
    last.close()
    assert ended.wait(10)
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.05)
    assert threading.active_count() == before


def test_calls_in_a_row_are_timed_separately_and_stop_with_the_pool() -> None:
    made = []

    def work(item: int) -> int:
        time.sleep(0.1)
        made.append(item)
        return item

    def items() -> Iterator[int]:
        yield from range(8)
        raise ValueError("broken tar")

    with threads(1, 0.3) as pool:
        assert list(map_in_order(pool, work, range(8), ahead=8, seconds=0.3, in_a_row=8)) == list(range(8))
    with pytest.raises(ValueError, match="broken tar"), threads(1, 0.3) as pool:
        list(map_in_order(pool, work, items(), ahead=16, seconds=0.3, in_a_row=8))
    assert len(made) < 16


def test_a_call_that_never_ends_does_not_hide_another_error() -> None:
    """The error of the consumer closes all stages, and leaving the pool notices the call that does not end."""
    begun, end = threading.Event(), threading.Event()

    def work(item: int) -> int:
        if item:
            begun.set()
            end.wait(60)
        return item

    try:
        with pytest.raises(Stuck, match="ValueError: no room") as caught, threads(1, 0.3) as pool:
            results = in_background(map_in_order(pool, work, range(9), ahead=4, seconds=0.3), ahead=1)
            with closing(results):
                assert next(results) == 0
                begun.wait(60)  # a call that has not begun is cancelled
                raise ValueError("no room")
        assert isinstance(caught.value.__cause__, ValueError)
    finally:
        end.set()


def test_an_error_is_passed_on_if_all_calls_end() -> None:
    with pytest.raises(ValueError, match="no room"), threads(2, 30) as pool:
        calls = [pool.submit(time.sleep, 0.05) for _ in range(20)]
        raise ValueError("no room")
    assert sum(call.cancelled() for call in calls) >= 10


def test_leaving_the_pool_waits_for_its_calls() -> None:
    with threads(1) as pool:
        call = pool.submit(time.sleep, 0.05)
    assert call.done()
