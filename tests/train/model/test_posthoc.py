"""Averages of any width from snapshots of two: the paper's formulas, and true averages of all that a run was."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy import integrate

from shards.base.durable import DamagedFile, read_sealed_json
from shards.base.errors import RequestError, WorkError
from tests.runs import curve, train_fields, write_config
from train.__main__ import run as command
from train.export.pipeline import ExportConfig, write_pipeline
from train.export.posthoc import RECORD, RebuildConfig, combine, write_average
from train.model.ema import EmaConfig, correlation, make_averages, posthoc_coefficients, power_exponent
from train.run.metrics import read_json_lines
from train.run.saving.checkpoint import WEIGHTS_NAME, list_checkpoints, newest_checkpoint, step_folder

widths = st.floats(0.02, 0.25)
lengths = st.floats(10.0, 1000.0)


def profile(t: np.ndarray | float, end: float, std: float) -> np.ndarray:
    """Equation 121: the share of time t in the average of this width that ends at `end`."""
    gamma = power_exponent(std)
    return np.where(np.asarray(t) <= end, (gamma + 1) * np.asarray(t) ** gamma / end ** (gamma + 1), 0.0)


@settings(max_examples=40)
@given(lengths, widths, lengths, widths)
def test_correlation_is_the_integral_of_the_product(a: float, a_std: float, b: float, b_std: float) -> None:
    expected, _ = integrate.quad(lambda t: float(profile(t, a, a_std) * profile(t, b, b_std)), 0, min(a, b), limit=200)
    found = float(correlation(*map(np.array, (a, a_std, b, b_std))))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("std", [0.06, 0.07, 0.12])
def test_coefficients_are_the_least_squares_over_the_profiles(std: float) -> None:
    """Against numpy's own, of profiles on 200,000 points of time, and one by one as in the paper's algorithm."""
    steps, stds = [s for s in (50, 100, 150, 200) for _ in range(2)], [0.05, 0.1] * 4
    t = (np.arange(200_000) + 0.5) / 1000
    columns = np.stack([profile(t, end, width) for end, width in zip(steps, stds, strict=True)], axis=1)
    expected = np.linalg.lstsq(columns, profile(t, 200, std), rcond=None)[0]
    found = posthoc_coefficients(steps, stds, 200, std)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-2, atol=1e-3)
    assert found.sum() == pytest.approx(1.0)


def test_a_width_that_is_there_is_itself() -> None:
    found = posthoc_coefficients([100, 100, 200, 200], [0.05, 0.1, 0.05, 0.1], 200, 0.1)
    np.testing.assert_allclose(found, [0, 0, 0, 1], atol=1e-9)


@pytest.mark.parametrize(("std", "tolerance"), [(0.05, 1e-5), (0.07, 2e-3), (0.12, 1e-2), (0.2, 5e-2)])
def test_a_rebuilt_average_is_the_one_of_all_iterates(std: float, tolerance: float) -> None:
    """A run of 2000 steps, a snapshot every 100; errors are shares of how far the raw weights are from the average."""
    rng = np.random.default_rng(0)
    # decaying to a point, with the noise of the steps
    iterates = 3 * np.exp(-np.arange(1, 2001) / 700)[:, None] + np.cumsum(0.01 * rng.standard_normal((2000, 50)), 0)
    averages, snapshots = make_averages(EmaConfig(snapshot_every=100)), []
    for step, weights in enumerate(torch.from_numpy(iterates).float(), start=1):
        for name, ema in averages.items():
            ema.update({"w": weights}.items(), step)
            if step % 100 == 0 and name != "ema":
                assert ema.average is not None
                snapshots.append((step, float(name[4:]), ema.average["w"].double().numpy().copy()))
    steps, stds, values = zip(*snapshots, strict=True)
    found = posthoc_coefficients(steps, stds, 2000, std) @ np.stack(values)
    gamma = power_exponent(std)
    up_to = (np.arange(2001) / 2000) ** (gamma + 1)
    expected = np.diff(up_to) @ iterates
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(iterates[-1] - expected)


@pytest.fixture(scope="module")
def runs(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run in one go and in two, with a snapshot that the first part of the second had left behind."""
    folder = tmp_path_factory.mktemp("posthoc")
    validation = {"root": str(latents), "bucket": "64x64", "samples": 8, "batch_size": 8, "every": 4}
    changes = {"ema": {"snapshot_every": 4}, "checkpoint": {"every": 6}, "optimizer": {"lr": 1e-2}}
    for name, parts in (("whole", [12]), ("parts", [8, 12])):
        for max_steps in parts:
            averaged = validation | {"weights": "ema" if name == "whole" else "raw"}
            fields = train_fields(latents, folder / name, max_steps=max_steps, validation=averaged, **changes)
            command(["--config", str(write_config(folder, fields))])
            if max_steps == 8:  # as if killed after step 8: only the checkpoint of step 6 was written, and a torn one
                for path in (step_folder(folder / name, 8), step_folder(folder / name / "posthoc", 8)):
                    path.rename(path.with_name("step-00000009"))
                (step_folder(folder / name, 9) / "optimizer.safetensors").unlink()
    return folder / "whole", folder / "parts"


def test_killed_and_resumed_averages_and_snapshots_are_bit_equal(runs: tuple[Path, Path]) -> None:
    whole, parts = (newest_checkpoint(run) for run in runs)
    assert whole is not None and parts is not None and whole.content["files"] == parts.content["files"]
    assert {f"ema-0.050/{WEIGHTS_NAME}", f"ema-0.100/{WEIGHTS_NAME}"} <= set(whole.content["files"])
    for run in runs:
        assert [folder.name[-2:] for folder in list_checkpoints(run / "posthoc")] == ["04", "08", "12"]
    for step in (4, 8, 12):
        files = [read_sealed_json(step_folder(run / "posthoc", step) / "state.json")["files"] for run in runs]
        assert files[0] == files[1] and len(files[0]) == 4
    half, full = (load_file(step_folder(runs[0] / place, 12) / "ema-0.050" / WEIGHTS_NAME) for place in ("posthoc", ""))
    assert all(half[name].equal(value.half()) for name, value in full.items()) and len(half) > 50


def test_the_command_rebuilds_and_export_takes_it(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run = runs[0]
    command(["ema", str(run), "--std", "0.07"])
    folder = Path(capsys.readouterr().out.strip())
    assert folder == run / "posthoc" / "std-0.070-step-00000012"
    made_of = read_sealed_json(folder / RECORD)["made_of"]
    assert [(part["step"], part["std"]) for part in made_of] == [(s, w) for s in (4, 8, 12) for w in (0.05, 0.1)]
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
    # the widths that were kept are themselves, to float16
    kept = write_average(run, RebuildConfig(std=0.1, step=8))
    snapshot = load_file(step_folder(run / "posthoc", 8) / "ema-0.100" / WEIGHTS_NAME)
    for name, value in load_file(kept / WEIGHTS_NAME).items():
        torch.testing.assert_close(value, snapshot[name].float(), rtol=1e-6, atol=1e-8)


def test_validation_of_the_average_and_the_run_as_if_there_was_none(runs: tuple[Path, Path]) -> None:
    """Raw weights in one run and averages in the other: other values, and the same training, bit by bit."""
    assert curve(runs[0]) == curve(runs[1])
    averaged, raw = (
        {row["step"]: row["val_loss"] for row in read_json_lines(run / "metrics.jsonl") if "val_loss" in row}
        for run in runs
    )
    assert averaged.keys() == raw.keys() == {4, 8, 12}
    assert averaged[12] != raw[12]


def test_a_swap_is_exact_both_ways() -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.randn(7).to(memory_format=torch.contiguous_format)}
    ema = make_averages(EmaConfig(start_step=1))["ema"]
    ema.swap(weights.items())  # nothing is held yet
    ema.update(weights.items(), 1)
    for weight in weights.values():
        weight.mul_(-0.3)
    assert ema.average is not None
    before = [{name: value.clone() for name, value in held.items()} for held in (weights, ema.average)]
    ema.swap(weights.items())
    assert all(weights[name].equal(before[1][name]) and ema.average[name].equal(before[0][name]) for name in weights)
    ema.swap(weights.items())
    assert all(weights[name].equal(before[0][name]) and ema.average[name].equal(before[1][name]) for name in weights)


def test_buffers_are_taken_as_they_are(tmp_path: Path) -> None:
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


def test_bad_requests(runs: tuple[Path, Path], latents: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no snapshot of step 9; the nearest are 4, 8, 12"):
        write_average(runs[0], RebuildConfig(std=0.07, step=9))
    with pytest.raises(RequestError, match=r"holds no snapshots. Train with ema.snapshot_every"):
        write_average(tmp_path, RebuildConfig(std=0.07))
    with pytest.raises(RequestError, match="name the run first"):
        command(["ema", "--std", "0.07"])
    with pytest.raises(RequestError, match="train ema reads a run folder of this machine, not s3://bucket/run"):
        command(["ema", "s3://bucket/run", "--std", "0.1"])
    with pytest.raises(RequestError, match="holds something else than an average"):
        write_average(runs[0], RebuildConfig(std=0.07, output=runs[0]))
    with pytest.raises(RequestError, match="is neither auto, raw, ema nor a folder with"):
        write_pipeline(runs[0], ExportConfig(weights="posthoc"))
    with pytest.raises(ValueError, match="names a width twice"):
        EmaConfig(std=[0.05, 0.0501])
    fields = train_fields(latents, tmp_path, ema={"start_step": None}, validation={"weights": "ema"})
    with pytest.raises(RequestError, match=r"validation\.weights ema has no average to read"):
        command(["check", "--config", str(write_config(tmp_path, fields))])


def test_damage_and_overflow_are_found(runs: tuple[Path, Path]) -> None:
    path = step_folder(runs[1] / "posthoc", 4) / "ema-0.100" / WEIGHTS_NAME
    sound = path.read_bytes()
    data = bytearray(sound)
    data[-2:] = b"\x00\x7c"  # float16's infinity
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedFile, match="does not have the SHA-256"):
        write_average(runs[1], RebuildConfig(std=0.07))
    with pytest.raises(WorkError, match=r"not finite: they are beyond float16.*snapshot_dtype float32"):
        combine([path.parent], np.ones(1))
    path.write_bytes(sound)
