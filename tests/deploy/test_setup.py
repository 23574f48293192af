"""`make setup` (deploy/setup.py): what stops it is named in one sentence."""

import importlib.util
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a folder without .venv."""
    spec = importlib.util.spec_from_file_location("setup_script", Path("deploy/setup.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["deploy/setup.py", "demo"])
    return module


def error(setup: ModuleType) -> str:
    """Run the script and return its error."""
    with pytest.raises(SystemExit) as raised:
        setup.main()
    return str(raised.value)


def test_an_unsupported_python(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.version_info", (3, 10, 4))
    assert error(setup) == (
        f"error: latentmill needs Python 3.11, 3.12 or 3.13, but {sys.executable} is 3.10. Try: make PYTHON=python3.13 "
        f"demo"
    )
    assert not list(tmp_path.iterdir())


def test_a_full_disk(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(9e9, 7e9, 2e9))
    expected = f"error: The packages need 8 GB of disk space, but only 2.0 GB are free in {tmp_path}."
    assert error(setup) == expected and not list(tmp_path.iterdir())


@pytest.mark.parametrize("was", ["interrupted", "made with a Python that was removed"])
def test_an_environment_that_cannot_install_is_made_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, was: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(99e9, 9e9, 90e9))
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup, "run", lambda *command: commands.append(command))
    create, made = [sys.executable, "-m", "venv"], tmp_path / ".venv"
    subprocess.run([*create, "--without-pip", str(made)], check=True)  # an interrupted one has Python, but no pip
    if was != "interrupted":
        (made / "bin" / "python").unlink()
        (made / "bin" / "python").symlink_to("/usr/bin/python-that-was-removed")
    setup.main()
    assert [command[0].rpartition("/")[2] for command in commands] == ["python", "uv", "uv"]
    subprocess.run([made / "bin" / "python", "-m", "pip", "--version"], check=True)


@pytest.mark.heavy
def test_an_unreachable_registry(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(99e9, 9e9, 90e9))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    said = error(setup)
    assert said.startswith("error: The packages could not be installed, because the package registry cannot be reached")
    assert said.endswith(f"The full output is in {tmp_path}/.venv/setup.txt.")
