"""Smoothing of the plotted loss, and the error for a run without metrics."""

from pathlib import Path

import pytest

from shards.base.errors import RequestError
from train.run.reporting.plot import plot_run, smooth


def test_smoothing_is_unbiased_from_the_first_value() -> None:
    assert smooth([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])


def test_a_run_without_metrics_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"metrics\.jsonl is missing or empty, so there is nothing to plot\. Check"):
        plot_run(tmp_path)
