"""The plot of a run, the smoothing of its loss, and the error for a run without metrics."""

from pathlib import Path

import pytest
from PIL import Image

from shards.base.errors import RequestError
from tests.runs import train_run
from train.run.reporting.plot import plot_run, smooth


def test_a_run_ends_with_a_plot(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all other tests, the image is empty (tests/fixtures.py)."""
    monkeypatch.setattr("train.run.reporting.log.plot_run", plot_run)
    validation = {"root": str(latents), "bucket": "64x64", "samples": 4, "batch_size": 4, "every": 2}
    train_run(latents, tmp_path / "run", max_steps=2, validation=validation)
    with Image.open(tmp_path / "run" / "loss.png") as picture:
        assert picture.format == "PNG" and picture.size == (960, 1080)
        colors = {color for _, color in picture.convert("RGB").getcolors(10**6) or []}
    assert {(0x08, 0x51, 0x9C), (0xB4, 0x53, 0x09), (0x1B, 0x9E, 0x77)} <= colors  # loss, validation and a quarter


def test_smoothing_is_unbiased_from_the_first_value() -> None:
    assert smooth([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])


def test_a_run_without_metrics_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"metrics\.jsonl is missing or empty, so there is nothing to plot\. Check"):
        plot_run(tmp_path)
