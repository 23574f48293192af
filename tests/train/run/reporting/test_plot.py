"""Smoothing of the plotted loss."""

import pytest

from train.run.reporting.plot import smooth


def test_smoothing_has_no_bias_at_its_start() -> None:
    assert smooth([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])
