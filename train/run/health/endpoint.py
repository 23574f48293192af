"""Prometheus endpoint of a run: the main process serves the metrics of all ranks at `log.metrics_at`.

docs/reference/metrics.md explains every metric, and deploy/prometheus/alerts.yml contains alert rules that use them.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shards.base.errors import RequestError
from train.run.checkpoints.writer import CheckpointWriter
from train.run.health.heartbeat import LOADING, HeartbeatReporter, RankStatus
from train.run.reporting.log import Log

PREFIX = "latentmill_train_"

# name → help text; metrics whose names end with _total are counters, and all others are gauges
LINE_METRICS = {
    "loss": "Mean loss between the last two lines of metrics.jsonl",
    "grad_norm": "Largest gradient norm between the last two lines of metrics.jsonl, before clipping",
    "images_per_second": "Images per second over all processes, between the last two lines of metrics.jsonl",
    "data_wait": "Fraction of time that the main process waited for its loader, between the last two lines",
    "skipped_steps_total": "Steps with a non-finite loss or gradient",
    "alarms_total": "Loss alarms",
}
RUN_METRICS = {
    "step": "Completed steps",
    "max_steps": "Steps of the whole run",
    "checkpoint_step": "Step from which the run would resume",
    "checkpoint_every": "Steps between checkpoints",
    "checkpoint_age_seconds": "Time since the newest checkpoint was written, or since training started",
    "checkpoint_seconds": "Time that writing the newest checkpoint took",
}
RANK_METRICS = {
    "heartbeat_age_seconds": "Time since the last heartbeat of the rank",
    "rank_stages_total": "Stages that the rank has entered (loading, training, …); the order is the same for all ranks",
    "rank_still_seconds": "Time since the rank entered its current stage",
    "rank_loading_seconds_total": "Time that the rank has waited for batches",
}


class RunCollector(Collector):
    """Collector that reads a run's current metrics at each scrape."""

    def __init__(self, heartbeat: HeartbeatReporter, log: Log, writer: CheckpointWriter, step: int):
        """`step`: step from which this launch started."""
        self.heartbeat, self.log, self.writer = heartbeat, log, writer
        self.first_step, self.start = step, time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. The Prometheus client calls this in a separate thread for every scrape."""
        now, fields = time.time(), self.log.last_fields
        for name, text in LINE_METRICS.items():
            field = name.removesuffix("_total")
            if field in fields:  # absent before the first line of metrics.jsonl
                yield make_metric(name, text, (), {(): fields[field]})

        saved_step, saved_at = self.writer.saved or (self.first_step, self.start)
        of_run = {
            "step": self.heartbeat.status.step,
            "max_steps": self.log.max_steps,
            "checkpoint_step": saved_step,
            "checkpoint_every": self.writer.config.every,
            "checkpoint_age_seconds": now - saved_at,
            "checkpoint_seconds": self.writer.seconds,
        }
        for name, text in RUN_METRICS.items():
            yield make_metric(name, text, (), {(): of_run[name]})

        statuses = [status for status in self.heartbeat.read_statuses() if status is not None]
        by_rank = {(str(status.rank), status.host): rank_values(status, now) for status in statuses}
        for name, text in RANK_METRICS.items():
            yield make_metric(
                name, text, ("rank", "host"), {labels: values[name] for labels, values in by_rank.items()}
            )


def rank_values(status: RankStatus, now: float) -> dict[str, float]:
    """Return a dict from metric name to value for one rank at time `now`."""
    # count only the time up to the last heartbeat: the rank may have received its batch since, and counting beyond it
    # could make the counter decrease later
    loading_now = status.sent - status.stage_began if status.stage == LOADING else 0.0
    return {
        "heartbeat_age_seconds": max(0.0, now - status.sent),
        "rank_stages_total": status.num_stages,
        "rank_still_seconds": max(0.0, now - status.stage_began),
        "rank_loading_seconds_total": status.loading_seconds + loading_now,
    }


def make_metric(
    name: str, text: str, label_names: tuple[str, ...], values: dict[tuple[str, ...], float | None]
) -> Metric:
    """Build a counter if the name ends with _total, otherwise a gauge.

    Args:
        label_names: names of the labels.
        values: label values → value of the metric. None becomes NaN.
    """
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric = kind(f"{PREFIX}{name}", text, labels=label_names)
    for labels, value in values.items():
        metric.add_metric(labels, math.nan if value is None else value)
    return metric


@contextmanager
def serve_metrics(address: str | None, collector: RunCollector) -> Iterator[None]:
    """Serve metrics to Prometheus while the context is open.

    Args:
        address: `HOST:PORT`; None: metrics are not served.

    Raises:
        RequestError: the address belongs to another machine, or the port is in use.
    """
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(int(port), host, registry)
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"Metrics cannot be served at {address} (log.metrics_at): {error}. Choose a different port or an address "
            f"of this machine, such as 0.0.0.0 for all of its addresses, or set log.metrics_at to null."
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
