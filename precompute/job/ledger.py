"""The results of a job so far, reported on stderr, in failures.jsonl and to Prometheus."""

import time
from collections import Counter, deque

from cluster.failure_log import FailureLog
from cluster.fleet import Done, Event, Failed, News, UnderWay
from precompute.job.metrics import JobMetrics
from shards.base.progress import Progress
from shards.root.committed import TarReceipts

WINDOW_SECONDS = 100.0
STEP_SECONDS = 1.0


class RecentRate:
    """Speed at which a count has grown over the last WINDOW_SECONDS."""

    def __init__(self) -> None:
        self.latest = time.monotonic(), 0.0
        self.points: deque[tuple[float, float]] = deque([self.latest])
        """Earlier (time, count) pairs, at most one per STEP_SECONDS."""

    def add(self, count: float) -> None:
        """Record the current count."""
        now = time.monotonic()
        self.latest = now, count
        if now - self.points[-1][0] >= STEP_SECONDS:
            self.points.append(self.latest)
        while len(self.points) > 2 and now - self.points[1][0] >= WINDOW_SECONDS:
            self.points.popleft()

    @property
    def per_second(self) -> float:
        """Growth per second, or 0 if the count has fallen. It falls when an attempt is lost, because the attempt's
        progress no longer counts."""
        (began, before), (now, count) = self.points[0], self.latest
        return max(0.0, count - before) / (now - began) if now > began else 0.0


class Ledger:
    """Running totals of the results of a job's tars, which are shown while the job runs."""

    def __init__(self, total: int, failures: FailureLog | None = None):
        self.total, self.failures = total, failures
        self.done = self.samples_in = self.encoded = 0
        self.rejected: Counter[str] = Counter()
        """Reason → number of samples that were rejected from every bucket for that reason."""
        self.failed: dict[str, str] = {}
        """Last error of each tar that the job gave up on."""
        self.under_way = UnderWay(0, 0)
        self.has_news = False
        """Whether a tar has been committed or given up on since the figures were last shown. They are shown again at
        the fleet's next `UnderWay` event, which no longer counts that tar as in flight."""
        self.rate = RecentRate()
        self.metrics = JobMetrics()
        self.progress = Progress("precompute", "tars", total)

    @property
    def where_failures(self) -> str:
        """Sentence naming the log of failed attempts, with a leading space; empty without a log."""
        return f" {self.failures.where} lists every failed attempt with its traceback." if self.failures else ""

    @property
    def left(self) -> int:
        """Number of tars neither committed nor given up on. Once the job has ended, this is 0 unless it was stopped."""
        return self.total - self.done - len(self.failed)

    def record(self, event: Event[TarReceipts]) -> None:
        """Update the totals, the metrics and the display from an event of the fleet."""
        match event:
            case Done(result=receipts, node=node):
                self.done += 1
                self.samples_in += receipts.samples_in
                self.encoded += receipts.encoded
                self.rejected.update(receipts.rejected)
                self.metrics.tar_done(receipts, node)
                self.has_news = True
            case Failed(key=tar, which=which, failure=failure, again=again):
                self.metrics.attempt_failed(event)
                if self.failures:
                    self.failures.record(event)
                if not event.in_pause:
                    is_final = ", giving up on the tar" if not again else ""
                    self.progress.say(f"tar {tar}: {which}{is_final}: {failure.text}")
                if not again:
                    self.failed[tar] = failure.line
                    self.has_news = True
            case News(text=text):
                self.progress.say(text)
            case UnderWay():
                self.under_way = event
                self.rate.add(self.samples_in + event.reported)
                self.metrics.now(event, self.rate.per_second, self._eta)
                if self.has_news or self.progress.is_due:
                    self._show()

    def _show(self) -> None:
        self.has_news = False
        figures = self.figures()
        text = "{images_per_second} img/s  {accepted} accepted  {rejected} rejected".format(**figures)
        self.progress.show(self.total - self.left, text, figures)

    def figures(self) -> dict[str, int | float | None]:
        """Return the figures to show in a progress line."""
        seconds = self._eta
        return {
            "shards_done": self.done,
            "shards_failed": len(self.failed),
            "shards_in_flight": self.under_way.attempts,
            "shards": self.total,
            "accepted": self.encoded,
            "rejected": self.samples_in - self.encoded,
            "under_way": self.under_way.reported,
            "images_per_second": round(self.rate.per_second, 1),
            "eta_seconds": None if seconds is None else round(seconds),
        }

    @property
    def _eta(self) -> float | None:
        """Estimated seconds left, assuming that unfinished tars have as many samples as the average encoded tar. None
        if there is nothing to estimate from yet."""
        if not self.left:
            return 0.0
        if not self.samples_in or not self.rate.per_second:
            return None
        samples_left = self.left * self.samples_in / self.done - self.under_way.reported
        return max(0.0, samples_left) / self.rate.per_second
