"""What a run writes about itself: JSON lines that a resumed run continues as if it had never stopped."""

import json
from pathlib import Path
from typing import Any

from shards.files import write_atomically


class JsonLines:
    """An append-only file of one JSON object per line, each with a `step`."""

    def __init__(self, path: Path, step: int):
        """Open `path`, and drop what an interrupted run wrote after `step`, a torn last line included."""
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
        write_atomically(path, "".join(f"{line}\n" for line in kept).encode())
        self.file = path.open("a", buffering=1)

    def write(self, **fields: Any) -> None:
        """Append one object; a line reaches the file as soon as it is whole."""
        self.file.write(json.dumps(fields) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JsonLines file."""
    return [json.loads(line) for line in _whole_lines(path)]


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()
