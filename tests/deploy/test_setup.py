"""`make setup` (deploy/setup.py): what stops it is named in one sentence."""

import importlib.util
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path("deploy/setup.py").absolute()
Usage = namedtuple("Usage", "total used free")


def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the script, and change to `folder`, whose disk has enough space."""
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["deploy/setup.py", "demo"])
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(99e9, 9e9, 90e9))
    return module


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a folder without .venv."""
    return load(tmp_path, monkeypatch)


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the script has made an environment in place of one that cannot install packages: its creation
    was interrupted, and then the Python that it was made with was removed."""
    folder = tmp_path_factory.mktemp("made")
    python = folder / ".venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True)
    with pytest.MonkeyPatch.context() as patch:
        script = load(folder, patch)
        assert python.exists() and not script.can_install()  # for lack of pip
        python.unlink()
        python.symlink_to("/usr/bin/python-that-was-removed")
        commands: list[tuple[str, ...]] = []
        patch.setattr(script, "run", lambda *command: commands.append(command))
        script.main()
    assert [command[0].rpartition("/")[2] for command in commands] == ["python", "uv", "uv"]
    return folder


@pytest.mark.heavy
def test_an_environment_that_cannot_install_is_made_again(made: Path) -> None:
    subprocess.run([made / ".venv" / "bin" / "python", "-m", "pip", "--version"], check=True)


@pytest.mark.heavy
def test_an_unreachable_registry(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made / ".venv", tmp_path / ".venv", symlinks=True)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    said = error(setup)
    assert said.startswith("error: The packages could not be installed, because the package registry cannot be reached")
    assert said.endswith(f"The full output is in {tmp_path}/.venv/setup.txt.")
