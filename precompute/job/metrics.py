"""A job's Prometheus metrics, which the metrics endpoint on the driver's node serves as `ray_latentmill_…`.

docs/reference/metrics.md describes them, and deploy/prometheus/alerts.yml has alert rules for them.
"""

from ray.util.metrics import Counter, Gauge

from cluster.fleet import Failed, UnderWay
from shards.root.committed import TarReceipts

UNKNOWN = "unknown"
"""Node label for an attempt that failed because its worker could not start."""


class JobMetrics:
    """All metrics of a job. Ray appends `_total` to the counters' names."""

    def __init__(self) -> None:
        self.images_in = Counter("latentmill_images_in", "Samples of committed tars", ("node",))
        self.accepted = Counter("latentmill_images_accepted", "Samples stored in at least one bucket", ("node",))
        self.rejected = Counter("latentmill_images_rejected", "Samples stored in no bucket", ("reason", "node"))
        self.tars = Counter("latentmill_shards", "Tars that were committed or have failed for good", ("outcome",))
        self.attempts = Counter("latentmill_attempts", "Attempts that have ended", ("cause", "node"))
        self.seconds = Counter("latentmill_stage_seconds", "Seconds per stage of committed tars", ("stage", "node"))
        self.running = Gauge("latentmill_shards_in_flight", "Tars that run or wait for a worker")
        self.under_way = Gauge("latentmill_images_under_way", "Samples processed from tars that are not committed yet")
        self.paused = Gauge("latentmill_paused", "1 while the job is waiting for an outage to end")
        self.rate = Gauge("latentmill_images_per_second", "Samples processed per second, over the last 100 s")
        self.eta = Gauge("latentmill_eta_seconds", "Estimated seconds until the job ends; -1 if unknown")

    def tar_done(self, receipts: TarReceipts, node: str | None) -> None:
        """Count a committed tar: its samples, the seconds spent in each stage, and the successful attempt."""
        where = {"node": node or UNKNOWN}
        _add(self.images_in, receipts.samples_in, where)
        _add(self.accepted, receipts.encoded, where)
        last = max(receipts.parts.values(), key=lambda part: (part.started, part.seconds["total"]))
        uploads = [part.seconds.get("upload", 0.0) for part in receipts.parts.values() if part.token == last.token]
        for stage, seconds in {**last.seconds, "upload": sum(uploads)}.items():
            _add(self.seconds, seconds, {"stage": stage, **where})
        for reason, count in receipts.rejected.items():
            _add(self.rejected, count, {"reason": reason, **where})
        _add(self.attempts, 1, {"cause": "none", **where})
        _add(self.tars, 1, {"outcome": "done"})

    def attempt_failed(self, failed: Failed) -> None:
        """Count a failed attempt and, if the job gives up on its tar, the failed tar."""
        _add(self.attempts, 1, {"cause": cause(failed), "node": failed.node or UNKNOWN})
        if not failed.again:
            _add(self.tars, 1, {"outcome": "failed"})

    def now(self, event: UnderWay, rate: float, eta: float | None) -> None:
        """Set the gauges for work in flight, speed and remaining time."""
        self.running.set(event.attempts)
        self.under_way.set(event.reported)
        self.paused.set(int(event.paused))
        self.rate.set(rate)
        self.eta.set(-1 if eta is None else eta)


def cause(failed: Failed) -> str:
    """Classify a failed attempt as `outage`, `lost`, `damaged` or `error`."""
    failure = failed.failure
    if failure.outage is not None:
        return "outage"
    if failure.is_lost:
        return "lost"
    return "damaged" if failure.is_final else "error"


def _add(counter: Counter, value: float, tags: dict[str, str]) -> None:
    if value:  # Ray rejects increments of zero
        counter.inc(value, tags)
