"""Stage 1 on a cluster that has no nodes until there is work: Ray's autoscaler, with processes in place of machines."""

import json
from pathlib import Path

import pytest
import yaml

from shards.open import open_store
from shards.root.committed import load_receipts
from shards.tools.verify import verify_root
from tests.deploy.machines import Machines, missing
from tests.faults.world import World
from tests.fixtures import SIZES
from tests.runs import PYTHON, environment
from tests.tiny import make_samples, make_tar

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
IDLE_SECONDS = 10
"""Idle time after which a node is removed."""
CLUSTER = {
    "cluster_name": "three",
    "max_workers": 3,
    "idle_timeout_minutes": IDLE_SECONDS / 60,
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "head_node_type": "ray.head.default",
    "auth": {},
    **{name: {} for name in ("docker", "file_mounts")},
    **{name: [] for name in ("cluster_synced_files", "initialization_commands", "rsync_exclude", "rsync_filter")},
    **{
        f"{name}_commands": [] for name in ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3},
    },
}
QUICK = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
WATCH = """
import json, os, subprocess, sys, time
import ray

ray.init("auto", log_to_driver=False)
counts = []

def watch():
    alive = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    if [alive] != counts[-1:]:
        counts.append(alive)
    time.sleep(0.2)
    return alive

watch()
address = ray.get_runtime_context().gcs_address
command = [sys.executable, "-m", "precompute", "--config", sys.argv[1]]
job = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": address}, stdout=sys.stderr)
while job.poll() is None:
    watch()
until = time.monotonic() + 180
while watch() and time.monotonic() < until:
    pass
print(json.dumps({"code": job.returncode, "nodes": counts}))
"""


def test_nodes_come_for_the_tars_and_go_when_these_are_done(models: Path, tmp_path: Path) -> None:
    if missing():
        pytest.fail(f"This test needs {', '.join(missing())}: apt-get install iproute2 util-linux, as root")
    for shard in range(9):
        make_tar(tmp_path / "tars", f"{shard:05d}", make_samples(shard, 60, SIZES))
    fields = World(models, tmp_path / "tars", Path("none")).config(tmp_path / "root").model_dump(mode="json")
    fields["workers"] |= {"tars_at_once": 1, "max_in_flight": "auto"}
    (config := tmp_path / "config.yaml").write_text(yaml.safe_dump(fields))
    (cluster := tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    variables = environment(HOME=str(tmp_path), RAY_AUTH_MODE="disabled")
    variables["PATH"] = f"{Path(PYTHON[0]).parent}:{variables['PATH']}"
    with Machines(tmp_path, REPOSITORY, variables, ["head"]) as machines:
        head = machines.machines["head"]
        start = ["ray", "start", "--head", "--num-cpus=0", "--include-dashboard=false"]
        head.run(*start, f"--autoscaling-config={cluster}", variables=QUICK)
        result = head.run("python", "-c", WATCH, str(config))
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["code"] == 0, result.stderr
    nodes = found["nodes"]
    assert (nodes[0], max(nodes), nodes[-1]) == (0, 3, 0), nodes
    assert sorted(nodes[: nodes.index(3)]) == nodes[: nodes.index(3)], nodes
    store = open_store(tmp_path / "root")
    assert {receipt.tar for receipt in load_receipts(store)} == {f"{shard:05d}" for shard in range(9)}
    assert list(verify_root(store)) == []
