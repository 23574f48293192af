"""A real job with faults, under a real Prometheus: every rule finds its series; each alert fires, and clears."""

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import fsspec
import psutil
import pytest
import ray
from moto.server import ThreadedMotoServer

from cluster.fleet import Failed, UnderWay
from cluster.pool import Failure
from cluster.start import start_ray
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.input.find import find_input
from precompute.input.unit import InputConfig
from precompute.job.ledger import Ledger
from precompute.job.metrics import JobMetrics
from precompute.job.run import run_job
from shards.open import open_store
from shards.root.shared import create_root
from tests.faults.prometheus import STAGE_1, Prometheus, wait_until
from tests.fixtures import SIZES, folder_of, precompute_config
from tests.tiny import make_samples, make_tar

pytestmark = [pytest.mark.slow, pytest.mark.prometheus]
SHORTER = {r"\[(30m|1h)\]": "[40s]", "offset 1h": "offset 40s"}
OF_THE_JOB = {f"Latentmill{name}" for name in ("Paused", "TarsFailed", "AttemptsLost", "Rejects", "DeviceIdle")}
OF_FIGURES = {f"Latentmill{name}" for name in ("Stalled", "NodeFails")}
NUM_TARS = 16
CUT, BROKEN = (1, 14), 15


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")
    # only the main thread handles signals, and the job is in a different thread here
    monkeypatch.setattr("cluster.fleet.StopSignal", lambda *_: nullcontext(SimpleNamespace(received=False)))
    yield
    ray.shutdown()


def make_input(folder: Path) -> None:
    """Make intact tars, two that lost samples, and one without any intact sample."""
    for number in range(NUM_TARS):
        make_tar(folder, f"{number:05d}", make_samples(number, 30, SIZES))
    for number in CUT:
        cut = folder / f"{number:05d}.tar"
        cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (folder / f"{BROKEN:05d}.tar").write_bytes(b"\0" * 10240)


def commits(config: PrecomputeConfig) -> list[Path]:
    """Return the names of the receipts."""
    return list((folder_of(config) / "commits").rglob("*.json"))


def kill_worker() -> None:
    """Kill the only worker with SIGKILL; the tar that it is encoding is lost with it."""
    ours = psutil.Process().children(recursive=True)
    next(process for process in ours if "ray::WorkerActor" in "".join(process.cmdline())).kill()


def test_a_job_with_faults_under_prometheus(
    local_ray: None, models: Path, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shutil.which("prometheus"), "apt-get install prometheus"
    make_input(tmp_path / "tars")
    fsspec.filesystem("s3").put(f"{tmp_path / 'tars'}/", f"{s3}/tars/", recursive=True)
    config = precompute_config(models, tmp_path / "tars", tmp_path / "root")
    workers = config.workers.model_copy(update={"max_in_flight": 1, "tars_at_once": 1, "backoff": 0.1})
    changes = {"input": f"{s3}/tars", "tars": InputConfig(policy="salvage"), "workers": workers}
    config = config.model_copy(update=changes)
    encoding, tars = describe_encoding(config), find_input(config.input).units()
    create_root(open_store(config.output), encoding)
    # serves the same buckets, on a port that comes and goes
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    start_ray(config.workers)
    target = f"127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}"
    results: list[Ledger] = []
    recipe = make_recipe(config, encoding)
    job = threading.Thread(target=lambda: results.append(run_job(tars, recipe, config.output, config.workers)))
    job.start()
    try:
        with Prometheus(tmp_path / "prometheus", target, SHORTER) as prometheus:
            wait_until(lambda: commits(config), "nothing was committed")
            kill_worker()
            server.stop()
            prometheus.await_alert("LatentmillPaused")
            done = len(commits(config))
            server = ThreadedMotoServer(ip_address=host, port=port)
            server.start()
            wait_until(lambda: len(commits(config)) > done, "it does not go on")
            kill_worker()  # increase() misses the first event of a kind, because its counter did not exist before
            job.join(400)
            assert results and results[0].failed.keys() == {f"{BROKEN:05d}"}, results and results[0].failed
            for alert in OF_THE_JOB:
                wait_until(lambda: prometheus.fired(alert), f"{alert} did not fire")  # noqa: B023
            for rule in STAGE_1["rules"]:
                for series in re.findall(r"ray_\w+(?:\{[^}]*\})?", rule["expr"]):
                    assert prometheus.query(series), f"{rule['alert']}: {series}"
            prometheus.await_silence(*OF_THE_JOB)
            stand_still(results[0].metrics, prometheus)
            fail_on_one_node(results[0].metrics, prometheus)
    finally:
        server.stop()


def stand_still(metrics: JobMetrics, prometheus: Prometheus) -> None:
    """Set the job's figures to those of workers that have tars but make no progress."""

    def stalled() -> bool:
        metrics.now(UnderWay(3, 0), 0.0, None)  # repeatedly, like a job, because Ray drops gauges after two seconds
        return prometheus.fires("LatentmillStalled")

    wait_until(stalled, "LatentmillStalled did not fire")

    def moving() -> bool:
        metrics.now(UnderWay(3, 0), 500.0, 60.0)
        return bool(prometheus.query("ray_latentmill_images_per_second == 500")) and not prometheus.fires(
            "LatentmillStalled"
        )

    wait_until(moving, "LatentmillStalled did not clear")


def fail_on_one_node(metrics: JobMetrics, prometheus: Prometheus) -> None:
    """Set the figures to those of a node on which every attempt raises."""
    failed = Failed("00000", "10.0.0.7", "attempt 1 of 3 failed", Failure(False, False, "no", "no"), again=True)
    metrics.attempt_failed(failed)
    wait_until(lambda: prometheus.query('ray_latentmill_attempts_total{node="10.0.0.7"}'), "the node is not there")
    for _ in range(7):
        metrics.attempt_failed(failed)
    prometheus.await_alert("LatentmillNodeFails", node="10.0.0.7")
    prometheus.await_silence("LatentmillNodeFails")


def test_every_rule_is_here() -> None:
    assert {rule["alert"] for rule in STAGE_1["rules"]} == OF_THE_JOB | OF_FIGURES
