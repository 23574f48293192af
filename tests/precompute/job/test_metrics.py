"""Prometheus metrics of a job. tests/deploy/test_alerts.py compares their names with the docs and the alert rules."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.metrics import Counter

from cluster.fleet import Failed, UnderWay
from cluster.pool import Failure
from precompute.job.metrics import JobMetrics, cause
from shards.base.errors import Outage


def test_each_failed_attempt_has_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, float, dict[str, str]]] = []
    monkeypatch.setattr(Counter, "inc", lambda self, value, tags: counted.append((self.info["name"], value, tags)))

    def failed(again: bool = True, outage: Outage | None = None, lost: bool = False, final: bool = False) -> Failed:
        return Failed("00000", None, "", Failure(lost, final, "", "", outage=outage), again)

    assert cause(failed(outage=Outage("no"), lost=True)) == "outage"
    assert [cause(failed(lost=True)), cause(failed(final=True)), cause(failed())] == ["lost", "damaged", "error"]
    JobMetrics().attempt_failed(failed(again=False))
    assert counted == [
        ("latentmill_attempts", 1, {"cause": "error", "node": "unknown"}),
        ("latentmill_shards", 1, {"outcome": "failed"}),
    ]


def test_a_tar_counts_by_node_and_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[tuple[str, str], float] = {}

    def inc(self: Counter, value: float, tags: dict[str, str]) -> None:
        counted[self.info["name"], ",".join(tags.values())] = value

    monkeypatch.setattr(Counter, "inc", inc)
    parts = {
        "64x64": SimpleNamespace(started="", seconds={"fetch": 1.0, "upload": 2.0, "total": 8.0}, token="b"),
        "128x128": SimpleNamespace(started="", seconds={"fetch": 1.0, "upload": 3.0, "total": 11.0}, token="b"),
        "32x32": SimpleNamespace(started="", seconds={"upload": 9.0, "total": 10.0}, token="a"),  # another attempt's
    }
    books: Any = SimpleNamespace(samples_in=20, encoded=15, rejected={"too_small": 5}, parts=parts)
    metrics = JobMetrics()
    metrics.tar_done(books, "10.0.0.7")
    assert counted == {
        ("latentmill_images_in", "10.0.0.7"): 20,
        ("latentmill_images_accepted", "10.0.0.7"): 15,
        ("latentmill_images_rejected", "too_small,10.0.0.7"): 5,
        ("latentmill_stage_seconds", "fetch,10.0.0.7"): 1.0,
        ("latentmill_stage_seconds", "upload,10.0.0.7"): 5.0,
        ("latentmill_stage_seconds", "total,10.0.0.7"): 11.0,
        ("latentmill_attempts", "none,10.0.0.7"): 1,
        ("latentmill_shards", "done"): 1,
    }


def test_a_pause_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    gauges: dict[str, float] = {}
    monkeypatch.setattr("ray.util.metrics.Gauge.set", lambda self, value: gauges.update({self.info["name"]: value}))
    metrics = JobMetrics()
    metrics.now(UnderWay(3, 70, paused=True), 0.0, None)
    assert gauges == {
        "latentmill_shards_in_flight": 3,
        "latentmill_images_under_way": 70,
        "latentmill_paused": 1,
        "latentmill_images_per_second": 0,
        "latentmill_eta_seconds": -1,
    }
