"""JSON lines files: damaged lines, non-finite numbers, and lines of interrupted launches."""

import json
import tracemalloc
from contextlib import suppress
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


def test_a_large_file_is_continued_without_reading_all_of_it_into_memory(tmp_path: Path) -> None:
    """`log.samples` writes the keys of every batch, which add up to gigabytes in a long run."""
    path, keys = tmp_path / "samples.jsonl", [f"{number:09d}" for number in range(2000)]
    with path.open("w") as file:
        file.writelines(json.dumps({"step": step, "keys": keys}) + "\n" for step in range(1, 41))
    before, folder = path.read_bytes(), acquire(tmp_path).folder
    tracemalloc.start()
    JsonLines(path, 39, folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(before) / 2
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:39])


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl", 0, acquire(tmp_path).folder)
    lines.file = open("/dev/full", "a", buffering=1)  # noqa: SIM115 (closed below)
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        lines.write(step=1)
    with suppress(OSError):
        lines.file.close()


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path, 0, acquire(tmp_path).folder).write(
        step=1, val_loss=float("nan"), by={"a": float("inf"), "b": 1.0}, none=None
    )
    assert path.read_text() == '{"step": 1, "val_loss": null, "by": {"a": null, "b": 1.0}, "none": null}\n'
    assert read_json_lines(path)[0]["by"] == {"a": None, "b": 1.0}
