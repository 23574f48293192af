"""The benchmark of the training step: its settings, running out of memory, and the output file."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

import bench.train_step as bench
from plan.measured import read_rates
from tests.runs import UNET
from train.model.network import build_network


def options(*more: str) -> Namespace:
    flags = ["--unet", str(UNET), "--buckets", "64x64", "--microbatches", "4", "8", "16", "--batch", "16"]
    return bench.parse([*flags, *more])


def test_settings_add_one_feature_at_a_time_and_then_vary_the_microbatch() -> None:
    rows = list(bench.settings(options("--compile")))
    assert [(row.microbatch_size, row.words) for row in rows] == [
        (8, "plain"),
        (8, "channels last"),
        (8, "channels last + low precision norms"),
        (8, "channels last + low precision norms + compile"),
        (8, "channels last + compile"),
        (4, "channels last + low precision norms + compile"),
        (16, "channels last + low precision norms + compile"),
    ]
    assert not any(row.compile for row in bench.settings(options("--no-compile")))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDNN: out of memory")])
def test_a_setting_that_runs_out_of_memory_is_listed(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_out(*_: object) -> None:
        raise error

    monkeypatch.setattr(bench, "training", run_out)
    accelerator = type("Accelerator", (), {"device": torch.device("cpu")})()
    out = bench.measure(bench.StepSetting("64x64", 16), options(), accelerator, build_network(UNET, 0))
    good = [
        bench.Result(bench.StepSetting("64x64", size, True), rate, 1.0, 0.5) for size, rate in ((4, 10.0), (8, 12.5))
    ]
    text = bench.describe_results([*good, out], 2.0, torch.device("cpu"), options())
    assert (
        "| 64x64 | 16 | plain | out of memory |" in text
        and "| 64x64 | 8 | channels last | 12.5 | 0.5 | 25.0% |" in text
    )
    bench.write_plan_file(tmp_path / "b.json", [*good, out], torch.device("cpu"), 16)
    (rate,) = read_rates([str(tmp_path / "b.json")], "cpu").of("train", "64x64")
    assert (rate.images_per_second_per_gpu, rate.microbatch_size, rate.gpus) == (12.5, 8, 1)


def test_a_comparison_that_runs_out_of_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(bench, "training", run_out)
    accelerator = type("Accelerator", (), {"device": torch.device("cpu")})()
    pair = bench.compare_with_bare_loop(options(), accelerator, build_network(UNET, 0))
    assert pair is None
    said = bench.describe_pair(pair, options())
    assert f"ran out of memory ({UNET}, 64x64, microbatches of 16). It uses the last value of `--microb" in said


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(bench, "training", fail)
    accelerator = type("Accelerator", (), {"device": torch.device("cpu")})()
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        bench.measure(bench.StepSetting("64x64", 16), options(), accelerator, build_network(UNET, 0))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        bench.compare_with_bare_loop(options(), accelerator, build_network(UNET, 0))


def test_a_batch_can_be_pinned() -> None:
    """Pinning copies into tensors of the same strides, which fails if elements share memory."""
    batch = bench.make_batch("64x64", 4, build_network(UNET, None))
    assert batch.columns["size"].tolist() == [[64, 64, 0, 0]] * 4
    assert all(tensor.is_contiguous() for tensor in batch.columns.values())
