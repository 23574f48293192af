"""Folders that all processes of a run of pytest share, so that only one of them has to make the content."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.base.durable import locked


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the temporary folder that all processes of this run of pytest share."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the shared folder `name`, which the first process that needs it fills with `make`. Tests must not modify
    it.

    The folder is made at its final path, because configs and encoding.json contain absolute paths. If `make` fails, the
    next process that needs the folder starts again with an empty one.
    """
    folder = shared_folder(factory) / name
    done = folder.with_name(f"{name}.done")
    with locked(folder.with_name(f"{name}.lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
