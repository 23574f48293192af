"""What came of each tar of a job so far: on stderr, in failures.jsonl, and for Prometheus."""

from collections import Counter
from types import TracebackType

from cluster.failures import FailureLog
from cluster.fleet import Done, Failed, News, UnderWay
from precompute.job.metrics import Metrics
from precompute.job.rate import Rate, eta
from shards.base.progress import Progress
from shards.root.committed import TarReceipts


class Ledger:
    """What came of each tar so far; it shows it on stderr, and in Ray's metrics."""

    def __init__(self, total: int, failures: FailureLog | None = None):
        self.total, self.failures = total, failures
        self.done = self.samples_in = self.encoded = 0
        self.rejected: Counter[str] = Counter()
        """Reason → samples in no bucket."""
        self.failed: dict[str, str] = {}
        """Tar → the last attempt's error."""
        self.under_way = UnderWay(0, 0)
        self.has_news = False
        """Set when a tar ends, until figures are shown again. The fleet's next `UnderWay` no longer counts that tar."""
        self.rate = Rate()
        self.metrics = Metrics()
        self.progress = Progress("precompute", "tars", total)

    def __enter__(self) -> "Ledger":
        self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.progress.__exit__(kind, error, tb)

    @property
    def where_failures(self) -> str:
        """A sentence on where each failed attempt is."""
        return f" Each failed attempt is in {self.failures.where}, with its trace." if self.failures else ""

    @property
    def left(self) -> int:
        """Tars that were neither done nor given up, where the job was told to leave."""
        return self.total - self.done - len(self.failed)

    def record(self, event: Done[TarReceipts] | Failed | News | UnderWay) -> None:
        """Enter what the fleet says."""
        match event:
            case Done(result=books, node=node):
                self.done += 1
                self.samples_in += books.samples_in
                self.encoded += books.encoded
                self.rejected.update(books.rejected)
                self.metrics.tar_done(books, node)
                self.has_news = True
            case Failed(key=tar, which=which, failure=failure, again=again):
                self.metrics.attempt_failed(event)
                if self.failures:
                    self.failures.record(event)
                if not event.in_pause:
                    finally_failed = ", and it is not tried again" if not again else ""
                    self.progress.say(f"tar {tar}: {which}{finally_failed}: {failure.text}")
                if not again:
                    self.failed[tar] = failure.line
                    self.has_news = True
            case News(text=text):
                self.progress.say(text)
            case UnderWay():
                self.under_way = event
                self.rate.add(self.samples_in + event.reported)
                self.metrics.under_way_now(event)
                self.metrics.speed(self.rate.per_second, self._eta)
                if self.has_news or self.progress.is_due:
                    self._show()

    def _show(self) -> None:
        self.has_news = False
        figures = self.figures()
        text = "{images_per_second} img/s  {accepted} accepted  {rejected} rejected".format(**figures)
        self.progress.show(self.done + len(self.failed), text, figures)

    def figures(self) -> dict[str, int | float | None]:
        """All of it. Tars under way count for the share of a mean tar that they have taken in."""
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
        mean = self.samples_in / self.done if self.done else 0.0
        finished = self.done + len(self.failed)
        return eta(self.total, finished, mean, self.under_way.reported, self.rate.per_second)
