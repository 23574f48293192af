"""JSON lines files: damaged lines, non-finite numbers, and lines of interrupted launches."""

import json
from pathlib import Path

import pytest

from tests.runs import acquire
from train.run.reporting.json_lines import JsonLines, read_json_lines


def test_damaged_lines_are_skipped_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1}', bytes(12), b'{"step": 2}', b"[3]", b'{"loss": 1.0}', b"\xff\xfe", b'{"step": 3}', b'{"st']
    path.write_bytes(b"\n".join(lines))
    JsonLines(path, 2, acquire(tmp_path).folder).write(step=3, loss=0.5)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1}, {"step": 2}, {"step": 3, "loss": 0.5},
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert [f"{path}: line {number} is damaged" in printed for number in range(1, 9)] == [
        False, True, False, True, True, True, False, False,
    ]  # fmt: skip


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path, 0, acquire(tmp_path).folder).write(
        step=1, val_loss=float("nan"), by={"a": float("inf"), "b": 1.0}, none=None
    )
    assert path.read_text() == '{"step": 1, "val_loss": null, "by": {"a": null, "b": 1.0}, "none": null}\n'
    assert read_json_lines(path)[0]["by"] == {"a": None, "b": 1.0}
