"""Averages of any width, rebuilt from snapshots of two averages, and their export."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file

from shards.base.durable import DamagedFile, read_sealed_json, sha256_file
from shards.base.errors import RequestError, WorkError
from tests.runs import ONE_LEVEL_UNET, curve, train_fields, train_run, write_config
from train.__main__ import run as command
from train.export.pipeline import ExportConfig, write_pipeline
from train.export.posthoc import RECORD, RebuildConfig, combine, select_snapshots, write_average
from train.model.config import EmaConfig
from train.run.checkpoints.checkpoint import WEIGHTS_NAME, list_checkpoints, newest_checkpoint, step_folder
from train.run.reporting.json_lines import read_json_lines


@pytest.fixture(scope="module")
def runs(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run uninterrupted, and killed and resumed, with a snapshot that the killed process left behind."""
    folder = tmp_path_factory.mktemp("posthoc")
    validation = {"root": str(latents), "bucket": "64x64", "samples": 8, "batch_size": 8, "every": 2}
    changes: dict[str, Any] = {"ema": {"snapshot_every": 2}, "checkpoint": {"every": 2}, "optimizer": {"lr": 1e-2}}
    for name, parts in (("whole", [6]), ("parts", [4, 6])):
        for max_steps in parts:
            averaged = validation | {"weights": "ema" if name == "whole" else "raw"}
            steps = changes | {"max_steps": max_steps, "validation": averaged}
            train_run(latents, folder / name, ONE_LEVEL_UNET, **steps)
            if max_steps == 4:  # as if killed after step 4, with a torn checkpoint, and without the snapshot of step 2
                shutil.rmtree(step_folder(folder / name / "posthoc", 2))
                for path in (step_folder(folder / name, 4), step_folder(folder / name / "posthoc", 4)):
                    path.rename(path.with_name("step-00000005"))
                (step_folder(folder / name, 5) / "optimizer.safetensors").unlink()
    return folder / "whole", folder / "parts"


def test_killed_and_resumed_averages_and_snapshots_are_bit_equal(runs: tuple[Path, Path]) -> None:
    whole, parts = (newest_checkpoint(run) for run in runs)
    assert whole is not None and parts is not None and whole.content["files"] == parts.content["files"]
    assert {f"ema-0.050/{WEIGHTS_NAME}", f"ema-0.100/{WEIGHTS_NAME}"} <= set(whole.content["files"])
    for run in runs:
        assert [folder.name[-2:] for folder in list_checkpoints(run / "posthoc")] == ["02", "04", "06"]
    for step in (2, 4, 6):
        files = [read_sealed_json(step_folder(run / "posthoc", step) / "state.json")["files"] for run in runs]
        assert files[0] == files[1] and len(files[0]) == 4
    half, full = (load_file(step_folder(runs[0] / place, 6) / "ema-0.050" / WEIGHTS_NAME) for place in ("posthoc", ""))
    assert all(half[name].equal(value.half()) for name, value in full.items()) and len(half) > 50


def test_train_ema_rebuilds_an_average_for_export(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run = runs[0]
    command(["ema", str(run), "--std", "0.07"])
    folder = Path(capsys.readouterr().out.strip())
    assert folder == run / "posthoc" / "std-0.070-step-00000006"
    made_of = read_sealed_json(folder / RECORD)["made_of"]
    assert [(part["step"], part["std"]) for part in made_of] == [(s, w) for s in (2, 4, 6) for w in (0.05, 0.1)]
    weights = UNet2DConditionModel.from_pretrained(folder).state_dict()
    averages = [
        load_file(step_folder(run / "posthoc", part["step"]) / f"ema-{part['std']:.3f}" / WEIGHTS_NAME)
        for part in made_of
    ]
    for name, value in weights.items():
        expected = torch.zeros_like(value, dtype=torch.float64)
        for part, average in zip(made_of, averages, strict=True):
            expected += part["coefficient"] * average[name].double()
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)
    exported = write_pipeline(run, ExportConfig(weights=str(folder)))
    assert load_file(exported / "unet" / WEIGHTS_NAME).keys() == weights.keys()
    assert all(value.equal(weights[name]) for name, value in load_file(exported / "unet" / WEIGHTS_NAME).items())
    assert f"`{sha256_file(folder / WEIGHTS_NAME)}`" in (exported / "README.md").read_text()
    # rebuilding a width that was kept gives the snapshot itself, up to float16
    kept = write_average(run, RebuildConfig(std=0.1, step=4))
    card = (write_pipeline(run, ExportConfig(weights=str(kept))) / "README.md").read_text()
    assert "| steps | 4 of 8 samples |" in card and "(width 0.1, rebuilt from 4 averages)" in card
    snapshot = load_file(step_folder(run / "posthoc", 4) / "ema-0.100" / WEIGHTS_NAME)
    for name, value in load_file(kept / WEIGHTS_NAME).items():
        torch.testing.assert_close(value, snapshot[name].float(), rtol=1e-6, atol=1e-8)


def test_validating_the_average_does_not_change_training(runs: tuple[Path, Path]) -> None:
    """One run validates raw weights, the other averages: the values differ, but training is bit-exact."""
    assert curve(runs[0]) == curve(runs[1])
    averaged, raw = (
        {row["step"]: row["val_loss"] for row in read_json_lines(run / "metrics.jsonl") if "val_loss" in row}
        for run in runs
    )
    assert averaged.keys() == raw.keys() == {2, 4, 6}
    assert averaged[6] != raw[6]


def test_buffers_are_copied_unchanged(tmp_path: Path) -> None:
    table = torch.randn(5)
    for number in (1.0, 2.0):
        (tmp_path / str(number)).mkdir()
        tensors = {
            "a": torch.full((3,), number).half(),
            "table": table,
            "count": torch.tensor(7),
            "still": table.half(),
        }
        save_file(tensors, tmp_path / str(number) / WEIGHTS_NAME)
    found = combine([tmp_path / "1.0", tmp_path / "2.0"], np.array([-1.3, 2.3]))
    torch.testing.assert_close(found["a"], torch.full((3,), 3.3))
    assert found["table"].equal(table) and found["count"].equal(torch.tensor(7))
    assert found["still"].equal(table.half().float())


def test_invalid_requests_are_refused(runs: tuple[Path, Path], latents: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(runs[0] / "posthoc" / "checkpoints", tmp_path / "posthoc" / "checkpoints")
    for number, folder in enumerate(sorted(copied.iterdir()), start=1):
        folder.rename(copied / f"{folder.name}.{number:04d}")  # as at a URL
    assert [folder.name for folder in select_snapshots(tmp_path, 4)] == ["step-00000002.0001", "step-00000004.0002"]
    shutil.rmtree(copied)
    with pytest.raises(
        RequestError, match=r"no snapshot at step 9\. Choose one of the nearest snapshots with --step: 2, 4, 6"
    ):
        write_average(runs[0], RebuildConfig(std=0.07, step=9))
    with pytest.raises(RequestError, match=r"has no snapshots .* Set ema\.snapshot_every"):
        write_average(tmp_path, RebuildConfig(std=0.07))
    with pytest.raises(RequestError, match="Pass it first"):
        command(["ema", "--std", "0.07"])
    with pytest.raises(RequestError, match="train ema reads a local run folder, but s3://bucket/run is a URL"):
        command(["ema", "s3://bucket/run", "--std", "0.1"])
    with pytest.raises(RequestError, match="exists and was not written by this command"):
        write_average(runs[0], RebuildConfig(std=0.07, output=runs[0]))
    with pytest.raises(RequestError, match="but it must be auto, raw, ema or a folder with"):
        write_pipeline(runs[0], ExportConfig(weights="posthoc"))
    with pytest.raises(RequestError, match=r"has no checkpoint at step 9\. Available steps: .*4, 6\."):
        write_pipeline(runs[0], ExportConfig(step=9))
    with pytest.raises(ValueError, match="two of the widths are equal; remove one of them"):
        EmaConfig(std=[0.05, 0.05])
    for width in (0.0501, 0.0001):  # a snapshot's folder would name it 0.050 or 0.000
        with pytest.raises(ValueError, match=f"{width} has more than three decimals"):
            EmaConfig(std=[width])
        with pytest.raises(ValueError, match=f"{width} has more than three decimals"):
            RebuildConfig(std=width)
    fields = train_fields(latents, tmp_path, ema={"start_step": None}, validation={"weights": "ema"})
    message = r"validation\.weights is ema, but the run keeps no moving average; set ema\.start_step"
    with pytest.raises(RequestError, match=message):
        command(["check", "--config", str(write_config(tmp_path, fields))])
    fields = train_fields(latents, tmp_path, ema={"start_step": 7})
    with pytest.raises(RequestError, match=r"ema\.start_step 7 is after the run's last step, max_steps 6, so"):
        command(["check", "--config", str(write_config(tmp_path, fields))])


def test_damage_and_overflow_are_found(runs: tuple[Path, Path]) -> None:
    path = step_folder(runs[1] / "posthoc", 2) / "ema-0.100" / WEIGHTS_NAME
    sound = path.read_bytes()
    data = bytearray(sound)
    data[-2:] = b"\x00\x7c"  # infinity in float16
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedFile, match=r"does not match its SHA-256 .* Restore \S+/step-00000002"):
        write_average(runs[1], RebuildConfig(std=0.07))
    optimizer = step_folder(runs[1], 6) / "optimizer.safetensors"
    intact = optimizer.read_bytes()
    optimizer.write_bytes(intact[:-1])
    with pytest.raises(DamagedFile, match=r"optimizer\.safetensors does not match .*, or export a different step"):
        write_pipeline(runs[1], ExportConfig(step=6))
    optimizer.write_bytes(intact)
    with pytest.raises(WorkError, match=r"has non-finite values in .* overflow float16.*snapshot_dtype float32"):
        combine([path.parent], np.ones(1))
    path.write_bytes(sound)


def test_a_missing_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"The run folder .*absent does not exist\. Pass the run_dir"):
        write_pipeline(tmp_path / "absent", ExportConfig())
