"""What failures and checkpoints cost, and how often to save. Pure arithmetic, times in any one unit.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974: τ = √(2 δ M).
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006:
equation 20 for the expected wall time, equation 37 for the interval. M is the mean time between failures, δ a
checkpoint's time, R the restart's, τ the work between two checkpoints. Failures are independent of each other.
"""

import math


def young_interval(checkpoint: float, between_failures: float) -> float:
    """√(2 δ M): the first-order optimum."""
    return math.sqrt(2 * checkpoint * between_failures)


def best_interval(checkpoint: float, between_failures: float) -> float:
    """Daly's higher-order optimum of the work between checkpoints: eq. 37, and M where δ ≥ 2 M.

    Raises:
        ValueError: a time is not positive.
    """
    if checkpoint <= 0 or between_failures <= 0:
        raise ValueError(f"checkpoint {checkpoint} and time between failures {between_failures} must be positive")
    ratio = checkpoint / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    return young_interval(checkpoint, between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def expected_time(work: float, interval: float, checkpoint: float, restart: float, between_failures: float) -> float:
    """Expected wall time of `work` that saves after each `interval`: M e^(R/M) (e^((τ+δ)/M) − 1) work / τ, eq. 20.

    Infinite where a failure is all but certain before the next checkpoint.

    Raises:
        ValueError: work or interval is not positive.
    """
    if work <= 0 or interval <= 0:
        raise ValueError(f"work {work} and interval {interval} must be positive")
    try:
        segment = math.expm1((interval + checkpoint) / between_failures)
        return between_failures * math.exp(restart / between_failures) * segment * work / interval
    except OverflowError:
        return math.inf
