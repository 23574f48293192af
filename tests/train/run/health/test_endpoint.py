"""Metrics served to Prometheus during training, and the error for an unusable address."""

import itertools
import math
import socket
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shards.base.errors import RequestError
from tests.ranks import free_port
from tests.runs import train_fields, write_config
from train.__main__ import run as command
from train.run.health.endpoint import PREFIX, RunCollector
from train.run.health.heartbeat import HeartbeatReporter
from train.run.reporting.json_lines import read_json_lines
from train.step import StepResult, TrainStep


def scrape(port: int) -> dict[str, float]:
    """Return metric name without PREFIX → value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return {sample.name.removeprefix(PREFIX): sample.value for family in families for sample in family.samples}


def test_prometheus_gets_the_values_of_the_log(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, scrapes, train_step = free_port(), list[dict[str, float]](), TrainStep.__call__

    def scrape_and_train(self: TrainStep, batch: Any, step: int) -> StepResult:
        scrapes.append(scrape(port))
        return train_step(self, batch, step)

    monkeypatch.setattr(TrainStep, "__call__", scrape_and_train)
    fields = train_fields(latents, tmp_path / "run", log={"metrics_at": f"127.0.0.1:{port}"})
    fields["checkpoint"] |= {"asynchronous": False}
    command(["--config", str(write_config(tmp_path, fields))])
    assert "loss" not in scrapes[0] and scrapes[0]["max_steps"] == 6
    assert [each["step"] for each in scrapes] == [0, 1, 2, 3, 4, 5]
    assert [each["checkpoint_step"] for each in scrapes] == [0, 0, 2, 2, 4, 4]
    assert [math.isnan(each["checkpoint_seconds"]) for each in scrapes] == [True, True, False, False, False, False]
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    for line, each in zip(lines, scrapes[1:], strict=False):
        for name in ("loss", "grad_norm", "images_per_second", "data_wait"):
            assert each[name] == line[name]
        assert each["skipped_steps_total"] == line["skipped_steps"] and each["alarms_total"] == line["alarms"]
    stages = [each["rank_stages_total"] for each in scrapes]
    assert all(b > a for a, b in itertools.pairwise(stages))
    assert 0 <= scrapes[5]["heartbeat_age_seconds"] < 60 and scrapes[5]["checkpoint_age_seconds"] < 600
    with pytest.raises(OSError):
        scrape(port)  # the endpoint is closed


def test_an_unusable_address_is_refused(latents: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        fields = train_fields(latents, tmp_path / "run", log={"metrics_at": address})
        with pytest.raises(
            RequestError, match=rf"Metrics cannot be served at {address} \(log\.metrics_at\): .*different port"
        ):
            command(["--config", str(write_config(tmp_path, fields))])
    with pytest.raises(RequestError, match=r"log\.metrics_at"):
        command(["--config", str(write_config(tmp_path, fields | {"log": {"metrics_at": "9400"}}))])


def test_loading_time_never_decreases() -> None:
    """It is counted up to the last heartbeat only, because the rank may have received its batch since."""
    heartbeat = HeartbeatReporter()
    heartbeat.enter(1, "loading")
    began = heartbeat.status.stage_began
    status = heartbeat.status._replace(stage_began=began - 500, sent=began)
    heartbeat.read_statuses = lambda: [status]  # type: ignore[method-assign]
    log = SimpleNamespace(max_steps=1, last_fields={})
    writer = SimpleNamespace(saved=None, seconds=0.0, config=SimpleNamespace(every=1))
    collector = RunCollector(heartbeat, log, writer, 0)  # type: ignore[arg-type]
    (seconds,) = (m.samples[0].value for m in collector.collect() if m.name.endswith("rank_loading_seconds"))
    assert seconds == 500
