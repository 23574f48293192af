"""How far a job is: a bar on a terminal, JSON lines otherwise, and the same figures as Ray metrics."""

import json
import sys
import time
from types import TracebackType

from ray.util.metrics import Counter, Gauge
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from shards.format.receipts import Receipt

LINE_SECONDS = 30.0
"""Between JSON lines, while no shard ends."""


class Metrics:
    """The job's figures for Prometheus, which every node's metrics endpoint serves under `ray_latentmill_…`."""

    def __init__(self) -> None:
        self.images_in = Counter("latentmill_images_in", "Samples of committed shards")
        self.accepted = Counter("latentmill_images_accepted", "Of these, in at least one bucket")
        self.rejected = Counter("latentmill_images_rejected", "Of these, in no bucket", ("reason",))
        self.shards = Counter("latentmill_shards", "Shards that are done with", ("outcome",))
        self.failed_attempts = Counter("latentmill_failed_attempts", "Attempts at shards that failed")
        self.seconds = Counter("latentmill_encoding_seconds", "Wall-clock seconds of workers on committed shards")
        self.running = Gauge("latentmill_shards_in_flight", "Shards handed to Ray")
        self.under_way = Gauge("latentmill_images_under_way", "Samples taken in of shards that are not committed")
        self.rate = Gauge("latentmill_images_per_second", "Samples taken in, over the job's time so far")
        self.eta = Gauge("latentmill_eta_seconds", "Until the job ends, at its rate so far; absent before there is one")

    def shard_done(self, receipt: Receipt) -> None:
        """Count what a receipt accounts for."""
        # Ray refuses to add nothing
        for counter, value in (
            (self.images_in, receipt.samples_in),
            (self.accepted, receipt.encoded),
            (self.seconds, receipt.seconds),
        ):
            if value:
                counter.inc(value)
        for reason, count in receipt.rejected.items():
            self.rejected.inc(count, {"reason": reason})
        self.shards.inc(1, {"outcome": "done"})


class Progress:
    """Counts shards and samples as they are committed, and those under way, and shows them on stderr."""

    def __init__(self, total: int):
        self.total = total
        self.done = self.failed = self.samples_in = self.encoded = self.under_way = self.running = 0
        self.started = self.shown = time.monotonic()
        self.metrics = Metrics()
        self.bar: Bar | None = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            columns = (TextColumn("precompute"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"))
            figures = (TextColumn("{task.description}"), TimeRemainingColumn())
            self.bar = Bar(*columns, *figures, console=Console(stderr=True))
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
        self.metrics.shard_done(receipt)
        self._show()

    def shard_failed(self) -> None:
        """One more shard is given up."""
        self.failed += 1
        self.metrics.shards.inc(1, {"outcome": "failed"})
        self._show()

    def attempt_failed(self, shard: str, which: str, reason: str) -> None:
        """Say which attempt failed (`attempt 2 of 3 failed`), and why."""
        self.metrics.failed_attempts.inc(1)
        self.say(f"shard {shard}: {which}: {reason}")

    def say(self, what: str) -> None:
        """A line for people."""
        if self.bar:
            self.bar.console.print(what, markup=False)
        else:
            print(what, file=sys.stderr, flush=True)

    def tick(self, under_way: int, running: int) -> None:
        """How many samples the running attempts have taken in, and how many shards are handed out; often called."""
        self.under_way, self.running = under_way, running
        self.metrics.running.set(running)
        self.metrics.under_way.set(under_way)
        if self.bar or time.monotonic() - self.shown >= LINE_SECONDS:
            self._show()

    def _show(self) -> None:
        self.shown = time.monotonic()
        figures = self.figures(max(self.shown - self.started, 1e-9))
        for gauge, name in ((self.metrics.rate, "images_per_second"), (self.metrics.eta, "eta_seconds")):
            if (value := figures[name]) is not None:
                gauge.set(value)
        if self.bar:
            text = "{images_per_second} img/s  {accepted} accepted  {rejected} rejected".format(**figures)
            self.bar.update(self.task, completed=self.done + self.failed, description=text)
        else:
            print(json.dumps(figures), file=sys.stderr, flush=True)

    def figures(self, seconds: float) -> dict[str, int | float | None]:
        """All of it after `seconds`. Shards under way count for the share of a mean shard that they have taken in."""
        mean = self.samples_in / self.done if self.done else 0
        finished = self.done + self.failed + (min(self.under_way / mean, self.running) if mean else 0)
        return {
            "shards_done": self.done,
            "shards_failed": self.failed,
            "shards_in_flight": self.running,
            "shards": self.total,
            "accepted": self.encoded,
            "rejected": self.samples_in - self.encoded,
            "under_way": self.under_way,
            "images_per_second": round((self.samples_in + self.under_way) / seconds, 1),
            "eta_seconds": round(seconds / finished * max(0.0, self.total - finished)) if finished else None,
        }
