"""Workers on several machines start at once, and need a model from a slow store."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from shards.format.models import hash_weights
from shards.format.towers import Weights
from tests.fake_hub import fake_hub
from tests.faults.proxy import throttle
from tests.faults.steps_s3 import BUCKET, served
from tests.fixtures import Record, s3_variables
from tests.runs import environment

DELAY = 0.03
WORKER = """
import json, os, sys, time
from multiprocessing import get_context
import s3fs
from shards.format.models import recorded_folder
from shards.format.towers import Weights

weights = Weights(**json.loads(sys.argv[1]))

def work(_):
    return str(recorded_folder(weights)), os.getpid(), time.time()

print("imported", flush=True)
sys.stdin.readline()  # all begin at once
with get_context("fork").Pool(int(sys.argv[2])) as workers:
    print(json.dumps(workers.map(work, range(int(sys.argv[2])), chunksize=1)))
"""
"""Worker processes per machine."""


def start_all(num_nodes: int, num_workers: int, weights: Weights, folder: Path, **variables: str) -> float:
    """Start the processes of all machines, each with a separate cache; return the seconds until the last process has
    the model."""
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, weights.model_dump_json(), str(num_workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(HF_HOME=str(folder / f"node-{node}"), HF_HUB_OFFLINE="0", **variables),
        )
        for node in range(num_nodes)
    ]
    assert [node.stdout and node.stdout.readline() for node in nodes] == ["imported\n"] * num_nodes
    begin = time.time()
    for node in nodes:
        assert node.stdin
        node.stdin.write("\n")
        node.stdin.flush()
    ended = [json.loads(node.communicate(timeout=300)[0]) for node in nodes]
    workers = [worker for node in ended for worker in node]
    assert [len({path for path, _, _ in node}) for node in ended] == [1] * num_nodes
    assert len({path for path, _, _ in workers}) == num_nodes
    assert len({process for _, process, _ in workers}) == num_nodes * num_workers
    return float(max(at for _, _, at in workers) - begin)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "workers"), [(2, 2), (8, 8)])
def test_each_machine_fetches_once(
    nodes: int,
    workers: int,
    models: Path,
    tmp_path: Path,
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vae = models / "vae"
    size = sum(path.stat().st_size for path in vae.iterdir())
    for name in s3_variables(""):
        monkeypatch.setenv(name, "")  # and restored afterwards
    with served() as server:
        put = "import sys; from pathlib import Path; from shards.base.remote import RemoteStore; "
        put += "RemoteStore(sys.argv[1]).put({path.name: path for path in Path(sys.argv[2]).iterdir()})"
        subprocess.run([sys.executable, "-c", put, f"{BUCKET}/vae", str(vae)], check=True, env=environment())
        throttle(server, DELAY)
        seconds = start_all(nodes, workers, hash_weights(f"{BUCKET}/vae", vae), tmp_path)
        fetched = throttle(server) / size
    assert nodes <= fetched < nodes + 0.5, fetched
    record_property(
        f"{nodes * workers} workers, {nodes} nodes", {"fetches": round(fetched, 2), "seconds": round(seconds, 1)}
    )
    files: list[str] = []
    with fake_hub(models, fetched=files) as hub:
        weights = hash_weights("org/repo/vae", vae)
        start_all(nodes, workers, weights, tmp_path / "hub", HF_ENDPOINT=hub, NO_PROXY="127.0.0.1")
    assert Counter(files) == {f"vae/{path.name}": nodes for path in vae.iterdir()}
