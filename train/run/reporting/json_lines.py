"""Append-only JSON lines files (metrics.jsonl, samples.jsonl) that a resumed run continues without gaps or repeats."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shards.base.durable import iter_json_lines, new_file
from shards.base.errors import naming
from train.run.lease.folder import publish


class JsonLines:
    """An append-only file with one JSON object per line, each with a `step`."""

    def __init__(self, path: Path, step: int, folder: Path):
        """Open `path` for appending after `step`. Later or incomplete lines from an interrupted launch are dropped.

        The file is replaced rather than truncated, so a superseded launch that still has the old file open cannot
        append to the new file.

        Args:
            step: last step whose line is kept.
            folder: the launch's own folder, in which the new file is prepared.
        """
        with new_file(folder / path.name) as file:
            for fields in iter_file(path):  # one line at a time, because samples.jsonl can reach gigabytes
                if fields["step"] <= step:
                    file.write(f"{json.dumps(fields)}\n".encode())
        publish(folder / path.name, path, folder)
        self.file = path.open("a", buffering=1)

    def sync(self) -> int:
        """Flush the file to disk, so that its lines survive a power failure, and return its size in bytes."""
        with naming(self.file.name):
            os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def write(self, **fields: Any) -> None:
        """Append one object as a complete line. Non-finite numbers become null."""
        with naming(self.file.name):
            self.file.write(json.dumps(replace_non_finite(fields)) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return all intact lines of a JsonLines file, or no lines if it does not exist.

    Damaged lines are reported and skipped.
    """
    return list(iter_file(path))


def iter_file(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that `read_json_lines` returns, one at a time."""
    if path.exists():
        with naming(path), path.open("rb") as file:
            yield from map(replace_non_finite, iter_json_lines(file, str(path)))


def step_seconds(lines: Iterable[dict[str, Any]], global_batch_size: int) -> Iterator[tuple[float, int]]:
    """Yield, for each line of metrics.jsonl, the seconds of the steps since the line before, according to their logged
    speed, and the number of processes. Startup, validation and interrupted work are not included."""
    before = 0
    for line in lines:
        rate = line["images_per_second"]
        yield (line["step"] - before) * global_batch_size / rate, round(rate / line["images_per_second_per_gpu"])
        before = line["step"]


def replace_non_finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, with None, including inside dicts."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
