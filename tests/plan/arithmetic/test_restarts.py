"""Checkpoint intervals and lost time, compared with brute force and simulation."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plan.arithmetic import restarts


@given(st.floats(1, 1200), st.floats(3600, 3e6), st.floats(0, 3600))
def test_daly_interval_is_within_a_permille_of_the_best(checkpoint: float, between: float, restart: float) -> None:
    assume(checkpoint < between / 10)

    def cost(interval: float) -> float:
        return restarts.expected_time(1, interval, checkpoint, restart, between)

    daly = restarts.daly_interval(checkpoint, between)
    brute_force = min(cost(daly * 1.02**power) for power in range(-100, 101))
    assert cost(daly) <= brute_force * 1.001
    assert cost(daly) <= cost(math.sqrt(2 * checkpoint * between)) * 1.001


def test_daly_interval_where_checkpoints_outlast_the_machine() -> None:
    assert restarts.daly_interval(200, 100) == 100


def test_expected_time_is_what_a_simulation_finds() -> None:
    interval, checkpoint, restart, between, segments = 50.0, 5.0, 10.0, 100.0, 40_000
    rng = random.Random(0)

    def span_without_failure(length: float) -> float:
        """Simulate the time until a span of `length` passes without a failure; each failure costs a restart, which may
        fail too."""
        elapsed = 0.0
        while (failure := rng.expovariate(1 / between)) < length:
            elapsed += failure
            while (failure := rng.expovariate(1 / between)) < restart:
                elapsed += failure
            elapsed += restart
        return elapsed + length

    simulated = sum(span_without_failure(interval + checkpoint) for _ in range(segments)) / segments
    predicted = restarts.expected_time(interval, interval, checkpoint, restart, between)
    assert simulated == pytest.approx(predicted, rel=0.02)


def test_expected_time_can_be_for_ever() -> None:
    assert restarts.expected_time(1, 1e6, 1, 1, 1) == math.inf
