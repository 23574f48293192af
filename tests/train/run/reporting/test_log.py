"""Trackers show one run however often it is requeued, with its config and commit. Lines outlive power cuts."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from shards.base.errors import Preempted, RequestError
from tests.runs import train_fields, write_config
from tests.train.run.reporting.offline import use_offline_wandb, wait_for_next_second
from tests.train.run.reporting.preemption import preempt_in_step
from train.__main__ import run as command
from train.run.preflight import check_tracker
from train.run.reporting import tracker
from train.run.reporting.tracker import flatten_numbers, source_version


def test_lines_are_flushed_before_their_checkpoint_is_published(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut could lose lines of steps that a checkpoint contains, which no launch would write again."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(file: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def record_replace(path: Path, target: Path) -> Path:
        events.append(f"published: {Path(target).name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    command(["--config", str(write_config(tmp_path, train_fields(latents, tmp_path / "run", max_steps=4)))])
    first, second = (events.index(f"published: step-{step:08d}") for step in (2, 4))
    for part in (events[:first], events[first:second]):
        assert {"metrics.jsonl", "samples.jsonl"} <= set(part)


def test_three_launches_are_one_run_in_wandb(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two are preempted, and end wandb's run first so that its files are complete."""
    use_offline_wandb(monkeypatch)
    import wandb

    started: list[tuple[dict[str, Any], Any]] = []
    init = wandb.init

    def record_init(**options: Any) -> Any:
        started.append((options, init(**options)))
        return started[-1][1]

    monkeypatch.setattr(wandb, "init", record_init)
    settings = {"tracker": "wandb", "project": "mill", "name": "small", "tags": ["a", "b"]}
    fields = train_fields(latents, tmp_path / "run", log=settings)
    before = signal.getsignal(signal.SIGTERM)
    for step in (2, 4):
        preempt_in_step(monkeypatch, step)
        with pytest.raises(Preempted):
            command(["--config", str(write_config(tmp_path, fields))])
        assert wandb.run is None  # it was ended
        wait_for_next_second()
    command(["--config", str(write_config(tmp_path, fields))])
    signal.signal(signal.SIGTERM, before)
    (run_id,) = {options["id"] for options, _ in started}
    assert json.loads((tmp_path / "run" / "tracker.json").read_text()) == {"id": run_id}
    assert len(started) == 3 and all(options["resume"] == "allow" for options, _ in started)
    for options, run in started:
        assert (options["project"], options["name"], run.id, run.tags) == ("mill", "small", run_id, ("a", "b"))
        assert run.config["global_batch_size"] == 8 and run.config["source"] == source_version()
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))) == 3


def test_three_launches_are_one_run_in_mlflow(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two are preempted, and a setting changes each time, although mlflow refuses changed parameters."""
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = signal.getsignal(signal.SIGTERM)
    tracking_folder, tracking_uri = f"file://{tmp_path / 'mlruns'}", mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tracking_folder)
    settings = {"tracker": "mlflow", "project": "mill", "name": "small", "tags": ["a", "b"]}
    statuses = []
    for last in (2, 4, 6):
        fields = train_fields(latents, tmp_path / "run", log=settings, microbatch_size=last)
        arguments = ["--config", str(write_config(tmp_path, fields))]
        if last < 6:
            preempt_in_step(monkeypatch, last)
            with pytest.raises(Preempted):
                command(arguments)
        else:
            command(arguments)
        assert mlflow.active_run() is None  # it was ended
        (run,) = mlflow.search_runs(experiment_names=["mill"], output_format="list")
        statuses.append(run.info.status)
    signal.signal(signal.SIGTERM, before)
    assert statuses == ["FINISHED"] * 3 and run.info.run_name == "small"
    assert json.loads((tmp_path / "run" / "tracker.json").read_text())["mlflow"] == run.info.run_id
    assert {"a": "true", "b": "true"}.items() <= run.data.tags.items()
    assert run.data.params["global_batch_size"] == "8" and run.data.params["source"] == source_version()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 4, 5, 6]
    mlflow.set_tracking_uri(tracking_uri)


def test_tensorboard_gets_every_step_once_and_the_config(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = train_fields(latents, tmp_path / "run", log={"tracker": "tensorboard"})
    before = signal.getsignal(signal.SIGTERM)
    preempt_in_step(monkeypatch, 3)
    with pytest.raises(Preempted):
        command(["--config", str(write_config(tmp_path, fields))])
    command(["--config", str(write_config(tmp_path, fields))])
    signal.signal(signal.SIGTERM, before)
    events = EventAccumulator(str(tmp_path / "run" / "tracker")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    global_batch_size: 8" in text and f"    source: {source_version()}" in text


def test_outside_a_git_repository_there_is_no_source_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "__file__", str(tmp_path / "tracker.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source_version() is None


def test_the_commit_of_a_repository_that_does_not_track_the_package_is_not_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a virtual environment in a user's repository. If git tracks the package there, the commit counts."""
    site = tmp_path / ".venv" / "reporting"
    site.mkdir(parents=True)
    (site / "tracker.py").write_text("")
    (tmp_path / "other").write_text("")

    def git(*words: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *settings, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "other")
    git("commit", "-qm", "other")
    monkeypatch.setattr(tracker, "__file__", str(site / "tracker.py"))
    assert source_version() is None
    git("add", ".venv")
    git("commit", "-qm", "vendored")
    assert source_version() == git("rev-parse", "HEAD")
    (site / "tracker.py").write_text("changed")
    assert source_version() == git("rev-parse", "HEAD") + "-dirty"


def test_trackers_get_only_numbers() -> None:
    fields = {"loss": 1.5, "mfu": None, "loss_by_quarter": {"0-249": 0.5, "250-499": None}, "ema": True}
    assert flatten_numbers(fields) == {"loss": 1.5, "loss_by_quarter/0-249": 0.5, "ema": True}


def test_trackers_other_than_those_of_accelerate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracker("none")
    check_tracker("tensorboard")
    with pytest.raises(RequestError, match=r"tensorbord is unknown\. Set it to none, or to one of aim, clearml"):
        check_tracker("tensorbord")
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    with pytest.raises(RequestError, match="comet_ml needs a package that is not installed"):
        check_tracker("comet_ml")
