"""Worker processes: results in order, exceptions unchanged, and a process that dies."""

import os
import signal

import pytest

from precompute.select.job import workers
from shards.base.errors import WorkError

pytestmark = pytest.mark.usefixtures("forked")


def halve(number: int) -> int:
    """Return half of an even number."""
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def die(number: int) -> int:
    """Die like a process that the OOM killer kills."""
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_order_and_the_first_exception_propagates(processes: int) -> None:
    with workers(processes) as run:
        assert list(run(halve, [(2 * i,) for i in range(20)])) == list(range(20))
        assert list(run(halve, [])) == []
        with pytest.raises(ValueError, match="3 is odd"):
            list(run(halve, [(2,), (3,), (4,), (5,)]))


def test_a_dead_process_is_reported() -> None:
    message = r"A worker process died .* Run the same command again with fewer --processes"
    with pytest.raises(WorkError, match=message), workers(2) as run:
        list(run(die, [(1,), (2,)]))
