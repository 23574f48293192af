"""A real node whose checkout differs from the driver's; tests/precompute/job calls its worker directly."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.provenance import source_sha256
from tests.faults.cluster import NO_TOKEN, TwoNodes
from tests.faults.world import World
from tests.runs import environment

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_node_with_an_altered_checkout_is_refused_by_name(
    models: Path, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = tmp_path / "altered"
    for package in ("shards", "cluster", "precompute"):
        shutil.copytree(REPOSITORY / package, altered / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (altered / "precompute" / "pixels" / "color.py").open("a") as file:
        file.write("\n# otherwise the same\n")
    fields = World(models, tars, Path("none")).config(tmp_path / "root").model_dump(mode="json")
    fields["workers"] |= {"outage_probes": 1}
    (config := tmp_path / "config.yaml").write_text(yaml.safe_dump(fields))
    monkeypatch.setenv("PYTHONPATH", str(altered))  # of the raylet and its workers
    with tempfile.TemporaryDirectory(prefix="rf-") as short, TwoNodes(Path(short)) as nodes:
        done = subprocess.run(
            [sys.executable, "-m", "precompute", "--config", str(config)],
            cwd=tmp_path,  # otherwise Ray would make workers search the driver's checkout first
            capture_output=True,
            text=True,
            env=environment(RAY_ADDRESS=nodes.cluster.address, PYTHONPATH=str(REPOSITORY), **NO_TOKEN),
            timeout=400,
        )
    said = done.stderr.replace("\n", " ")
    assert done.returncode == 1, said
    assert (
        f"The node {os.uname().nodename} is running a different version of latentmill than the driver: the SHA-256 of "
        f"its source is" in said
    )
    assert f"the driver's is {source_sha256()}. Nothing was encoded on this node." in said
    assert load_receipts(open_store(tmp_path / "root")) == []
