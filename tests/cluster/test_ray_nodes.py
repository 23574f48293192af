"""Real Ray nodes on one machine: nodes that join late or are lost, and the job's messages and metrics meanwhile."""

import json
import re
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.error import URLError

import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.pool import NODE_ID
from cluster.start import start_ray
from precompute.config import describe_encoding, make_recipe
from precompute.input.find import find_input
from precompute.job.ledger import Ledger
from precompute.job.run import run_job
from shards.open import open_store
from shards.root.index import write_indexes
from shards.root.shared import create_root
from shards.tools.verify import verify_root
from tests.fixtures import SIZES, folder_of, precompute_config
from tests.runs import wait_until
from tests.tiny import make_samples, make_tar

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head node that is too small for a worker."""
    with tempfile.TemporaryDirectory(prefix="lm-", ignore_cleanup_errors=True) as folder:
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
        # otherwise any ray.init on this machine would join it
        with patch("ray._private.utils.write_ray_address"):
            cluster = Cluster(initialize_head=True, head_node_args=head)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        ray.shutdown()
        with patch("ray._common.utils.reset_ray_address"):
            cluster.shutdown()


def scrape() -> dict[str, float]:
    """Return the job's metrics, summed over the nodes whose metrics endpoint responds, by name and labels."""
    sums: dict[str, float] = {}
    for port in (node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]):
        text = ""
        # on a busy machine a node's agent may start after its first attempts
        with suppress(URLError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            text = page.read().decode()
        for name, labels, value in re.findall(r"^ray_(latentmill_\w+)\{(.*?)\} (\S+)$", text, re.MULTILINE):
            told = ",".join(re.findall(r'(?:reason|outcome|cause|stage)="[\w.]+"', labels))
            sums[f"{name}{{{told}}}"] = sums.get(f"{name}{{{told}}}", 0) + float(value)
    return sums


def test_a_late_node_gets_work_and_a_lost_one_loses_none(
    cluster: Cluster,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the job runs in another thread, which cannot install signal handlers
    monkeypatch.setattr("cluster.fleet.StopSignal", lambda *_: nullcontext(SimpleNamespace(received=False)))
    for shard in range(4):
        make_tar(tmp_path / "tars", f"{shard:05d}", make_samples(shard, 80, SIZES))
    workers = {"num_gpus": 0, "num_cpus": 1, "resources": {"encoder": 1}, "decode_threads": 1, "batch_size": 4}
    workers |= {"max_in_flight": 2, "backoff": 0.1, "attempts": 1, "wait_for_resources": 300}
    config = precompute_config(models, tmp_path / "tars", tmp_path / "root", workers=workers)
    encoding = describe_encoding(config)
    create_root(open_store(config.output), encoding)
    start_ray(config.workers)

    results: list[Ledger] = []
    job = threading.Thread(
        target=lambda: results.append(
            run_job(find_input(config.input).units(), make_recipe(config, encoding), config.output, config.workers)
        )
    )
    job.start()
    said: list[str] = []

    def says(text: str) -> bool:
        said.append(capsys.readouterr().err)
        return text in "".join(said)

    wait_until(lambda: says("No node in the cluster can take a worker that needs 0 GPUs, 1 CPU and 1 encoder"))
    lost = cluster.add_node(num_cpus=1, resources={"encoder": 1})  # it joins late,
    wait_until(lambda: list((folder_of(config) / ".attempts").glob("0*")))
    cluster.remove_node(lost, allow_graceful=False)  # it is lost in the middle of a tar,
    cluster.add_node(num_cpus=1, resources={"encoder": 1})  # and another one joins
    job.join(400)
    says("")
    log = "".join(said)
    assert len(results) == 1 and results[0].failed == {}, log
    assert results[0].done == 4 and results[0].left == 0
    assert "an attempt was lost (1 of 10 allowed)" in log
    failures = map(json.loads, Path(f"{config.output}.failures.jsonl").read_text().splitlines())
    lost_on = {line["node"]: line["log"] for line in failures if "was lost" in line["outcome"]}
    assert lost_on.keys() == {lost.node_ip_address} and all(lost_on.values())
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert lines[-1]["shards_done"] == 4 and lines[-1]["accepted"] + lines[-1]["rejected"] == 320
    assert max(line["shards_in_flight"] for line in lines) <= 2
    write_indexes(open_store(config.output))
    assert list(verify_root(open_store(config.output))) == []

    expected = {
        "latentmill_images_in_total{}": 320.0,
        'latentmill_attempts_total{cause="none"}': 4.0,
        'latentmill_attempts_total{cause="lost"}': float(log.count("an attempt was lost")),
        "latentmill_images_accepted_total{}": float(lines[-1]["accepted"]),
        'latentmill_images_rejected_total{reason="too_small"}': float(lines[-1]["rejected"]),
        'latentmill_shards_total{outcome="done"}': 4.0,
    }
    wait_until(lambda: expected.items() <= scrape().items(), 60)
    seconds = {name: value for name, value in scrape().items() if "stage_seconds" in name}
    stages = {re.findall(r'stage="([\w.]+)"', name)[0] for name in seconds}
    assert stages >= {"fetch", "decode", "encode", "write", "upload", "device", "worker", "total"}, stages


def test_a_node_that_is_avoided_gets_none(cluster: Cluster) -> None:
    """Ray understands the label selector that the job gives its workers."""
    cluster.add_node(num_cpus=1)
    ray.init(log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes()]
    assert len(nodes) == 2

    class Where:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    def apart_from(avoided: list[str]) -> Any:
        return (
            ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Where)
            .options(label_selector={NODE_ID: f"!in({','.join(avoided)})"})
            .remote()
        )

    for avoided in nodes:
        for _ in range(3):
            actor = apart_from([avoided])
            assert ray.get(actor.node.remote(), timeout=240) != avoided
            ray.kill(actor)
    stuck = apart_from(nodes)
    assert not ray.wait([stuck.node.remote()], timeout=3)[0]
    ray.kill(stuck)
