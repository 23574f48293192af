"""Fixtures that the tests of select share."""

from pathlib import Path

import pytest

from tests.precompute.select import laion


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all else; the tests that run the command in a process of its own draw."""
    monkeypatch.setattr("precompute.select.job.draw_funnel", lambda funnel: b"drawn")


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """A folder of three metadata files."""
    return laion.three_files(tmp_path / "in")
