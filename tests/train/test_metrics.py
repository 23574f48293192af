"""Numbers in the lines of metrics.jsonl."""

import pytest

from train.metrics import significant


@pytest.mark.parametrize("rate", [3e-5, 0.71234567, 0.04, 123456.789])
@pytest.mark.parametrize("processes", [1, 64, 1024, 4096])
def test_throughput_is_precise_enough_to_count_processes(rate: float, processes: int) -> None:
    """Reports derive the number of processes from the throughput of all processes and of each."""
    assert significant(rate) == pytest.approx(rate, rel=1e-5)
    assert round(significant(rate * processes) / significant(rate)) == processes
