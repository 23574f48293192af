"""Progress reports on stderr: a progress bar on a terminal, JSON lines otherwise."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_SECONDS = 30.0
"""Minimum interval between two JSON lines of progress."""


class Progress:
    """Progress display of a command. As a context manager, it shows the bar while open."""

    def __init__(self, command: str, units: str, total: int, completed: int = 0):
        """Set up the display; `completed` of the `total` units are already done."""
        self.total, self.completed = total, completed
        self.shown = time.monotonic()
        self.bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn(units), TextColumn("{task.description}"))
            self.bar = Bar(
                TextColumn(command),
                *columns,
                TimeRemainingColumn(),
                console=Console(stderr=True),
                speed_estimate_period=3600,  # a step may take a minute
                redirect_stdout=sys.stdout.isatty(),
            )

    def __enter__(self) -> "Progress":
        if self.bar:
            self.task = self.bar.add_task("starting", total=self.total, completed=self.completed)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    @property
    def is_due(self) -> bool:
        """Whether to show intermediate figures now: always on a terminal, but only at intervals in a log."""
        return self.bar is not None or time.monotonic() - self.shown >= LINE_SECONDS

    def say(self, message: str) -> None:
        """Print a message above the bar, or to stderr."""
        if self.bar:
            self.bar.console.print(message, markup=False)
        else:
            print(message, file=sys.stderr, flush=True)

    def advance(self, figures: Callable[[], dict[str, Any]] | None = None) -> None:
        """Count one more completed unit. A bar updates immediately; a log gets a line at intervals.

        Args:
            figures: function that returns the content of the line; None: the number of completed units.
        """
        self.completed += 1
        if self.bar and self.bar.tasks:
            self.bar.advance(self.task)
        elif self.is_due:
            self.show(self.completed, "", figures() if figures else {"completed": self.completed, "of": self.total})

    def show(self, completed: int, text: str, figures: dict[str, Any]) -> None:
        """Set the number of completed units, and show `text` next to the bar or print `figures` as a line of JSON."""
        self.shown = time.monotonic()
        if self.bar and self.bar.tasks:
            self.bar.update(self.task, completed=completed, description=text)
        else:
            print(json.dumps(figures), file=sys.stderr, flush=True)
