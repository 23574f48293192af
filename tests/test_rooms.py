"""Packages import in one direction, and no package contains an import cycle."""

import re

import pytest

from tests.rooms import MAY_IMPORT, ROOT, circles, floors, modules

WHOLE_CONFIG = {
    "PrecomputeConfig": {"precompute/__main__.py", "precompute/config.py", "precompute/job/projection.py"},
    "TrainConfig": {
        "train/__main__.py",
        "train/launch.py",
        "train/early.py",
        "train/start.py",
        "train/config.py",
        "train/prepare.py",
        "train/memory.py",
        "train/setup.py",
        "plan/memory.py",
        # config of a finished run, read from its folder
        "train/export/pipeline.py",
        "train/export/card.py",
        "train/export/components.py",
    },
}
"""A command's complete config → the files that may use it; all others receive only their sections."""


def test_packages_import_those_below_them_alone() -> None:
    wrong = {(a, b) for a, b in floors()[""].arrows if b not in MAY_IMPORT[a]}
    assert not wrong


def test_no_import_cycles() -> None:
    assert len(floors()) > 20
    assert not {name: found for name, floor in floors().items() if (found := circles(floor))}


@pytest.mark.parametrize(("config", "files"), WHOLE_CONFIG.items())
def test_a_whole_config_stays_at_the_door(config: str, files: set[str]) -> None:
    naming = {
        path.relative_to(ROOT).as_posix()
        for name, path in modules().items()
        if config in path.read_text() and name.split(".")[0] not in ("bench", "examples")
    }
    assert naming <= files


def test_no_test_imports_another() -> None:
    """Shared helpers have their own files with descriptive names."""
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        imported = re.findall(r"^ *from (?:\S*\.)?test_\w+ import", path.read_text(), re.MULTILINE)
        wrong += [f"{path}: {line}" for line in imported]
    assert not wrong
