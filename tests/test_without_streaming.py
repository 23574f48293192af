"""streaming is optional: neither stage, nor any check of a root, imports it. The GPU check needs no Ray, either."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import precompute_config
from tests.rooms import modules
from tests.runs import environment

GPU_CHECK = """
import sys

sys.modules["ray"] = None
import bench.gpu_check.__main__
del sys.modules["ray"]
"""
STAGE_1 = """
from pathlib import Path

from precompute.config import PrecomputeConfig
from shards.base.config import load_config
from shards.open import open_store
from shards.tools.verify import verify_root
from tests.conftest import encode_all

config = load_config(PrecomputeConfig, sys.argv[1], [], "precompute")
encode_all(config, Path(sys.argv[2]))
assert list(verify_root(open_store(config.output))) == []
"""


@pytest.fixture
def without_streaming(tmp_path: Path) -> dict[str, str]:
    """Environment of processes in which `import streaming` fails."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "streaming.py").write_text("raise ImportError('streaming was imported')")
    path = os.pathsep.join([str(tmp_path / "blocked"), *filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])])
    return environment(PYTHONPATH=path)


def run(environment: dict[str, str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_streaming_cannot_be_imported_there(without_streaming: dict[str, str]) -> None:
    assert "streaming was imported" in run(without_streaming, "import streaming").stderr


def test_neither_the_modules_nor_stage_1_import_it(
    models: Path, tars: Path, tmp_path: Path, without_streaming: dict[str, str]
) -> None:
    """Import all modules and run stage 1; tests/train/test_run.py does the same for stage 2."""
    ours = [name for name in modules() if name.split(".")[0] in ("cluster", "plan", "precompute", "shards", "train")]
    ours.remove("shards.dataset")  # a subclass of streaming's dataset, if streaming is installed
    assert len(ours) > 100
    config = precompute_config(models, tars, tmp_path / "latents")
    stage1 = tmp_path / "precompute.yaml"
    stage1.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    code = "\n".join([GPU_CHECK, *(f"import {name}" for name in ours), STAGE_1])
    result = run(without_streaming, code, str(stage1), str(models))
    assert result.returncode == 0, result.stderr
