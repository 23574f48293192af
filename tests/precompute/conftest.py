"""Fixtures shared by the tests of select."""

from pathlib import Path

import pytest

from tests.precompute.select import laion


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the plot, which takes longer than everything else. Tests that run the command in its own process draw it."""
    monkeypatch.setattr("precompute.select.job.draw_funnel", lambda funnel: b"drawn")


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """Folder with three metadata files."""
    return laion.three_files(tmp_path / "in")
