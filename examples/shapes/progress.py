"""The demo's progress: one line in a terminal and plain lines elsewhere, with an estimate of when it will finish."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

POLL_SECONDS = 0.5
PLAIN_SECONDS = 30.0
"""Interval in seconds between progress lines if the output is not a terminal."""
DOUBT_SECONDS = 20.0
"""Weight of the earlier steps' speed in an estimate, in seconds of expected work. It keeps the estimate steady while a
step's processes start."""


@dataclass(frozen=True)
class Step:
    """A step of the demo."""

    name: str
    title: str
    seconds: float
    """Expected duration on two cores. Only the ratios of the steps' durations matter."""
    kind: Literal["data", "training"]
    """Steps of the same kind are about equally fast or slow on a machine."""
    work: Callable[[], object]
    done: Callable[[], float] | None = None
    """Function that returns the finished share of the step, between 0 and 1; None: it is estimated from the time."""


def seconds_left(steps: Sequence[Step], spent: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """Estimate the seconds until the last step ends.

    Every unfinished share of a step takes its expected duration, multiplied by this machine's slowdown in steps of the
    same kind, or in all steps if none of that kind has begun.

    Args:
        spent: name of each step that has begun → seconds spent on it.
        shares: name of each step that has begun → its finished share, between 0 and 1.
    """

    def slowdown(chosen: Sequence[Step], prior: float) -> float:
        begun = [step for step in chosen if step.name in shares]
        expected = sum(step.seconds * shares[step.name] for step in begun)
        return (sum(spent[step.name] for step in begun) + DOUBT_SECONDS * prior) / (expected + DOUBT_SECONDS)

    overall = slowdown([step for step in steps if shares.get(step.name, 0.0) == 1.0], 1.0)
    left = 0.0
    for step in steps:
        alike = [other for other in steps if other.kind == step.kind]
        left += step.seconds * (1 - shares.get(step.name, 0.0)) * slowdown(alike, overall)
    return left


def describe(seconds: float, now: datetime | None = None) -> str:
    """Describe a remaining time, for example `about 6 min left, until 15:42`."""
    until = (now or datetime.now()) + timedelta(seconds=seconds)
    minutes = round(seconds / 60)
    return f"about {f'{minutes} min' if minutes else 'half a minute'} left, until {until:%H:%M}"


class Progress:
    """Display of the current step and the estimated finish, on one line of a terminal or on plain lines."""

    def __init__(self, steps: Sequence[Step], spent: dict[str, float], finished: Sequence[str]):
        """Prepare the display.

        Args:
            spent: name of each step that has begun → seconds spent on it; updated while a step runs.
            finished: names of the steps that are finished.
        """
        self.steps, self.spent = steps, spent
        self.shares = dict.fromkeys(finished, 1.0)
        self.console = Console(highlight=False, soft_wrap=True)

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Show progress while a step runs in this context, and count its seconds."""
        number = f"[{self.steps.index(step) + 1}/{len(self.steps)}]"
        before, began, ended = self.spent.get(step.name, 0.0), time.monotonic(), threading.Event()
        self.spent[step.name] = before

        def update() -> float:
            self.spent[step.name] = round(before + time.monotonic() - began, 1)
            share = self.spent[step.name] / step.seconds if step.done is None else step.done()
            self.shares[step.name] = min(share, 0.95)
            return seconds_left(self.steps, self.spent, self.shares)

        show = self._show_bar if self.console.is_terminal else self._show_lines
        thread = threading.Thread(target=show, args=(f"{number} {step.title}", update, ended), daemon=True)
        thread.start()
        try:
            yield
            self.shares[step.name] = 1.0
        finally:  # time spent before an interruption counts as well
            self.spent[step.name] = round(before + time.monotonic() - began, 1)
            ended.set()
            thread.join()
        print(f"{number} {step.title}: {self.spent[step.name]:.0f} s", flush=True)

    def _show_bar(self, title: str, update: Callable[[], float], ended: threading.Event) -> None:
        share = TextColumn("{task.percentage:.0f} %, {task.fields[left]}")
        with Bar(TextColumn("{task.description}"), BarColumn(), share, console=self.console, transient=True) as bar:
            task: TaskID = bar.add_task(title, total=1.0, left="")
            while True:
                left = update()
                total = sum(self.spent.values()) + left
                bar.update(task, completed=1 - left / total, left=describe(left))
                if ended.wait(POLL_SECONDS):
                    return

    def _show_lines(self, title: str, update: Callable[[], float], ended: threading.Event) -> None:
        while True:
            print(f"{title} ({describe(update())})", flush=True)
            if ended.wait(PLAIN_SECONDS):
                return
