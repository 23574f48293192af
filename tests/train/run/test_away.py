"""A run folder at an address: the run of a folder, bit for bit, on any machine, killed wherever it may be killed."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from shards.open import open_store
from tests.runs import curve, train_fields, write_config
from train.__main__ import run as command
from train.run.saving.away import find_checkpoints, work_folder
from train.run.saving.checkpoint import list_checkpoints, verify_checkpoint


def train(latents: Path, folder: Path, run_dir: Path | str, **changes: Any) -> Path:
    """A run in this process; its folder on this machine."""
    fields = train_fields(latents, run_dir, **changes)
    command(["--config", str(write_config(folder, fields))])
    return work_folder(run_dir)


def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on there is nothing in the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir=tmp_path))


def test_a_run_goes_on_on_an_empty_machine_bit_for_bit(
    s3: str, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(latents, tmp_path, tmp_path / "whole")
    for max_steps in (3, 5, 6):
        empty_machine(tmp_path, monkeypatch)
        work = train(latents, tmp_path, f"{s3}/run", max_steps=max_steps)
        assert curve(work) == tuple(values[:max_steps] for values in curve(whole))
    assert f"resuming {s3}/run after step 5 (run, step-00000005)" in capsys.readouterr().out
    store, last = open_store(f"{s3}/run"), list_checkpoints(whole)[-1]
    assert sorted(find_checkpoints(store)) == ["step-00000005", "step-00000006"]
    with store.local(f"checkpoints/{last.name}") as copy:
        assert verify_checkpoint(copy).content["files"] == verify_checkpoint(last).content["files"]
    # what people and `evaluate` read lies there as in a folder
    assert store.read("metrics.jsonl") == (work / "metrics.jsonl").read_bytes()
    assert {"config.yaml", "loss.png", "samples.jsonl"} <= set(store.entries())
