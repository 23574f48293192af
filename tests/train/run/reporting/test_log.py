"""Trackers: one run of theirs however often it is requeued, with its config and source, and ended when it leaves."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from shards.base.errors import Preempted, RequestError
from tests.runs import train_fields, write_config
from tests.train.run.reporting.leaving import leaves_after
from train.__main__ import run as command
from train.run.preflight import check_tracker
from train.run.reporting import tracker
from train.run.reporting.tracker import flat_numbers, source_state


def test_lines_are_durable_before_their_checkpoint_is(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut would leave a checkpoint whose lines are gone, which no launch writes again."""
    happened: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(file: int) -> None:
        happened.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def replaced(path: Path, target: Path) -> Path:
        happened.append(f"in place: {Path(target).name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    command(["--config", str(write_config(tmp_path, train_fields(latents, tmp_path / "run", max_steps=4)))])
    first, second = (happened.index(f"in place: step-{step:08d}") for step in (2, 4))
    for part in (happened[:first], happened[first:second]):
        assert {"metrics.jsonl", "samples.jsonl"} <= set(part)


def test_three_launches_are_one_run_of_wandbs(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline; the first two are preempted, and what they logged is complete."""
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    begun: list[tuple[dict[str, Any], Any]] = []
    init = wandb.init

    def recorded(**options: Any) -> Any:
        begun.append((options, init(**options)))
        return begun[-1][1]

    monkeypatch.setattr(wandb, "init", recorded)
    settings = {"tracker": "wandb", "project": "mill", "name": "small", "tags": ["a", "b"]}
    fields = train_fields(latents, tmp_path / "run", log=settings)
    before = signal.getsignal(signal.SIGTERM)
    for step in (2, 4):
        leaves_after(monkeypatch, step)
        with pytest.raises(Preempted):
            command(["--config", str(write_config(tmp_path, fields))])
        assert wandb.run is None  # ended
        time.sleep(1.1)  # wandb names a launch's folder by the second, and a launch's imports alone take longer
    command(["--config", str(write_config(tmp_path, fields))])
    signal.signal(signal.SIGTERM, before)
    (run_id,) = {options["id"] for options, _ in begun}
    assert json.loads((tmp_path / "run" / "tracker.json").read_text()) == {"id": run_id}
    assert len(begun) == 3 and all(options["resume"] == "allow" for options, _ in begun)
    for options, run in begun:
        assert (options["project"], options["name"], run.id, run.tags) == ("mill", "small", run_id, ("a", "b"))
        assert run.config["global_batch_size"] == 8 and run.config["source"] == source_state()
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))) == 3


def test_three_launches_are_one_run_of_mlflows(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder; the first two are preempted, and settings change in between, which mlflow does not take."""
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = signal.getsignal(signal.SIGTERM)
    address, known = f"file://{tmp_path / 'mlruns'}", mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(address)
    settings = {"tracker": "mlflow", "project": "mill", "name": "small", "tags": ["a", "b"]}
    states = []
    for last in (2, 4, 6):
        fields = train_fields(latents, tmp_path / "run", log=settings, microbatch_size=last)
        arguments = ["--config", str(write_config(tmp_path, fields))]
        if last < 6:
            leaves_after(monkeypatch, last)
            with pytest.raises(Preempted):
                command(arguments)
        else:
            command(arguments)
        assert mlflow.active_run() is None  # ended
        (run,) = mlflow.search_runs(experiment_names=["mill"], output_format="list")
        states.append(run.info.status)
    signal.signal(signal.SIGTERM, before)
    assert states == ["FINISHED"] * 3 and run.info.run_name == "small"
    assert json.loads((tmp_path / "run" / "tracker.json").read_text())["mlflow"] == run.info.run_id
    assert {"a": "true", "b": "true"}.items() <= run.data.tags.items()
    assert run.data.params["global_batch_size"] == "8" and run.data.params["source"] == source_state()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 4, 5, 6]
    mlflow.set_tracking_uri(known)


def test_tensorboard_has_every_step_once_and_the_settings(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = train_fields(latents, tmp_path / "run", log={"tracker": "tensorboard"})
    before = signal.getsignal(signal.SIGTERM)
    leaves_after(monkeypatch, 3)
    with pytest.raises(Preempted):
        command(["--config", str(write_config(tmp_path, fields))])
    command(["--config", str(write_config(tmp_path, fields))])
    signal.signal(signal.SIGTERM, before)
    events = EventAccumulator(str(tmp_path / "run" / "tracker")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    said = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    global_batch_size: 8" in said and f"    source: {source_state()}" in said


def test_the_source_is_known_from_a_repository_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "__file__", str(tmp_path / "tracker.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source_state() is None


def test_the_source_is_not_the_commit_of_a_repository_that_merely_contains_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment in a user's repository; once git tracks the package there, its commit counts."""
    site = tmp_path / ".venv" / "telling"
    site.mkdir(parents=True)
    (site / "tracker.py").write_text("")
    (tmp_path / "theirs").write_text("")

    def git(*words: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *settings, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "theirs")
    git("commit", "-qm", "theirs")
    monkeypatch.setattr(tracker, "__file__", str(site / "tracker.py"))
    assert source_state() is None
    git("add", ".venv")
    git("commit", "-qm", "vendored")
    assert source_state() == git("rev-parse", "HEAD")
    (site / "tracker.py").write_text("changed")
    assert source_state() == git("rev-parse", "HEAD") + "-dirty"


def test_trackers_get_numbers_alone() -> None:
    fields = {"loss": 1.5, "mfu": None, "loss_by_quarter": {"0-249": 0.5, "250-499": None}, "ema": True}
    assert flat_numbers(fields) == {"loss": 1.5, "loss_by_quarter/0-249": 0.5, "ema": True}


def test_trackers_are_accelerates(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracker("none")
    check_tracker("tensorboard")
    with pytest.raises(RequestError, match=r"tensorbord is unknown\. Set it to none, or to one of aim, clearml"):
        check_tracker("tensorbord")
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    with pytest.raises(RequestError, match="comet_ml needs a package that is not installed"):
        check_tracker("comet_ml")
