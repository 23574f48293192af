"""Fixtures of the package's tests."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def root(latents: Path, tmp_path: Path) -> Path:
    """A copy of the latents root that the test may modify."""
    return shutil.copytree(latents, tmp_path / "root")
