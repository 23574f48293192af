"""Calls in worker processes that may die, and reuse of freed memory."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing

from shards.base.pool import run_each

BUSY = """
import signal
import time
from shards.base.pool import start_pool

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in a script's background
pool = start_pool(1)
pool.submit(abs, 1).result()
queue = pool.map(time.sleep, [0.5] * 1000)
try:
    print("busy", flush=True)
    list(queue)
except KeyboardInterrupt:
    pool.shutdown(cancel_futures=True)
"""

PROGRAM = """
import resource
from shards.base.pool import configure_malloc

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        small = [b"x" * (1 << 22) for _ in range(8)]
        del small
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
configure_malloc()
faults()
print(given_back, faults())
"""


def test_memory_that_is_freed_is_not_faulted_in_again() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    given_back, kept = map(int, said.split())
    assert kept < given_back / 10, said


def halve_or_die(number: int) -> int:
    """Return half of an even number. 7 kills the process, as the system does if memory runs out."""
    if number == 7:
        os._exit(9)
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_each_item_is_called_once_and_a_dead_worker_fails_only_the_calls_under_way() -> None:
    with closing(run_each(halve_or_die, [*range(8), 8, 10, 12], 2)) as finished:
        outcomes = {item: future.exception() or future.result() for item, future in finished}
    assert outcomes.keys() == {*range(9), 10, 12}
    dead = {item for item, outcome in outcomes.items() if isinstance(outcome, BrokenProcessPool)}
    assert 7 in dead and len(dead) <= 2
    assert all(outcomes[item] == item // 2 for item in {0, 2, 4, 6, 8, 10, 12} - dead)
    assert all(str(outcomes[item]) == f"{item} is odd" for item in {1, 3, 5} - dead)


def test_no_items_start_no_worker() -> None:
    assert list(run_each(halve_or_die, [], 2)) == []


def test_workers_are_terminated_when_the_iterator_is_closed_or_stopped() -> None:
    start = time.monotonic()
    with closing(run_each(sleep, [0, 600, 600], 2)) as finished:
        assert next(finished)[0] == 0
    stopped = iter([False] * 4 + [True] * 9)
    assert list(run_each(sleep, [600, 600], 1, should_stop=lambda: next(stopped))) == []
    assert time.monotonic() - start < 300 and not multiprocessing.active_children()


def test_ctrl_c_ends_busy_workers_without_a_traceback() -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "busy\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == ""
