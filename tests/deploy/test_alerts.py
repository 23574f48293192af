"""Metrics of both stages: each is documented, alert rules use no others, and every rule is tested."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric as Family
from ray.util.metrics import Counter, Metric

from precompute.job.metrics import JobMetrics
from train.run.health.endpoint import LINE_METRICS, PREFIX, RANK_METRICS, RUN_METRICS, RunCollector
from train.run.health.heartbeat import HeartbeatReporter

ROOT = Path(__file__).parents[2]
GROUPS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
NAME = r"(?:ray_)?latentmill_\w+"


def stage_1_metrics() -> dict[str, set[str]]:
    """Return the name that Prometheus shows → label names."""
    metrics = [metric for metric in vars(JobMetrics()).values() if isinstance(metric, Metric)]
    return {
        f"ray_{metric.info['name']}{'_total' if isinstance(metric, Counter) else ''}": set(metric.info["tag_keys"])
        for metric in metrics
    }


def stage_2_metrics() -> dict[str, set[str]]:
    """Return the name → label names, for a run that has written a line of metrics.jsonl."""
    fields = {name.removesuffix("_total"): 1.0 for name in LINE_METRICS} | {"lr": 1e-4, "val_loss": 1.0}
    log: Any = SimpleNamespace(max_steps=9, last_fields=fields)
    writer: Any = SimpleNamespace(saved=None, seconds=None, config=SimpleNamespace(every=3))
    families: list[Family] = list(RunCollector(HeartbeatReporter(), log, writer, 0).collect())
    assert len({family.name for family in families}) == len(families)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


EXPORTED = stage_1_metrics() | stage_2_metrics()


def test_every_metric_of_a_run_is_served() -> None:
    served = {name.removeprefix(PREFIX) for name in stage_2_metrics()}
    assert served == LINE_METRICS.keys() | RUN_METRICS.keys() | RANK_METRICS.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_uses_only_exported_metrics_and_labels(rule: dict[str, Any]) -> None:
    named = re.findall(rf"({NAME})(?:\{{([^}}]*)\}})?", rule["expr"])
    assert named
    for name, labels in named:
        assert name in EXPORTED, f"{rule['alert']}: {name}"
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", labels)) <= EXPORTED[name], f"{rule['alert']}: {name}"
    for labels in re.findall(r"(?:by|on) \(([\w, ]+)\)", rule["expr"]):
        for label in set(labels.split(", ")) - {"instance"}:  # added by Prometheus
            assert all(label in EXPORTED[name] for name, _ in named), rule["alert"]


def test_the_reference_names_every_metric_and_alert_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = re.findall(rf"^\| `({NAME}?)(?:\{{([\w, ]+)\}})?` \|", page, re.MULTILINE)
    assert {name: set(filter(None, labels.split(", "))) for name, labels in rows} == EXPORTED
    incidents = (ROOT / "docs" / "how-to" / "incidents.md").read_text()
    assert re.findall(r"^\| (Latentmill\w+) \|", incidents, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for fires in (True, False):
        assert {case["alertname"] for case in cases if bool(case.get("exp_alerts")) == fires} == {
            rule["alert"] for rule in RULES
        }
