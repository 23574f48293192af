"""wandb and mlflow show one run however often it is requeued. Evaluations are logged to it exactly once, and without
losing a training row."""

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest

from shards.base.errors import Outage, Preempted, RequestError
from shards.base.store import LocalStore
from shards.open import open_store
from tests.runs import acquire, train_fields, wait_until, write_config
from tests.train.run.reporting.offline import (
    logged_rows,
    png_of_step,
    use_offline_wandb,
    wait_for_next_second,
    write_results,
    write_results_with_picture,
)
from tests.train.run.reporting.preemption import preempt_in_step
from train.__main__ import run as command
from train.run.reporting import evaluations
from train.run.reporting.evaluations import EvaluationQueue, EvaluationResults, list_unlogged
from train.run.reporting.log import Log
from train.run.reporting.tracker import source_version

NAME = "evaluation/toy_fid/own 12345678"


def wait_for_results(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make every training step wait until the run has read `count` results files."""
    write_samples = Log.write_samples

    def wait_and_write(self: Log, batch: Any, step: int) -> None:
        while self.evaluations is not None and len(self.evaluations.seen) < count:
            time.sleep(0.01)
        write_samples(self, batch, step)

    monkeypatch.setattr(Log, "write_samples", wait_and_write)


def log_settings(tracker: str) -> dict[str, Any]:
    return {"tracker": tracker, "project": "mill", "name": "small", "tags": ["a", "b"]}


def test_wandb_gets_evaluations_in_the_training_run(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations that finish while the run is preempted, and after its end, are in wandb's own files.

    A preempted launch ends wandb's run first, so that its files are complete.
    """
    use_offline_wandb(monkeypatch)
    import wandb

    started: list[tuple[dict[str, Any], Any]] = []
    init = wandb.init

    def record_init(**options: Any) -> Any:
        started.append((options, init(**options)))
        return started[-1][1]

    monkeypatch.setattr(wandb, "init", record_init)
    monkeypatch.setattr(evaluations, "POLL_SECONDS", 0.01)
    run_dir, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    words = ["--config", str(write_config(tmp_path, train_fields(latents, run_dir, log=log_settings("wandb"))))]
    with monkeypatch.context() as patch:
        preempt_in_step(patch, 2)
        with pytest.raises(Preempted):
            command(words)
    assert wandb.run is None  # it was ended
    wait_for_next_second()
    run = open_store(run_dir)
    for step in (1, 2):
        write_results(run, step, **{NAME: step / 10})
    with pytest.raises(
        RequestError, match=r"has completed 2 of its 6 steps\. The launch that resumes the run will log the eval"
    ):
        command(["tell", str(run_dir)])
    with monkeypatch.context() as patch:
        wait_for_results(patch, 2)
        command(words)
    signal.signal(signal.SIGTERM, before)
    wait_for_next_second()
    assert list_unlogged(run) == []
    write_results(run, 6, **{NAME: 0.6})
    write_results(run, 4, **{NAME: 0.4})
    capsys.readouterr()
    command(["tell", str(run_dir)])
    assert capsys.readouterr().out.splitlines()[-1] == f"{run_dir}: logged 2 evaluations to wandb."
    command(["tell", str(run_dir)])
    nothing_left = f"{run_dir}: there are no evaluations left to log (log.tracker is wandb).\n"
    assert capsys.readouterr().out == nothing_left

    rows = logged_rows(run_dir)
    assert [row["_step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    evaluated = [row for row in rows if NAME in row]
    assert [(row["_step"], row["evaluation/step"], row[NAME]) for row in evaluated] == [
        (3, 1, 0.1), (4, 2, 0.2), (7, 4, 0.4), (8, 6, 0.6),
    ]  # fmt: skip
    assert all(row["evaluation/samples/own/width"] == 40 for row in evaluated)
    assert [path.suffix for path in run_dir.glob("wandb/offline-run-*/files/media/images/evaluation/samples/*")] == [
        ".png"
    ] * 4
    (run_id,) = {options["id"] for options, _ in started}
    assert json.loads((run_dir / "tracker.json").read_text()) == {"id": run_id}
    assert len(started) == 3 and all(options["resume"] == "allow" for options, _ in started)
    for options, launch in started:
        assert (options["project"], options["name"], launch.id, launch.tags) == ("mill", "small", run_id, ("a", "b"))
        assert launch.config["global_batch_size"] == 8 and launch.config["source"] == source_version()
    assert len(list((run_dir / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))) == 3


def test_three_launches_and_their_evaluations_are_one_run_in_mlflow(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two are preempted, and a setting changes each time, although mlflow refuses changed parameters."""
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before, tracking_uri = signal.getsignal(signal.SIGTERM), mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    statuses = []
    for last in (2, 4, 6):
        fields = train_fields(latents, tmp_path / "run", log=log_settings("mlflow"), microbatch_size=last)
        arguments = ["--config", str(write_config(tmp_path, fields))]
        with monkeypatch.context() as patch:
            if last < 6:
                preempt_in_step(patch, last)
                with pytest.raises(Preempted):
                    command(arguments)
            else:
                command(arguments)
        assert mlflow.active_run() is None  # it was ended
        (run,) = mlflow.search_runs(experiment_names=["mill"], output_format="list")
        statuses.append(run.info.status)
    signal.signal(signal.SIGTERM, before)
    for step in (2, 4):
        write_results(open_store(tmp_path / "run"), step, **{NAME: step / 10})
    command(["tell", str(tmp_path / "run")])
    (run,) = mlflow.search_runs(experiment_names=["mill"], output_format="list")
    assert [*statuses, run.info.status] == ["FINISHED"] * 4 and run.info.run_name == "small"
    assert json.loads((tmp_path / "run" / "tracker.json").read_text())["mlflow"] == run.info.run_id
    assert {"a": "true", "b": "true"}.items() <= run.data.tags.items()
    assert run.data.params["global_batch_size"] == "8" and run.data.params["source"] == source_version()
    losses, values = (mlflow.MlflowClient().get_metric_history(run.info.run_id, name) for name in ("loss", NAME))
    assert sorted(metric.step for metric in losses) == [1, 2, 3, 4, 5, 6]
    assert [(metric.step, metric.value) for metric in values] == [(2, 0.2), (4, 0.4)]
    (folder,) = (tmp_path / "mlruns").glob(f"*/{run.info.run_id}/artifacts/evaluation/samples/own")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        f"{step:010d}.png": png_of_step(step) for step in (2, 4)
    }
    mlflow.set_tracking_uri(tracking_uri)


def test_tell_logs_evaluations_of_a_run_at_a_url(
    latents: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tell` holds the run as a launch, and changes neither its metrics nor its checkpoints.

    wandb's own client decodes the images with PIL, and rejects one of them.
    """
    use_offline_wandb(monkeypatch)
    address = f"{s3}/finished"
    fields = train_fields(latents, address, log=log_settings("wandb"), checkpoint={"every": 6})
    command(["--config", str(write_config(tmp_path, fields))])
    store, lines = open_store(address), open_store(address).read("metrics.jsonl")
    checkpoints = store.listing("checkpoints")
    wait_for_next_second()
    for step, picture in {2: png_of_step(2), 4: NOT_A_PNG, 6: png_of_step(6)}.items():
        write_results_with_picture(store, step, picture, {NAME: step / 10})
    capsys.readouterr()
    command(["tell", address])
    printed = capsys.readouterr().out
    assert f"{address}: logged 3 evaluations to wandb." in printed
    said = "The image evaluation/samples/own for step 4 was not logged, because the tracker wandb rejected it: "
    assert said in printed
    assert list_unlogged(store) == [] and store.read("metrics.jsonl") == lines
    assert store.listing("checkpoints") == checkpoints
    assert [name for name in store.files("launches") if name.endswith(".json")] == [
        "0001.accepted.json", "0001.json", "0002.accepted.json", "0002.json",
    ]  # fmt: skip
    copy = tmp_path / "copy"
    for name in store.files("wandb"):
        (copy / "wandb" / name).parent.mkdir(parents=True, exist_ok=True)
        store.get(f"wandb/{name}", copy / "wandb" / name)
    rows = [row for row in logged_rows(copy) if NAME in row]
    assert [(row["evaluation/step"], row[NAME]) for row in rows] == [(2, 0.2), (4, 0.4), (6, 0.6)]
    assert ["evaluation/samples/own/width" in row for row in rows] == [True, False, True]


def test_tell_refuses_a_run_that_a_launch_holds_and_a_folder_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "step-00000006").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(
        "{max_steps: 6, global_batch_size: 4, data: {}, takeover_after: 5, log: {tracker: wandb}}"
    )
    write_results(open_store(tmp_path), 6)
    monkeypatch.setattr("train.run.lease.owner.machine", lambda: "a different machine")
    with acquire(tmp_path):
        monkeypatch.undo()
        with pytest.raises(RequestError, match=r"is in use: launch 1 .* is training there, and only one launch may"):
            command(["tell", str(tmp_path)])
    with pytest.raises(RequestError, match=r"nothing is not a training run: it has no config\.yaml\. Pass the run_dir"):
        command(["tell", str(tmp_path / "nothing")])


def test_outages_neither_end_training_nor_lose_evaluations_or_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluations, "POLL_SECONDS", 0.01)
    files, create, calls = LocalStore.files, LocalStore.create, {"files": 0, "create": 0}

    def count(name: str) -> int:
        calls[name] += 1
        return calls[name]

    def list_files(store: LocalStore, folder: str = "") -> list[str]:
        if count("files") <= 2:
            raise Outage("The store does not answer.")
        return files(store, folder)

    def create_marker(store: LocalStore, name: str, content: bytes) -> bool:
        if count("create") == 1:
            raise Outage("The store does not answer.")
        return create(store, name, content)

    run = open_store(tmp_path)
    write_results(run, 2, a=1.0)
    (tmp_path / "tracker" / "evaluations" / "0000000001.00000000.zip").write_bytes(b"cut off")
    monkeypatch.setattr(LocalStore, "files", list_files)
    monkeypatch.setattr(LocalStore, "create", create_marker)
    with EvaluationQueue(tmp_path) as queue:
        wait_until(lambda: queue.pending)
        queue.log_next([], 3)
        assert not queue.pending
        queue.log_next([], 4)
        wait_until(lambda: not queue.logged)
    printed = capsys.readouterr().out
    delayed = f"Evaluations of {run.where()} could not be logged yet and will be retried: The store does not answer."
    assert printed.count(delayed) == 3
    assert printed.count("0000000001.00000000.zip is damaged and will not be logged") == 1
    assert list_unlogged(run) == ["0000000001.00000000"]


class RecordingTracker:
    """Tracker with accelerate's interface that records everything it gets, and rejects NOT_A_PNG as wandb does."""

    name = "wandb"

    def __init__(self, starting_step: int = 0) -> None:
        self.tracker = SimpleNamespace(starting_step=starting_step)
        self.numbers: list[dict[str, float]] = []
        self.pictures: list[bytes] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.numbers.append(values)

    def log_images(self, pictures: dict[str, list[str]], step: int) -> None:
        for (path,) in pictures.values():
            content = Path(path).read_bytes()
            if content == NOT_A_PNG:
                raise OSError("cannot identify image file")  # the base class of PIL's UnidentifiedImageError
            self.pictures.append(content)


NOT_A_PNG = b"not a png"


def test_results_wait_while_a_resumed_run_repeats_steps(tmp_path: Path) -> None:
    """wandb ignores everything that is logged at a step before the first one of this launch."""
    tracker, queue = RecordingTracker(starting_step=8), EvaluationQueue(tmp_path)
    queue.pending.append(EvaluationResults("0000000004.x", 4, {NAME: 1.0}, {}))
    queue.log_next([tracker], 5)
    assert not tracker.numbers and not queue.logged
    queue.log_next([tracker], 8)
    assert [row[NAME] for row in tracker.numbers] == [1.0] and list(queue.logged) == ["0000000004.x"]


def test_results_that_a_tracker_does_not_accept_are_logged_after_the_others(tmp_path: Path) -> None:
    class FailingOnce(RecordingTracker):
        has_failed = False

        def log(self, values: dict[str, float], step: int) -> None:
            if not self.has_failed:
                self.has_failed = True
                raise ConnectionError("no route")
            super().log(values, step)

    for step in (1, 2):
        write_results(open_store(tmp_path), step, a=float(step))
    tracker = FailingOnce()
    with EvaluationQueue(tmp_path) as queue:
        wait_until(lambda: len(queue.pending) >= 2)
        with pytest.raises(ConnectionError):
            queue.log_next([tracker], 10)
        for step in (11, 12):
            queue.log_next([tracker], step)
    assert [values["a"] for values in tracker.numbers] == [2.0, 1.0]
    assert list_unlogged(open_store(tmp_path)) == []


@pytest.mark.parametrize("error", [PermissionError, Outage])
def test_damaged_results_and_rejected_pictures_hold_back_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    """The numbers beside a rejected image are logged, and a file that cannot be read is tried again."""
    monkeypatch.setattr(evaluations, "POLL_SECONDS", 0.01)
    run, folder = open_store(tmp_path), tmp_path / "tracker" / "evaluations"
    write_results_with_picture(run, 1, NOT_A_PNG, {"a": 1.0})
    for step in (2, 3, 5, 6):
        write_results(run, step, a=float(step))
    damaged, pixels = folder / "0000000003.00000000.zip", png_of_step(3)[40:]
    damaged.write_bytes(damaged.read_bytes().replace(pixels, pixels[::-1]))
    with ZipFile(folder / "0000000004.00000000.zip", "w") as archive:
        archive.writestr("values.json", "[]")
    read, failures = LocalStore.read, list[str]()

    def fail_twice(store: LocalStore, name: str) -> bytes:
        if "0000000005" in name and len(failures) < 2:
            failures.append(name)
            raise error("not yet")
        return read(store, name)

    monkeypatch.setattr(LocalStore, "read", fail_twice)
    tracker = RecordingTracker()
    with EvaluationQueue(tmp_path) as queue:
        deadline = time.monotonic() + 60
        while len(tracker.numbers) < 4 and time.monotonic() < deadline:
            queue.log_next([tracker], 10)
            time.sleep(0.01)
    assert [values["a"] for values in tracker.numbers] == [1, 2, 6, 5]
    assert tracker.pictures == [png_of_step(step) for step in (2, 6, 5)]
    assert list_unlogged(run) == ["0000000003.00000000", "0000000004.00000000"]
    printed = capsys.readouterr().out
    for step in (3, 4):
        assert printed.count(f"{step:010d}.00000000.zip is damaged and will not be logged") == 1
    said = "The image evaluation/samples/own for step 1 was not logged, because the tracker wandb rejected it: OSError"
    assert printed.count(said) == 1
    assert printed.count("could not be logged yet and will be retried: not yet") == 2
