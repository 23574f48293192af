"""metrics.jsonl: what an interrupted run left behind, and what JSON has no word for."""

import json
from pathlib import Path

import pytest

from train.data.order import choose_per_epoch
from train.run.launches import take
from train.run.metrics import JsonLines, read_json_lines


def test_damaged_lines_are_passed_over_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1}', bytes(12), b'{"step": 2}', b"[3]", b'{"loss": 1.0}', b"\xff\xfe", b'{"step": 3}', b'{"st']
    path.write_bytes(b"\n".join(lines))
    JsonLines(path, 2, take(tmp_path, 1)).write(step=3, loss=0.5)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1}, {"step": 2}, {"step": 3, "loss": 0.5},
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert [f"{path}: line {number} is damaged" in said for number in range(1, 9)] == [
        False, True, False, True, True, True, False, False,
    ]  # fmt: skip


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path, 0, take(tmp_path, 1)).write(
        step=1, val_loss=float("nan"), by={"a": float("inf"), "b": 1.0}, none=None
    )
    assert path.read_text() == '{"step": 1, "val_loss": null, "by": {"a": null, "b": 1.0}, "none": null}\n'
    assert read_json_lines(path)[0]["by"] == {"a": None, "b": 1.0}


@pytest.mark.parametrize(("weight", "expected"), [(0.29, 29), (0.07, 7), (1.1, 110), (3.0, 300), (0.295, 29)])
def test_a_weight_counts_as_it_was_written(weight: float, expected: int) -> None:
    assert choose_per_epoch(weight, 100, 1) == expected
