"""The images of a reference."""

from pathlib import Path

import pytest

from evaluation.features.sources import ReferenceConfig


def test_relative_and_absolute_paths_name_the_same_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ReferenceConfig(pictures="tars") == ReferenceConfig(pictures=str(tmp_path / "tars"))
    assert ReferenceConfig(pictures="../tars") == ReferenceConfig(pictures=str(tmp_path.parent / "tars"))
    assert ReferenceConfig(pictures="s3://bucket/tars").pictures == "s3://bucket/tars"
