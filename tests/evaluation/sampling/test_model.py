"""The export of a run's checkpoint, before it is sampled."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from evaluation.sampling.model import prepare_model
from shards.base.durable import write_atomically
from shards.base.scratch import private_folder
from shards.base.store import LocalStore
from tests.forks import fork, wait_for
from tests.runs import wait_until
from train.export.pipeline import ExportConfig


def export_until_killed(run: Path, output: Path, ready: Path) -> None:
    """Export a checkpoint, and wait once the export is in a temporary folder."""

    def write_and_wait(run: Path, options: ExportConfig) -> None:
        assert options.output is not None
        options.output.mkdir()
        write_atomically(ready, str(options.output).encode())
        time.sleep(600)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("train.export.pipeline.write_pipeline", write_and_wait)
        prepare_model(str(run), None, "auto", LocalStore(output))


def test_the_temporary_folder_of_a_killed_export_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run, ready = LocalStore(tmp_path / "run"), tmp_path / "ready"
    run.write("config.yaml", b"")
    run.write("checkpoints/step-00000002/state.json", b"{}")
    child = fork(lambda: export_until_killed(run.root, tmp_path / "output", ready))
    wait_until(ready.exists)
    left = Path(ready.read_text())
    assert left.is_dir()
    os.kill(child, signal.SIGKILL)
    wait_for(child)
    with private_folder():
        assert not left.exists()
