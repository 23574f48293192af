"""Debian's Prometheus with the alert rules and shortened windows, for tests of firing alerts."""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.ranks import free_port

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
STAGE_1, STAGE_2 = yaml.safe_load(ALERTS.read_text())["groups"]


class Prometheus:
    """A Prometheus server that scrapes one target every second. Rules fire without a delay."""

    def __init__(self, folder: Path, target: str, shorter: Mapping[str, str]):
        """Prepare the server. `shorter` maps patterns to replacements in the rules' expressions."""
        folder.mkdir()
        rules = re.sub(r"for: \w+", "for: 1s", ALERTS.read_text())
        for pattern, replacement in shorter.items():
            rules, count = re.subn(pattern, replacement, rules)
            assert count, pattern
        (folder / "alerts.yml").write_text(rules)
        scrape = {"job_name": "mill", "static_configs": [{"targets": [target]}]}
        times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config = {"global": times, "rule_files": ["alerts.yml"], "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        address = f"127.0.0.1:{free_port()}"
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], cwd=folder, stdout=log, stderr=log
            )
        self.url = f"http://{address}/api/v1/query"

    def __enter__(self) -> "Prometheus":
        wait_until(lambda: not self.query("vector(1) == 0"), "Prometheus is not up")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current series of an expression."""
        with urllib.request.urlopen(f"{self.url}?{urllib.parse.urlencode({'query': expression})}", timeout=10) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return found

    def fires(self, alert: str, **labels: str) -> bool:
        """Return whether the alert fires now."""
        wanted = {"alertname": alert, "alertstate": "firing"} | labels
        selector = ", ".join(f'{name}="{value}"' for name, value in wanted.items())
        return bool(self.query(f"ALERTS{{{selector}}}"))

    def fired(self, alert: str) -> bool:
        """Return whether the alert has fired since the test began."""
        return bool(self.query(f'last_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[1h])'))

    def await_alert(self, alert: str, **labels: str) -> None:
        """Wait until the alert fires."""
        wait_until(lambda: self.fires(alert, **labels), f"{alert} did not fire")

    def await_silence(self, *alerts: str) -> None:
        """Wait until none of these alerts fires."""
        for alert in alerts:
            wait_until(lambda: not self.fires(alert), f"{alert} did not clear")  # noqa: B023


def wait_until(true: Callable[[], object], what: str, seconds: float = 240) -> None:
    """Poll until the condition holds; an OSError means that the server is not reachable yet."""
    end = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except OSError:
            pass
        assert time.monotonic() < end, what
        time.sleep(0.5)
