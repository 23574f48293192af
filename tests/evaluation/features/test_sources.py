"""Which pictures a reference is made of."""

from pathlib import Path

import pytest

from evaluation.features.sources import ReferenceConfig


def test_a_relative_path_and_the_absolute_one_are_one_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ReferenceConfig(pictures="tars") == ReferenceConfig(pictures=str(tmp_path / "tars"))
    assert ReferenceConfig(pictures="s3://bucket/tars").pictures == "s3://bucket/tars"
