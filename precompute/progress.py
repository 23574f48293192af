"""How far a job is: a bar on a terminal, JSON lines otherwise."""

import json
import sys
import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from shards.receipts import Receipt


class Progress:
    """Counts shards and samples as they are committed, and shows them on stderr."""

    def __init__(self, total: int):
        self.total = total
        self.done = self.failed = self.samples_in = self.encoded = 0
        self.started = time.monotonic()
        self.bar: Bar | None = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            columns = (TextColumn("precompute"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"))
            self.bar = Bar(*columns, TextColumn("{task.description}"), TimeRemainingColumn())
            self.task = self.bar.add_task("starting", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def shard_done(self, receipt: Receipt) -> None:
        """One more shard is committed."""
        self.done += 1
        self.samples_in += receipt.samples_in
        self.encoded += receipt.encoded
        self._show()

    def shard_failed(self) -> None:
        """One more shard is given up."""
        self.failed += 1
        self._show()

    def attempt_failed(self, shard: str, attempt: int, attempts: int, reason: str) -> None:
        """Say why an attempt failed, and whether another follows."""
        what = f"shard {shard}: attempt {attempt} of {attempts} failed: {reason}"
        if self.bar:
            self.bar.console.print(what, markup=False)
        else:
            print(what, file=sys.stderr, flush=True)

    def _show(self) -> None:
        seconds = max(time.monotonic() - self.started, 1e-9)
        finished = self.done + self.failed
        figures = {
            "shards_done": self.done,
            "shards_failed": self.failed,
            "shards": self.total,
            "accepted": self.encoded,
            "rejected": self.samples_in - self.encoded,
            "images_per_second": round(self.samples_in / seconds, 1),
            "eta_seconds": round(seconds / finished * (self.total - finished)) if finished else None,
        }
        if self.bar:
            text = "{images_per_second} img/s  {accepted} accepted  {rejected} rejected".format(**figures)
            self.bar.update(self.task, completed=finished, description=text)
        else:
            print(json.dumps(figures), file=sys.stderr, flush=True)
