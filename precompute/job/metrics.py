"""A job's figures for Prometheus, which the metrics endpoint of the driver's node serves under `ray_latentmill_…`.

docs/reference/metrics.md says what each means, and deploy/prometheus/alerts.yml has rules on them.
"""

from ray.util.metrics import Counter, Gauge

from cluster.fleet import Failed, UnderWay
from shards.root.committed import TarReceipts

UNKNOWN = "unknown"
"""Node of an attempt that was lost before it said where it is."""


class Metrics:
    """All of them. Ray adds `_total` to the counters' names."""

    def __init__(self) -> None:
        self.images_in = Counter("latentmill_images_in", "Samples of committed tars", ("node",))
        self.accepted = Counter("latentmill_images_accepted", "Of these, in at least one bucket", ("node",))
        self.rejected = Counter("latentmill_images_rejected", "Of these, in no bucket", ("reason", "node"))
        self.tars = Counter("latentmill_shards", "Tars that are done with", ("outcome",))
        self.attempts = Counter("latentmill_attempts", "Attempts that have ended", ("cause", "node"))
        self.seconds = Counter("latentmill_stage_seconds", "Seconds of committed tars, by stage", ("stage", "node"))
        self.running = Gauge("latentmill_shards_in_flight", "Tars handed to workers")
        self.under_way = Gauge("latentmill_images_under_way", "Samples taken in of tars that are not committed")
        self.paused = Gauge("latentmill_paused", "1 while the job waits for an outage to end")
        self.rate = Gauge("latentmill_images_per_second", "Samples taken in, over the last 100 s")
        self.eta = Gauge("latentmill_eta_seconds", "Until the job ends, at that rate; -1 where there is none")

    def tar_done(self, books: TarReceipts, node: str | None) -> None:
        """Count what a tar's receipts account for."""
        where = {"node": node or UNKNOWN}
        _add(self.images_in, books.samples_in, where)
        _add(self.accepted, books.encoded, where)
        last = max(books.parts.values(), key=lambda part: (part.started, part.seconds["total"]))
        uploads = [part.seconds.get("upload", 0.0) for part in books.parts.values() if part.token == last.token]
        for stage, seconds in {**last.seconds, "upload": sum(uploads)}.items():
            _add(self.seconds, seconds, {"stage": stage, **where})
        for reason, count in books.rejected.items():
            _add(self.rejected, count, {"reason": reason, **where})
        _add(self.attempts, 1, {"cause": "none", **where})
        _add(self.tars, 1, {"outcome": "done"})

    def attempt_failed(self, failed: Failed) -> None:
        """Count a failed attempt, and its tar where it is given up."""
        _add(self.attempts, 1, {"cause": cause(failed), "node": failed.node or UNKNOWN})
        if not failed.again:
            _add(self.tars, 1, {"outcome": "failed"})

    def under_way_now(self, event: UnderWay) -> None:
        """What is under way."""
        self.running.set(event.attempts)
        self.under_way.set(event.reported)
        self.paused.set(int(event.paused))

    def speed(self, rate: float, eta: float | None) -> None:
        """How fast it goes."""
        self.rate.set(rate)
        self.eta.set(-1 if eta is None else eta)


def cause(failed: Failed) -> str:
    """Of a failed attempt, in a word: `outage`, `lost`, `damaged` or `error`."""
    failure = failed.failure
    if failure.outage is not None:
        return "outage"
    if failure.is_lost:
        return "lost"
    return "damaged" if failure.is_final else "error"


def _add(counter: Counter, value: float, tags: dict[str, str]) -> None:
    if value:  # Ray refuses to add nothing
        counter.inc(value, tags)
