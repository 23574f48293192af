"""What a run writes about itself: JSON lines that a resumed run continues as if it had never stopped."""

import json
import math
import os
from pathlib import Path
from typing import Any

from shards.base.durable import parse_json_lines, write_file
from train.run.launches import publish


class JsonLines:
    """An append-only file of one JSON object per line, each with a `step`."""

    def __init__(self, path: Path, step: int, folder: Path):
        """Open `path`, and drop what an interrupted run wrote after `step`, a torn last line included.

        It is a new file, made in the launch's own `folder`: who still writes to the old one is not read any more.
        """
        kept = [fields for fields in read_json_lines(path) if fields["step"] <= step]
        whole = "".join(f"{json.dumps(fields)}\n" for fields in kept).encode()
        publish(write_file(folder / path.name, whole), path, folder)
        self.file = path.open("a", buffering=1)

    def keep(self) -> int:
        """Have what was written survive a power cut; returns its bytes."""
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def write(self, **fields: Any) -> None:
        """Append one object; a line reaches the file as soon as it is whole. What is not finite is null."""
        self.file.write(json.dumps(finite(fields)) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JsonLines file. One that a power cut left damaged is passed over, loudly."""
    return [finite(fields) for fields in parse_json_lines(path.read_bytes(), str(path))] if path.exists() else []


def finite(value: Any) -> Any:
    """`value` with null for every number that JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
