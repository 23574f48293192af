"""Requirements of a clean machine: entry points, the lock, and files that must not be in the repository."""

import re
import subprocess
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from shards.base.config import load_config
from shards.base.errors import exit_code_of
from shards.tools import init
from train.config import TrainConfig

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_console_entry_points_load() -> None:
    scripts = PYPROJECT["project"]["scripts"]
    commands = {"select", "download", "precompute", "shards", "train", "plan", "evaluate"}
    assert set(scripts) == {"latentmill", *(f"latentmill-{name}" for name in commands)}
    for name, target in scripts.items():
        assert callable(EntryPoint(name, target, "console_scripts").load())


def test_a_wheel_has_the_configs_where_init_looks_for_them() -> None:
    (included,) = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items()
    assert included == ("configs", init.PACKAGED.relative_to(ROOT).as_posix())


def test_init_writes_configs_that_are_found_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    init.run(["init", "."])
    assert "latentmill-precompute --config configs/precompute.yaml" in capsys.readouterr().out
    assert files_below(tmp_path / "configs") == files_below(ROOT / "configs")
    for path in Path("configs").rglob("*.yaml"):
        assert all(Path(name).is_file() for name in re.findall(r"configs/[\w./-]+", path.read_text())), path
    assert load_config(TrainConfig, "configs/phase1.yaml", [], "t").network.is_file()


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs").mkdir()
    assert exit_code_of(lambda: init.run(["init", str(tmp_path)])) == 2
    assert f"{tmp_path}/configs already exists and was not changed" in capsys.readouterr().err.replace("\n", " ")
    assert files_below(tmp_path / "configs") == {}
    (tmp_path / "file").write_text("")
    assert exit_code_of(lambda: init.run(["init", str(tmp_path / "file")])) == 2
    assert "cannot be written: " in capsys.readouterr().err.replace("\n", " ")


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("lock", "streaming", "transformers"),
    [("requirements.lock", "0.13.", "5."), ("requirements.oldest.lock", "0.13.0", "4.57.")],
)
def test_a_lock_pins_everything_and_names_no_index(lock: str, streaming: str, transformers: str) -> None:
    lines = (ROOT / lock).read_text().splitlines()
    pinned = {line.split("==")[0]: line for line in lines if line and not line.startswith((" ", "#"))}
    assert all("==" in line for line in pinned.values())
    assert not re.search(r"https?://|--index|--extra|--find-links", "\n".join(pinned.values()))
    for name in ("torch", "torchvision", "mosaicml-streaming", "ray", "diffusers", "transformers", "accelerate"):
        assert name in pinned
    assert pinned["mosaicml-streaming"].startswith(f"mosaicml-streaming=={streaming}")
    assert pinned["transformers"].startswith(f"transformers=={transformers}")


def test_no_large_or_generated_file_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        assert not path.is_file() or path.stat().st_size <= 2_000_000, name
        assert "__pycache__" not in name and not name.startswith(("runs/", ".venv/"))
