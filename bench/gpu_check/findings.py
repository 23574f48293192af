"""The findings of a part of the check, saved after every entry so that a crash loses only unfinished work."""

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.kit.common import is_out_of_memory
from shards.base.durable import write_atomically

Row = dict[str, str | int | float | bool | None]
Parts = dict[str, dict[str, Any]]
"""Name of a part → its findings and outcome."""
RATE = "{} TFLOP/s"
"""Name of the figure with the rate of a large matrix product, by data type."""


class Findings:
    """Checks, table rows and figures found by one part."""

    def __init__(self, path: Path, seconds: float = float("inf")):
        """Create an empty file.

        Args:
            seconds: time after which no long measurement should be started.
        """
        self.path = path
        self.ends = time.monotonic() + seconds
        self.checks: list[Row] = []
        self.tables: dict[str, list[Row]] = {}
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []
        """Messages of errors that were caught by `tried`."""
        self.save()

    @contextmanager
    def tried(self, table: str, **cells: str | int | float | bool | None) -> Iterator[None]:
        """Catch errors of one of several independent measurements, and record them in a table row.

        The part continues with the next measurement, and fails at its end. A measurement that runs out of memory is
        only listed as such, because the lanes share the device's memory.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            if is_out_of_memory(error):
                self.row(table, **cells, note="out of memory")
                return
            message = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            self.failed.append(message)
            self.row(table, **cells, note=f"failed: {message}")

    def check(self, what: str, value: float, at_most: float) -> None:
        """Record a check that holds if `value` is at most `at_most`. It does not hold for NaN."""
        self.checks.append({"what": what, "value": value, "at_most": at_most, "right": value <= at_most})
        self.save()

    def row(self, table: str, **cells: str | int | float | bool | None) -> None:
        """Add a row to a table."""
        self.tables.setdefault(table, []).append(cells)
        self.save()

    def figure(self, name: str, value: Any) -> None:
        """Record a figure, which other parts or the report may use."""
        self.figures[name] = value
        self.save()

    @property
    def has_time(self) -> bool:
        """Whether there is time to start another long measurement."""
        return time.monotonic() < self.ends

    def save(self) -> None:
        """Write the findings atomically."""
        content = {"checks": self.checks, "tables": self.tables, "figures": self.figures}
        write_atomically(self.path, (json.dumps(content, indent=1) + "\n").encode())
