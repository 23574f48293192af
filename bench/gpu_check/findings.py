"""What a part of the check found: saved with every line, so that a part which dies loses only what it had not done."""

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, str | int | float | bool | None]
Parts = dict[str, dict[str, Any]]
"""Name → what a part found, and how it ended."""
COPY_RATE = "copy GB/s, read and written"
"""A figure that one part finds and another needs."""


class Findings:
    """Checks that hold or not, rows of tables, and figures, of one part."""

    def __init__(self, path: Path, seconds: float = float("inf")):
        """`seconds`: from now on, after which nothing long should be begun."""
        self.path = path
        self.ends = time.monotonic() + seconds
        self.checks: list[Row] = []
        self.tables: dict[str, list[Row]] = {}
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []
        """What was tried and raised."""
        self.save()

    @contextmanager
    def tried(self, table: str, **cells: str | int | float | bool | None) -> Iterator[None]:
        """One of several things that do not need each other: where it raises, a row says so, and the next one is
        tried. The part fails at its end."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            self.failed.append(said)
            self.row(table, **cells, note=f"failed: {said}")

    def check(self, what: str, value: float, at_most: float) -> None:
        """One thing that is right where `value` is at most `at_most`; one that is not finite is not."""
        self.checks.append({"what": what, "value": value, "at_most": at_most, "right": value <= at_most})
        self.save()

    def row(self, table: str, **cells: str | int | float | bool | None) -> None:
        """One more line of a table."""
        self.tables.setdefault(table, []).append(cells)
        self.save()

    def figure(self, name: str, value: Any) -> None:
        """A number, or a few, that later parts or the page use."""
        self.figures[name] = value
        self.save()

    @property
    def has_time(self) -> bool:
        """Whether something long may still be begun."""
        return time.monotonic() < self.ends

    def save(self) -> None:
        """Put what there is into the file, which is whole at any time."""
        content = {"checks": self.checks, "tables": self.tables, "figures": self.figures}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(new, self.path)
