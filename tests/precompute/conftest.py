"""Fixtures shared by the tests of stage 1."""

from pathlib import Path

import pytest

from tests.precompute.select import laion
from tests.ranks import SERVER


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the plot, which takes longer than everything else. Tests that run the command in its own process draw it."""
    monkeypatch.setattr("precompute.select.job.draw_funnel", lambda funnel: b"drawn")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork worker processes from a server that has imported everything; spawned processes would import it again."""
    monkeypatch.setattr("shards.base.pool.multiprocessing.get_context", lambda method: SERVER)


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """Folder with three metadata files."""
    return laion.three_files(tmp_path / "in")
