"""Cached counts: a second plan needs no torch, and a changed network is counted again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from plan.arithmetic import counted
from plan.arithmetic.work import Work
from plan.config import Networks
from shards.base.errors import RequestError
from tests.ranks import environment

pytestmark = pytest.mark.heavy

PROGRAM = """
import sys
from shards.base.errors import exit_code_of
from plan.__main__ import run
code = exit_code_of(lambda: run(sys.argv[1:]))
print("torch" in sys.modules, code)
"""


def plan(cache: Path, *arguments: str) -> tuple[str, str, str]:
    """Run `python -m plan` in a new interpreter; return its output, whether it imported torch, its exit code, and
    errors."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    variables = environment(XDG_CACHE_HOME=str(cache))
    result = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    *printed, last = result.stdout.splitlines()
    return "\n".join(printed), last, " ".join(result.stderr.split())


def test_the_same_networks_are_counted_once(tmp_path: Path) -> None:
    first, second = plan(tmp_path), plan(tmp_path, "--gpu.price_per_hour", "3")
    assert (first[1], second[1]) == ("True 0", "False 0")
    assert plan(tmp_path) == (first[0], "False 0", "")
    assert first[0] != second[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu.prise_per_hour", "2"], "unknown option --gpu.prise_per_hour"),
        (["--networks.backbone", "nowhere.yaml"], "The network config nowhere.yaml does not exist"),
        (["--config", "nowhere.yaml"], "There is no config file nowhere.yaml"),
        (["--measured", "nowhere.json"], "nowhere.json"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_plan_is_refused_without_torch(tmp_path: Path, arguments: list[str], message: str) -> None:
    _, last, errors = plan(tmp_path, *arguments)
    assert last == "False 2" and message in errors


def test_a_count_is_kept_for_exactly_what_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sd2: Work
) -> None:
    counts: list[tuple[object, ...]] = []

    def count(*asked: object) -> Work:
        counts.append(asked)
        return sd2

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(counted, "count_work", count)
    unet = tmp_path / "unet.json"
    shutil.copyfile("configs/unet/sd2-base.json", unet)
    (tmp_path / "phase1.yaml").write_text(yaml.safe_dump({"backbone": {"config": str(unet)}}))
    networks = Networks(backbone=str(tmp_path / "phase1.yaml"))
    assert [counted.cached_work(networks, ["256x256"]) for _ in range(2)] == [sd2, sd2]
    assert len(counts) == 1
    counted.cached_work(networks, ["512x512"])
    assert len(counts) == 2
    unet.write_text(json.dumps(json.loads(unet.read_text()) | {"layers_per_block": 1}))
    counted.cached_work(networks, ["256x256"])
    assert len(counts) == 3
    monkeypatch.setattr(counted.metadata, "version", lambda name: "0")
    counted.cached_work(networks, ["256x256"])
    assert len(counts) == 4
    (file,) = tmp_path.glob(f"cache/latentmill/plan/{counted.cache_key(networks, ['256x256'])}.json")
    file.write_bytes(file.read_bytes()[:-5])  # cut short
    assert counted.cached_work(networks, ["256x256"]) == sd2
    assert len(counts) == 5
    unet.unlink()
    with pytest.raises(RequestError, match=r"The network config .* does not exist"):
        counted.cached_work(networks, ["256x256"])


def test_a_cache_that_cannot_be_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sd2: Work
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(counted, "count_work", lambda *_: sd2)
    assert counted.cached_work(Networks(), ["256x256"]) == sd2
