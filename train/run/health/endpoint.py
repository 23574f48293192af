"""A run's figures for Prometheus, of all ranks at one address of the main process's machine.

docs/reference/metrics.md says what each means, and deploy/prometheus/alerts.yml has rules on them.
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
from train.run.health.heartbeat import HeartbeatReporter
from train.run.reporting.log import Log

OF_LINES = {
    "loss": "Mean since the line of metrics.jsonl before the last",
    "grad_norm": "Of the last step that was logged, before clipping",
    "images_per_second": "Over all processes, between the last two lines",
    "data_wait": "Share of that time in which the main process waited for its loader",
    "skipped_steps_total": "Steps whose loss or gradient was not finite",
    "alarms_total": "Loss alarms",
}
OF_RUN = {
    "step": "Steps that are done",
    "max_steps": "Steps of the whole run",
    "checkpoint_step": "From which the run would go on",
    "checkpoint_every": "Steps from one checkpoint to the next",
    "checkpoint_age_seconds": "Since the newest checkpoint was written, or since the launch, if it wrote none",
    "checkpoint_seconds": "That the newest checkpoint took to write",
}
OF_RANKS = {
    "heartbeat_age_seconds": "Since the rank's last sign of life",
    "rank_stages_total": "How many things the rank has been at (loading, training, …): all do the same, in one order",
    "rank_still_seconds": "Since the rank began what it is at",
    "rank_loading_seconds_total": "That the rank has waited for batches",
}
PREFIX = "latentmill_train_"


class Figures(Collector):
    """All of them, as they are when they are asked for; what is not finite is NaN."""

    def __init__(self, heartbeat: HeartbeatReporter, log: Log, writer: CheckpointWriter, step: int):
        """`step`: after which the launch began."""
        self.heartbeat, self.log, self.writer = heartbeat, log, writer
        self.saved = (step, time.time())

    def collect(self) -> Iterator[Metric]:
        """Asked for by Prometheus, in a thread of the endpoint."""
        beats = [beat for beat in self.heartbeat.everyone() if beat is not None]
        now, (saved_step, saved_at) = time.time(), self.writer.saved or self.saved
        of_run = {
            "step": self.heartbeat.beat.step,
            "max_steps": self.log.max_steps,
            "checkpoint_step": saved_step,
            "checkpoint_every": self.writer.config.every,
            "checkpoint_age_seconds": now - saved_at,
            "checkpoint_seconds": self.writer.seconds,
        }
        for about, values in ((OF_RUN, of_run), (OF_LINES, self.log.newest)):
            for name, value in values.items():
                if name in about or f"{name}_total" in about:
                    yield family(about, name, (), {(): value})
        for name, of_rank in {
            "heartbeat_age_seconds": lambda beat: max(0.0, now - beat.told),
            "rank_stages": lambda beat: beat.passed,
            "rank_still_seconds": lambda beat: max(0.0, now - beat.began),
            "rank_loading_seconds": lambda beat: beat.loading + (beat.told - beat.began) * (beat.at == "loading"),
        }.items():
            yield family(
                OF_RANKS, name, ("rank", "host"), {(str(beat.rank), beat.host): of_rank(beat) for beat in beats}
            )


def family(
    about: dict[str, str], name: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float | None]
) -> Metric:
    """One metric; a counter, where `about` has it with `_total`."""
    kind, text = (GaugeMetricFamily, about[name]) if name in about else (CounterMetricFamily, about[f"{name}_total"])
    metric = kind(f"{PREFIX}{name}", text, labels=labels)
    for found, value in values.items():
        metric.add_metric(found, math.nan if value is None else value)
    return metric


@contextmanager
def served(address: str | None, figures: Figures) -> Iterator[None]:
    """Figures are there for Prometheus while this is open. `address`: `HOST:PORT`; None: nowhere.

    Raises:
        RequestError: the address is not this machine's, or is taken.
    """
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(figures)
    try:
        server, thread = start_http_server(int(port), host, registry)
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"log.metrics_at {address} cannot be listened at: {error}. Give another port, an address of this machine "
            f"(0.0.0.0: all), or null."
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
