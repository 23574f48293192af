"""A real job with faults, under a real Prometheus: every rule finds its series; alerts fire, and clear."""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import psutil
import pytest
import ray
import yaml
from moto.server import ThreadedMotoServer

from precompute.cluster.ray_cluster import start_ray
from precompute.config import describe_encoding, make_recipe
from precompute.input.tars import TarsConfig, list_tars
from precompute.job.ledger import Ledger
from precompute.job.run import run_job
from shards.open import open_store
from shards.root.shared import create_root
from tests.conftest import SIZES, folder_of, precompute_config
from tests.tiny import make_samples, make_tar

pytestmark = [pytest.mark.slow, pytest.mark.prometheus]
ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
NUM_TARS = 6
CUT, BROKEN = 4, 5


class Prometheus:
    """Debian's, on the rules with windows of 40 s in place of half an hour, and no wait."""

    def __init__(self, folder: Path, target: str):
        rules = re.sub(r"\[(30m|1h)\]", "[40s]", ALERTS.read_text()).replace("offset 1h", "offset 40s")
        (folder / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 1s", rules))
        scrape = {"job_name": "ray", "static_configs": [{"targets": [target]}]}
        times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config = {"global": times, "rule_files": ["alerts.yml"], "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        log = (folder / "log").open("wb")
        address = "127.0.0.1:19091"
        self.process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], cwd=folder, stdout=log, stderr=log
        )
        self.url = f"http://{address}/api/v1/query"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        with urllib.request.urlopen(f"{self.url}?{urllib.parse.urlencode({'query': expression})}", timeout=10) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return found

    def fires(self, alert: str) -> bool:
        """Whether it does."""
        return bool(self.query(f'ALERTS{{alertname="{alert}", alertstate="firing"}}'))

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(60)


def wait_until(true: Callable[[], object], what: str, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except OSError:
            pass  # Prometheus is not up yet
        assert time.monotonic() < end, what
        time.sleep(0.5)


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")
    # signals are the main thread's, and the job is not in it here
    monkeypatch.setattr("precompute.cluster.fleet.StopSignal", lambda *_: nullcontext(SimpleNamespace(received=False)))
    yield
    ray.shutdown()


def make_input(folder: Path) -> None:
    """Sound tars, one that lost samples, and one of which nothing is left."""
    for number in range(NUM_TARS):
        make_tar(folder, f"{number:05d}", make_samples(number, 30, SIZES))
    cut, broken = (folder / f"{number:05d}.tar" for number in (CUT, BROKEN))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    broken.write_bytes(b"\0" * 10240)


def test_a_job_with_faults_under_prometheus(
    local_ray: None, models: Path, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shutil.which("prometheus"), "apt-get install prometheus"
    make_input(tmp_path / "tars")
    fsspec.filesystem("s3").put(f"{tmp_path / 'tars'}/", f"{s3}/tars/", recursive=True)
    config = precompute_config(models, tmp_path / "tars", tmp_path / "root")
    workers = config.workers.model_copy(update={"max_in_flight": 1, "tars_at_once": 1, "backoff": 0.1})
    changes = {"input": f"{s3}/tars", "tars": TarsConfig(policy="salvage"), "workers": workers}
    config = config.model_copy(update=changes)
    encoding, tars = describe_encoding(config), list_tars(config.input)
    create_root(open_store(config.output), encoding)
    # of the same buckets, and a port that comes and goes
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    start_ray(config.workers)
    target = f"127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}"
    (tmp_path / "prometheus").mkdir()
    prometheus = Prometheus(tmp_path / "prometheus", target)
    results: list[Ledger] = []
    recipe = make_recipe(config, encoding)
    job = threading.Thread(target=lambda: results.append(run_job(tars, recipe, config.output, config.workers)))
    job.start()
    try:
        wait_until(lambda: list((folder_of(config) / "commits").rglob("*.json")), "nothing was committed")
        ours = psutil.Process().children(recursive=True)
        next(process for process in ours if "ray::Hands" in "".join(process.cmdline())).kill()
        server.stop()
        wait_until(lambda: prometheus.fires("LatentmillPaused"), "the pause did not fire")
        server = ThreadedMotoServer(ip_address=host, port=port)
        server.start()
        job.join(400)
        assert results and results[0].failed.keys() == {f"{BROKEN:05d}"}, results and results[0].failed
        wait_until(lambda: prometheus.fires("LatentmillTarsFailed"), "the failed tar did not fire")
        for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
            for series in re.findall(r"ray_\w+(?:\{[^}]*\})?", rule["expr"]):
                assert prometheus.query(series), f"{rule['alert']}: {series}"
        wait_until(lambda: not prometheus.fires("LatentmillPaused"), "the pause did not clear")
        wait_until(lambda: not prometheus.fires("LatentmillTarsFailed"), "the failed tar did not clear")
    finally:
        prometheus.stop()
        server.stop()
