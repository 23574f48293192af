"""How far a command is: a bar on a terminal, JSON lines otherwise; on stderr."""

import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_SECONDS = 30.0
"""Between JSON lines, while nothing ends."""


class Progress:
    """Shows a command's figures. A context manager: the bar is there while it is open."""

    def __init__(self, command: str, units: str, total: int, completed: int = 0):
        """`completed`: of the `total` units, when it begins."""
        self.total, self.completed = total, completed
        self.shown = time.monotonic()
        self.bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (TextColumn(command), BarColumn(), MofNCompleteColumn(), TextColumn(units))
            figures = (TextColumn("{task.description}"), TimeRemainingColumn())
            self.bar = Bar(
                *columns,
                *figures,
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
        """Whether to show figures of which none is final: often on a terminal, now and then in a log."""
        return self.bar is not None or time.monotonic() - self.shown >= LINE_SECONDS

    def say(self, what: str) -> None:
        """A line for people."""
        if self.bar:
            self.bar.console.print(what, markup=False)
        else:
            print(what, file=sys.stderr, flush=True)

    def advance(self) -> None:
        """One more unit is done with; on a terminal, which need not wait for figures, and in a log now and then."""
        self.completed += 1
        if self.bar and self.bar.tasks:
            self.bar.advance(self.task)
        elif self.is_due:
            self.show(self.completed, "", {"completed": self.completed, "of": self.total})

    def show(self, completed: int, text: str, figures: dict[str, Any]) -> None:
        """The units that are done with, of all; `text` beside the bar, or `figures` as a line of JSON."""
        self.shown = time.monotonic()
        if self.bar and self.bar.tasks:
            self.bar.update(self.task, completed=completed, description=text)
        else:
            print(json.dumps(figures), file=sys.stderr, flush=True)
