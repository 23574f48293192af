"""Precision of stage 1: the configured one, that of the root, or the best for the workers' device."""

from pathlib import Path

import pytest

from precompute.__main__ import resolved
from precompute.config import describe_encoding
from shards.base import device
from shards.open import open_store
from shards.root.shared import create_root
from tests.fixtures import precompute_config


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CPU that emulates bfloat16."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(device, "cpu_slowdown", lambda precision: 17.0)


def test_a_root_keeps_its_precision(slow: None, models: Path, tars: Path, tmp_path: Path) -> None:
    asked = precompute_config(models, tars, tmp_path / "root", precision="auto")
    assert resolved(asked, None).precision == "float32"
    given = asked.model_copy(update={"precision": "bfloat16"})
    create_root(open_store(tmp_path / "root"), describe_encoding(given))
    assert resolved(asked, None).precision == "bfloat16"
    assert resolved(asked.model_copy(update={"output": tmp_path / "derived"}), None).precision == "float32"
    derived = asked.model_copy(update={"output": tmp_path / "derived", "source": tmp_path / "root"})
    assert resolved(derived, None).precision == "bfloat16"


def test_an_emulated_precision_is_warned_about_once(
    slow: None, models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = precompute_config(models, tars, tmp_path / "root", precision="float16")
    assert resolved(config, None).precision == "float16"
    assert capsys.readouterr().err.count("warning: this CPU emulates float16") == 1
