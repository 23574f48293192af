"""Complete runs: loss curves, resuming, refused requests, damaged data, signals, validation and the log."""

import re
import shutil
import subprocess
import time
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from shards.base.errors import RequestError, WorkError, exit_code_of
from shards.base.store import LocalStore
from shards.root.index import write_indexes
from tests import ranks
from tests.forks import OK, fork, import_again, wait_for
from tests.roots import part_of
from tests.runs import PYTHON, compare, curve, environment, run_module, train_fields, train_run, write_config
from tests.tiny import flip_a_bit
from train.__main__ import run as command
from train.data.batch import Batch
from train.data.draws import Draws
from train.objective.loss import DiffusionLoss, NoisyBatch
from train.run.checkpoints.checkpoint import (
    list_checkpoints,
    newest_checkpoint,
    step_folder,
    step_of,
    verify_checkpoint,
)
from train.run.reporting.json_lines import read_json_lines

STEPS = 8


def run(folder: Path, fields: dict[str, Any], num_processes: int = 1) -> subprocess.CompletedProcess[str]:
    words = ("--config", str(write_config(folder, fields)), "--num_processes", str(num_processes))
    return run_module("train", *words, num_processes=num_processes)


def refused(folder: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Run `train check`, which must refuse the request, and return its error as one line."""
    config = write_config(folder, fields)
    assert exit_code_of(lambda: command(["check", "--config", str(config)])) == 2
    return capsys.readouterr().err.replace("\n", " ")


@pytest.fixture(scope="module")
def reference(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process without loader workers, with microbatches of 4. An epoch is 24 of the 30 samples, so the
    run takes more than two epochs."""
    run_dir = train_run(latents, tmp_path_factory.mktemp("reference") / "run", max_steps=STEPS)
    losses, keys = curve(run_dir)
    assert len(losses) == STEPS and all(len(set(batch)) == 8 for batch in keys)
    assert len({key for batch in keys[:3] for key in batch}) == 24  # an epoch repeats no sample
    return run_dir


def test_check_checks_a_launch_of_several_processes_in_one(
    latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(write_config(tmp_path, train_fields(latents, tmp_path / "run")))]
    command(["check", *config, "--num_processes", "4"])
    assert "would start from random weights" in capsys.readouterr().out
    with pytest.raises(RequestError, match=r"global_batch_size 8 is not divisible by the number of processes \(3\)"):
        command(["check", *config, "--num_processes", "3"])
    assert not (tmp_path / "run").exists()


def test_a_killed_run_resumes_from_the_checkpoint_before_a_damaged_one(
    reference: Path, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is killed after step 5 and its second checkpoint, whose weights are then damaged."""
    fields = train_fields(latents, tmp_path / "run", max_steps=STEPS)
    config = write_config(tmp_path, fields)
    (process,) = ranks.start(tmp_path / "log", ["--config", str(config)])
    while len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) < 5 or len(list_checkpoints(tmp_path / "run")) < 2:
        assert process.exitcode in (None, 0)
        time.sleep(0.005)
    process.kill()
    process.join()
    newest = list_checkpoints(tmp_path / "run")[-1]
    flip_a_bit(newest / "unet" / "diffusion_pytorch_model.safetensors")

    command(["--config", str(config)])
    printed = capsys.readouterr().out
    assert f"checkpoint {newest.name} is damaged and will be skipped" in printed
    assert f"resuming {tmp_path}/run after step" in printed
    assert curve(tmp_path / "run") == curve(reference)
    last = newest_checkpoint(tmp_path / "run")
    assert last is not None and last.state.step == STEPS
    expected = verify_checkpoint(list_checkpoints(reference)[-1])
    lines = [read_json_lines(run_dir / "metrics.jsonl") for run_dir in (tmp_path / "run", reference)]
    assert [[row["loss_by_quarter"] for row in rows] for rows in lines[:1]] == [
        [row["loss_by_quarter"] for row in rows] for rows in lines[1:]
    ]
    assert last.content["files"] == expected.content["files"]  # weights, moving average and optimizer are bit-exact


def test_a_run_on_three_processes_resumes_bit_exactly(latents: Path, tmp_path: Path) -> None:
    """A gradient is the sum of three. The first step of a launch must add them in the same order as all other steps."""
    fields = train_fields(latents, tmp_path / "whole", max_steps=3, global_batch_size=12)
    ranks.run(tmp_path / "whole.log", ["--config", str(write_config(tmp_path, fields))], 3)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(step_folder(tmp_path / "run", 3))
    resumed = write_config(tmp_path, fields | {"run_dir": str(tmp_path / "run")})
    assert "after step 2" in ranks.run(tmp_path / "run.log", ["--config", str(resumed)], 3)
    compare(tmp_path / "run", tmp_path / "whole")


def test_training_needs_nothing_of_stage_1_but_its_latents(
    reference: Path, latents: Path, models: Path, tars: Path, tmp_path: Path
) -> None:
    """It trains a second phase. A fork of this process could not: torch refuses to train in a fork if some operations,
    such as nested backward passes, have started autograd's threads before."""
    root = shutil.copytree(latents, tmp_path / "root")
    fields = train_fields(root, tmp_path / "phase2", max_steps=1, init_from=str(reference), init_weights="raw")
    arguments = [str(models), str(tars), str(write_config(tmp_path, fields))]
    processes = ranks.start(tmp_path / "log", arguments, program="tests.train.alone:run")
    assert ranks.wait(processes, 300) == [0], (tmp_path / "log").read_text()
    start = f"from run after step {STEPS} ({reference}/checkpoints/step-{STEPS:08d}/unet)"
    assert start in (tmp_path / "log").read_text()
    assert verify_checkpoint(step_folder(tmp_path / "phase2", 1)).state.step == 1


def test_evaluations_are_logged_without_pil() -> None:
    def import_alone() -> None:
        import_again("PIL")
        import_module("train.run.reporting.evaluations")

    assert wait_for(fork(import_alone)) == OK


def test_light_commands_do_not_import_heavy_modules() -> None:
    imports = {  # all in one process, in this order
        "shards.root.index": ["precompute", "train", "torch", "diffusers", "ray", "accelerate"],
        "shards.__main__": ["precompute", "torch", "ray"],
        "train.__main__": ["precompute", "ray", "img2dataset", "torch"],
        "plan.__main__": ["torch"],
        "evaluation.study.__main__": ["torch", "ray", "scipy.stats"],
        "evaluation.report.commands": ["torch", "ray", "scipy.stats"],
        "precompute.select.__main__": ["torch", "ray"],
        "precompute.download.__main__": ["torch", "ray", "img2dataset"],
    }
    program = f"""
import importlib, sys
for name, forbidden in {imports}.items():
    importlib.import_module(name)
    print(name, [each for each in forbidden if each in sys.modules])
"""
    result = subprocess.run([*PYTHON, "-c", program], capture_output=True, text=True, env=environment(), timeout=300)
    assert result.stdout.splitlines() == [f"{name} []" for name in imports], result.stdout + result.stderr


def test_precompute_starts_without_diffusers_and_img2dataset() -> None:
    """It starts with torch, which a fresh interpreter would take seconds to import."""

    def import_alone() -> None:
        import_again("diffusers", "img2dataset")
        import_module("precompute.__main__")

    assert wait_for(fork(import_alone)) == OK


@pytest.mark.parametrize(
    ("microbatch_size", "seed", "warmup", "num_lines", "is_warned"), [(8, 0, 1, 0, True), (16, 1, 0, 1, False)]
)
def test_a_large_microbatch_the_seed_of_the_run_it_starts_from_and_endless_warm_up_are_reported(
    reference: Path,
    latents: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    microbatch_size: int,
    seed: int,
    warmup: int,
    num_lines: int,
    is_warned: bool,
) -> None:
    changes = {"max_steps": 1, "init_from": str(reference), "init_weights": "raw", "seed": seed}
    changes["schedule"] = {"warmup_steps": warmup}
    train_run(latents, tmp_path / "run", microbatch_size=microbatch_size, **changes)
    printed = capsys.readouterr().out
    line = (
        "microbatch_size 16 is larger than each process's share of the batch (global_batch_size 8 over 1 process), "
        "so the effective microbatch size is 8."
    )
    assert printed.splitlines().count(line) == num_lines
    assert ("was trained with the same seed" in printed) == is_warned
    assert ("the learning rate rises during the whole run" in printed) == is_warned


@pytest.mark.parametrize(
    ("bucket", "changes", "message"),
    [
        (
            "64x64",
            {"global_batch_size": 64},
            "has 30 samples. With weight 1, the stream does not fill one global batch of 64",
        ),
        (
            "64x64",
            {"data": {"filter": {"width": {"min": 9999}}}},
            "of which 0 remain. Samples that fail, by rule: width ≥ 9999 (30). The stream has nothing to train on. "
            "Encode more shards, loosen the filter, or remove the stream.",
        ),
        ("64x64", {"backbone": {"config": "/absent.json"}}, "/absent.json cannot be read as JSON"),
        ("256x256", {}, "has no bucket 256x256 (it has: 128x128, 64x64)"),
        ("64x64 64x64", {}, "64x64 twice. List it once"),
        ("64x64", {"validation": {"samples": 31}}, "has 30 samples, but validation.samples is 31. Lower"),
        ("64x64", {"validation": {"samples": 4, "root": "/absent"}}, "/absent is not a latents root"),
    ],
    ids=["batch-size", "filter", "network", "missing-bucket", "bucket-twice", "validation-samples", "validation-root"],
)
def test_invalid_requests_are_refused_and_write_nothing(
    latents: Path,
    tmp_path: Path,
    bucket: str,
    changes: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """tests/train/test_early.py has those that are refused without torch."""
    streams = [{"root": str(latents), "bucket": name} for name in bucket.split()]
    data = {"streams": streams} | changes.pop("data", {})
    fields = train_fields(latents, tmp_path / "run", data=data, **changes)
    if "validation" in changes:
        fields["validation"] = {"root": str(latents), "bucket": "64x64"} | changes["validation"]
    assert message in refused(tmp_path, fields, capsys)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_resumes_only_under_the_same_settings(
    reference: Path, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = train_fields(latents, reference, max_steps=20, global_batch_size=12, seed=5)
    message = refused(tmp_path, fields, capsys)
    assert "seed: 0 ≠ 5; global_batch_size: 8 ≠ 12 (checkpoint ≠ this run)" in message
    streams = [{"root": str(latents), "bucket": bucket} for bucket in ("64x64", "128x128")]
    fields = train_fields(latents, reference, max_steps=20, data={"streams": streams})
    message = "was trained with different settings: number of streams: 1 ≠ 2 (checkpoint ≠ this run)"
    assert message in refused(tmp_path / "streams", fields, capsys)


def test_a_run_whose_index_was_deleted_continues_once_it_is_rebuilt(
    latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(latents, tmp_path / "root")
    train_run(root, tmp_path / "run", max_steps=1)
    for index in (root / "index" / "buckets").iterdir():
        index.unlink()
    fields = train_fields(root, tmp_path / "run", max_steps=20)
    message = refused(tmp_path / "data", fields, capsys)
    assert "has no index " in message and "rebuild it with `python -m shards index" in message
    assert "If data.streams now names a different root, or lists the streams in a different order" in message
    write_indexes(LocalStore(root))  # the new index names the same parts, so it is identical
    assert exit_code_of(lambda: command(["check", "--config", str(write_config(tmp_path / "again", fields))])) == 0


def test_a_missing_file_is_named_before_the_first_step(
    latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(latents, tmp_path / "root")
    (part_of(tmp_path / "root", "64x64", "00001") / "shard.00000.mds").unlink()
    message = refused(tmp_path, train_fields(tmp_path / "root", tmp_path / "run"), capsys)
    assert re.search(r"64x64/00001\.\w+/shard.00000.mds is missing, but its index lists", message)


def test_a_file_with_a_flipped_bit_is_named_and_stops_the_run(latents: Path, tmp_path: Path) -> None:
    """tests/train/data/test_files.py has the other kinds of damage, which the loader finds."""
    root = shutil.copytree(latents, tmp_path / "root")
    path = part_of(root, "64x64", "00001") / "shard.00000.mds"
    flip_a_bit(path)
    result = run(tmp_path, train_fields(root, tmp_path / "run", max_steps=20, data={"num_workers": 2, "timeout": 10}))
    assert result.returncode == 1
    assert f"{path} is damaged: its xxh3_64 does not match its index" in result.stderr.replace("\n", " ")


def make_infinite(steps: Collection[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the latents of these steps (counted from 1) infinite."""
    add_noise = DiffusionLoss.add_noise

    def blow_up(self: DiffusionLoss, batch: Batch, draws: Draws) -> NoisyBatch:
        noisy = add_noise(self, batch, draws)
        return replace(noisy, latents=noisy.latents * float("inf")) if draws.step + 1 in steps else noisy

    monkeypatch.setattr(DiffusionLoss, "add_noise", blow_up)


def test_non_finite_steps_change_nothing_and_too_many_stop_the_run(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents are infinite from the fourth step on, so weights and optimizer state must stay those of step 3."""
    make_infinite(range(4, 7), monkeypatch)
    fields = train_fields(
        latents, tmp_path / "run", checkpoint={"every": 1, "keep": 9}, optimizer={"max_skipped_steps": 2}
    )
    config = write_config(tmp_path, fields)
    with pytest.raises(
        WorkError,
        match=r"3 of the 6 steps up to step 6 had a non-finite loss or gradient, more than optimizer.max_skipped_steps "
        r"\(2\).* its weights may have diverged already: remove it",
    ):
        command(["--config", str(config)])
    assert [row["loss"] is None for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [False] * 3 + [
        True
    ] * 2
    third, fifth = (verify_checkpoint(step_folder(tmp_path / "run", step)).content["files"] for step in (3, 5))
    assert third["optimizer.safetensors"] == fifth["optimizer.safetensors"]
    name = "unet/diffusion_pytorch_model.safetensors"
    assert third[name] == fifth[name]


def test_a_line_has_the_largest_gradient_norm_since_the_line_before(latents: Path, tmp_path: Path) -> None:
    """Even if a checkpoint is saved in between."""
    norms = {}
    for every in (1, 6):
        run_dir = train_run(latents, tmp_path / f"run{every}", log={"every": every}, checkpoint={"every": 2})
        lines = read_json_lines(run_dir / "metrics.jsonl")
        norms[every] = {line["step"]: line["grad_norm"] for line in lines}
    assert norms[6] == {6: max(norms[1].values())} != {6: norms[1][6]}


def test_skipped_steps_that_are_far_apart_do_not_add_up(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 and 5 are skipped. Any four successive steps contain at most one of them, also if the run resumes."""
    make_infinite((1, 5), monkeypatch)
    for window, max_steps in ((4, 3), (4, 6), (5, 6)):
        monkeypatch.setattr("train.metrics.SKIP_WINDOW", window)
        fields = train_fields(
            latents, tmp_path / f"run{window}", max_steps=max_steps, optimizer={"max_skipped_steps": 1}
        )
        config = write_config(tmp_path, fields)
        with pytest.raises(WorkError, match="2 of the 5 steps up to step 5") if window == 5 else nullcontext():
            command(["--config", str(config)])
    assert read_json_lines(tmp_path / "run4" / "metrics.jsonl")[-1]["skipped_steps"] == 2


def test_a_run_without_an_intact_checkpoint_does_not_restart(
    reference: Path, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(reference, tmp_path / "run")
    for folder in list_checkpoints(tmp_path / "run"):
        (folder / "optimizer.safetensors").write_bytes(b"x")
    message = refused(tmp_path, train_fields(latents, tmp_path / "run", max_steps=20), capsys)
    assert "Every checkpoint in" in message and "step-00000008" in message
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == STEPS


def test_a_later_damaged_checkpoint_does_not_replace_new_ones(reference: Path, latents: Path, tmp_path: Path) -> None:
    for step in (11, 12):
        step_folder(tmp_path / "run", step).mkdir(parents=True)
    shutil.copytree(step_folder(reference, STEPS), step_folder(tmp_path / "run", STEPS))
    run_dir = train_run(latents, tmp_path / "run", max_steps=STEPS + 2, checkpoint={"every": 1, "keep": 1})
    assert [step_of(folder) for folder in list_checkpoints(run_dir)] == [STEPS + 2, 11, 12]


def test_a_flipped_bit_in_the_empty_caption_is_detected(
    latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(latents, tmp_path / "root")
    flip_a_bit(root / "uncond.safetensors")
    config = write_config(tmp_path, train_fields(root, tmp_path / "run"))
    assert exit_code_of(lambda: command(["check", "--config", str(config)])) == 1
    assert "uncond.safetensors is damaged" in capsys.readouterr().err.replace("\n", " ")


def test_all_fields_of_a_log_line(latents: Path, tmp_path: Path) -> None:
    """A run with flow matching, a power-function average, low-precision norms, TensorBoard and `log.peak_tflops`."""
    validation = {"root": str(latents), "bucket": "64x64", "samples": 4, "batch_size": 4, "every": 2}
    fields = train_fields(
        latents,
        tmp_path / "run",
        max_steps=2,
        objective={"prediction": "flow_matching", "timestep_sampling": "logit_normal"},
        ema={"kind": "power", "sigma_rel": 0.1, "start_step": 2},
        log={"tracker": "tensorboard", "peak_tflops": 1e-3},
        validation=validation,
        precision="bfloat16",
        low_precision_norms=True,
    )
    # in a separate process, because accelerate cannot change its precision within a process
    result = run_module("train", "--config", str(write_config(tmp_path, fields)))
    assert result.returncode == 0, result.stderr
    first, second = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert (first["ema"], first["ema_decay"]) == (False, None) and second["ema"]
    assert second["ema_decay"] == pytest.approx(0.5**7.937, rel=1e-3)
    assert second["images_per_second_per_gpu"] == second["images_per_second"] > 0
    assert second["mfu"] > 0 and 0.05 < second["memory_gb"] < 20
    assert list(second["val_loss_by_timestep"])[:2] == ["62.5", "187.5"]
    means = [value for value in second["loss_by_quarter"].values() if value is not None]
    assert len(second["loss_by_quarter"]) == 4 and min(means) <= second["loss"] <= max(means)
    assert list((tmp_path / "run" / "tracker").glob("events*"))


def test_the_collective_timeout_is_set_after_the_first_batch_of_each_loader_worker(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch of each worker may take `data.first_timeout`, while the other ranks wait in a collective."""
    steps: list[int] = []
    monkeypatch.setattr(
        "train.trainer.set_collective_timeout", lambda heartbeat, timeout, groups: steps.append(heartbeat.status.step)
    )
    train_run(latents, tmp_path / "run", max_steps=4, data={"num_workers": 2})
    assert steps == [2]


def test_a_resumed_run_keeps_the_precision_that_auto_selected(latents: Path, tmp_path: Path) -> None:
    """config.yaml is edited as if a machine with a different `auto` precision had started the run.

    Before the first checkpoint, that makes no difference.
    """
    fields = train_fields(latents, tmp_path / "run", precision="auto", max_steps=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("precision: float16\n")
    started = run(tmp_path, fields, num_processes=2)
    assert started.returncode == 0 and started.stderr.count("precision: auto selects ") == 1  # the main process selects
    config = tmp_path / "run" / "config.yaml"
    chosen = yaml.safe_load(config.read_text())["precision"]
    assert chosen in ("float32", "bfloat16")
    other = {"float32": "bfloat16", "bfloat16": "float32"}[chosen]
    config.write_text(config.read_text().replace(f"precision: {chosen}", f"precision: {other}"))
    resumed = run(tmp_path, fields | {"max_steps": 3})
    assert resumed.returncode == 0 and "precision: auto selects " not in resumed.stderr
    assert resumed.stderr.count(f"precision: auto keeps {other}, in which this run was trained so far") == 1
    assert yaml.safe_load(config.read_text())["precision"] == other
    command(["--config", str(write_config(tmp_path, fields | {"max_steps": 4, "precision": "float32"}))])
    assert yaml.safe_load(config.read_text())["precision"] == "float32"
