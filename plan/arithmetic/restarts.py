"""Optimal checkpoint interval, and expected time with failures. All times must have the same unit.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974: τ = √(2 δ M).
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006:
equation 20 for the expected wall time, equation 37 for the interval. M is the mean time between failures, δ the
time to write a checkpoint, R the restart time and τ the work between two checkpoints. Failures are independent.
"""

import math


def daly_interval(checkpoint: float, between_failures: float) -> float:
    """Return Daly's higher-order optimal interval (eq. 37), or M if δ ≥ 2 M. Both times must be positive."""
    ratio = checkpoint / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    young = math.sqrt(2 * checkpoint * between_failures)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def expected_time(work: float, interval: float, checkpoint: float, restart: float, between_failures: float) -> float:
    """Return the expected wall time of `work` with a checkpoint every `interval`.

    This is eq. 20, M e^(R/M) (e^((τ+δ)/M) − 1) work / τ. The result is infinity if a failure before the next checkpoint
    is so certain that the formula overflows.
    """
    try:
        segment = math.expm1((interval + checkpoint) / between_failures)
        return between_failures * math.exp(restart / between_failures) * segment * work / interval
    except OverflowError:
        return math.inf
