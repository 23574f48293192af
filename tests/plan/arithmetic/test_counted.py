"""Cached counts: a second plan needs no torch, and a changed network is counted again."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from plan.__main__ import run
from plan.arithmetic import counted
from plan.arithmetic.work import Work
from plan.config import Networks
from shards.base.errors import RequestError
from tests.ranks import environment

PROGRAM = """
import json, sys
from shards.base.errors import exit_code_of
from plan.__main__ import run
codes = [exit_code_of(lambda: run(words)) for words in json.loads(sys.argv[1])]
print("torch" in sys.modules, codes)
"""
REFUSED = {
    "unknown option --gpu.prise_per_hour": ["--gpu.prise_per_hour", "2"],
    "networks.backbone: The config file nowhere.yaml does not exist": ["--networks.backbone", "nowhere.yaml"],
    "The config file nowhere.yaml does not exist": ["--config", "nowhere.yaml"],
    "nowhere.json": ["--measured", "nowhere.json"],
}


@pytest.mark.heavy
def test_counted_and_wrong_plans_need_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sd2: Work
) -> None:
    """The first plan counts the networks; later ones, in a new interpreter, print the same without importing torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(counted, "count_work", lambda *_: sd2)
        run([])
    plans: list[list[str]] = [[], ["--gpu.price_per_hour", "3"], *REFUSED.values()]
    command = [sys.executable, "-c", PROGRAM, json.dumps(plans)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    first, _, rest = result.stdout.partition(capsys.readouterr().out)
    assert first == "" and rest.endswith("False [0, 0, 2, 2, 2, 2]\n")
    errors = " ".join(result.stderr.split())
    assert [message for message in REFUSED if message not in errors] == []


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
    base = {"backbone": {"config": str(unet)}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "phase1.yaml").write_text("base: base.yaml\nsharding: none\n")
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
    (tmp_path / "phase1.yaml").write_text("base: base.yaml\nsharding: full\n")
    counted.cached_work(networks, ["256x256"])
    assert len(counts) == 5
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"backbone": base["backbone"] | {"pack": 2}}))
    counted.cached_work(networks, ["256x256"])
    assert len(counts) == 6
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # cannot be written
    assert counted.cached_work(networks, ["256x256"]) == sd2
    unet.unlink()
    with pytest.raises(RequestError, match=r"unet\.json cannot be read as JSON"):
        counted.cached_work(networks, ["256x256"])


def test_without_a_home_folder_nothing_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sd2: Work) -> None:
    """A folder in /tmp with a predictable name could belong to someone else, who could put wrong counts there."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(counted, "count_work", lambda *_: sd2)
    assert counted.cached_work(Networks(), ["256x256"]) == sd2
    assert not list(tmp_path.iterdir())
