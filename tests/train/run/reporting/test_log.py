"""Lines outlive power cuts, and TensorBoard shows one run, with its config and commit, however often it is requeued."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from shards.base import progress
from shards.base.errors import Outage, Preempted, RequestError
from tests.runs import train_fields, train_run, write_config
from tests.train.run.reporting.preemption import preempt_in_step
from train.__main__ import run as command
from train.run.preflight import check_tracker
from train.run.reporting import tracker
from train.run.reporting.json_lines import read_json_lines
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
    train_run(latents, tmp_path / "run", max_steps=4)
    first, second = (events.index(f"published: step-{step:08d}") for step in (2, 4))
    # the lines of steps 3 and 4 may be flushed before step 2 is published
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert events[:first].count(name) >= 1 and events[:second].count(name) >= 2
    assert events.index("config.yaml") < events.index("published: config.yaml")


def test_lines_of_progress_have_the_loss(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print a line after every step. Until the first metrics are written, lines have no loss."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    train_run(latents, tmp_path / "run", max_steps=4, log={"every": 2})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith('{"step"')]
    losses = {row["step"]: row["loss"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")}
    assert [(line["step"], line.get("loss")) for line in lines] == [
        *((1, None), (2, None), (2, losses[2]), (3, losses[2]), (4, losses[2]), (4, losses[4]))
    ]
    assert all(line["steps"] == 4 and line["eta_seconds"] >= 0 for line in lines)


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


def test_a_tracker_that_fails_does_not_stop_training(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = TensorBoardTracker.log

    def fail_at_two(self: TensorBoardTracker, values: dict[str, float], step: int) -> None:
        if step == 2:
            raise ConnectionError("no route")
        log(self, values, step)

    monkeypatch.setattr(TensorBoardTracker, "log", fail_at_two)
    train_run(latents, tmp_path / "run", max_steps=3, log={"tracker": "tensorboard"})
    assert (
        "warning: tensorboard did not accept what was logged at step 2 (metrics.jsonl has all metrics, and evaluations "
        "are logged again): ConnectionError: no route"
    ) in capsys.readouterr().out
    assert [row["step"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    events = EventAccumulator(str(tmp_path / "run" / "tracker")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 3]


def test_a_tracker_that_cannot_be_closed_does_not_change_how_training_ends(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: TensorBoardTracker) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(TensorBoardTracker, "finish", fail)
    fields = train_fields(latents, tmp_path / "run", log={"tracker": "tensorboard"})
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patches:
        preempt_in_step(patches, 3)
        with pytest.raises(Preempted):
            command(["--config", str(write_config(tmp_path, fields))])
    command(["--config", str(write_config(tmp_path, fields))])
    signal.signal(signal.SIGTERM, before)
    warning = "warning: tensorboard may lack the run's last lines (metrics.jsonl has all of them): ConnectionError"
    assert capsys.readouterr().out.count(warning) == 2
    assert (tmp_path / "run" / "loss.png").is_file()


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
    unknown = r"tensorbord, which is unknown\. Set log\.tracker to none, or to one of aim, clearml"
    with pytest.raises(RequestError, match=unknown):
        check_tracker("tensorbord")
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    with pytest.raises(
        RequestError, match=r"log\.tracker is comet_ml, but the package for this tracker is not installed"
    ):
        check_tracker("comet_ml")


def test_a_tracker_that_cannot_start_is_named(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LookupError("No API key configured.")  # stands for wandb's UsageError

    pytest.importorskip("mlflow")
    fields = train_fields(latents, tmp_path / "run", max_steps=1, log={"tracker": "mlflow"})
    config = str(write_config(tmp_path, fields))
    with monkeypatch.context() as patches, pytest.raises(Outage, match=r"mlflow could not be started: .* No API key"):
        patches.setattr(Accelerator, "init_trackers", refuse)
        command(["--config", config])
    command(["--config", config, "--log.tracker", "none"])
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 1
