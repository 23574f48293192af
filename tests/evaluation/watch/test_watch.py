"""Following a run: each checkpoint is evaluated once, even if watchers compete, die or start late."""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from evaluation.__main__ import run as command
from evaluation.report import runs
from evaluation.report.runs import Evaluation, evaluations, lines, step_place
from evaluation.sampling.model import Model, drop_export, hash_pipeline, open_pipeline
from evaluation.watch import follow
from evaluation.watch.tracker import images
from shards.base.durable import read_sealed_json
from shards.base.errors import Outage, RequestError, WorkError, exit_code_of
from shards.base.stop import STOP_SIGNALS, StopSignal
from shards.base.store import Store
from shards.open import open_store
from tests.evaluation.watch.watching import numbers, stay_here, watch, watcher, written
from tests.runs import wait_until
from tests.train.run.reporting.offline import logged_rows, use_offline_wandb
from train.export.pipeline import ExportConfig, export, write_pipeline

DRAW_AND_SCORE = "evaluation.commands.draw_and_score"
STEPS = (2, 4, 6)
PROMPT = hashlib.sha256(b"picture 0").hexdigest()[:16]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_here(monkeypatch)


@pytest.fixture(scope="module")
def alone(trained: Path, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run after a single uninterrupted watcher evaluated it. Tests must not modify it."""
    run_dir = Path(shutil.copytree(trained, tmp_path_factory.mktemp("alone") / "run"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        stay_here(monkeypatch)
        assert watch(run_dir, words) == 0
    return run_dir


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no images; the checkpoints are still exported."""
    monkeypatch.setattr("evaluation.commands.draw_sets", lambda *_: [])


def evaluated_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a receipt."""
    receipts = run_dir.glob("evaluations/*/evaluated-*.json")
    return sorted(int(receipt.parent.name.split("-")[1]) for receipt in receipts)


def handles(number: signal.Signals, pid: int) -> bool:
    """Return whether a process has a handler for the signal."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def edit_config(run_dir: Path, **changes: Any) -> None:
    """Change fields of the run's config."""
    path = run_dir / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


def test_each_checkpoint_is_evaluated_once(
    alone: Path, trained: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, rows = alone, written(alone)
    assert [(row["step"], row["metric"]) for row in rows] == [(s, m) for s in STEPS for m in ("toy_fid", "toy_kid")]
    assert [row["set"] for row in rows[::2]] == [f"step-{step:08d}-auto/g8-s1-own" for step in STEPS]
    assert len({row["id"] for row in rows}) == 2 and len({row["value"] for row in rows}) == 6
    assert rows == lines(evaluations(run_dir))
    for step in STEPS:
        place = run_dir / "evaluations" / f"step-{step:08d}-auto"
        assert not list((place / "model").rglob("*.safetensors")) and list(place.glob("evaluated-*.json"))
        assert read_sealed_json(place / "g8-s1-own" / "metrics.json")["metrics"][0]["step"] == step
    for path in trained.rglob("*"):  # the trainer's files are unchanged
        assert path.is_dir() or (run_dir / path.relative_to(trained)).read_bytes() == path.read_bytes()
    events = sorted((run_dir / "tracker" / "evaluations").iterdir())
    assert [path.name[:31] for path in events] == [f"events.out.tfevents.{step:010d}." for step in STEPS]
    seen = EventAccumulator(str(run_dir / "tracker" / "evaluations"), {"images": 0, "scalars": 0}).Reload()
    for row in rows:
        for end in ("value", "low", "high"):
            name = f"evaluation/{row['metric']}/g8-s1-own {row['id'][:8]}{'' if end == 'value' else f' {end}'}"
            (found,) = (event.value for event in seen.Scalars(name) if event.step == row["step"])
            assert found == pytest.approx(row[end], rel=1e-6)
    assert sorted(name.rpartition("/")[0] for name in seen.Tags()["images"]) == [
        "evaluation/samples",
        *["evaluation/strips/g8-s1-own"] * 4,
    ]
    for name in seen.Tags()["images"]:
        assert [event.step for event in seen.Images(name)] == list(STEPS)

    capsys.readouterr()
    changed = {path: path.stat().st_mtime_ns for path in run_dir.rglob("step-*/**/*") if path.is_file()}
    assert watch(run_dir, words) == 0 and written(run_dir) == rows
    assert {path: path.stat().st_mtime_ns for path in changed} == changed and "pictures" not in capsys.readouterr().out


def test_two_watchers_of_which_one_is_killed(run_dir: Path, words: list[str], alone: Path) -> None:
    """Checkpoints appear while both watch. The result is that of a single watcher, and each part exists once."""
    hidden = Path(shutil.move(run_dir / "checkpoints", run_dir.with_name("hidden")))
    watchers = [watcher(run_dir, words) for _ in range(2)]
    for folder in sorted(hidden.iterdir()):
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        folder.rename(run_dir / "checkpoints" / folder.name)
        first = run_dir / "evaluations" / "step-00000002-auto" / "g8-s1-own" / "receipts" / "pictures" / "00000.json"
        wait_until(first.exists, process=watchers[1])
        if watchers[0].is_alive() and watchers[0].pid is not None:
            os.kill(watchers[0].pid, signal.SIGKILL)
    for each in watchers:
        each.join(120)
    assert [each.exitcode for each in watchers] == [-signal.SIGKILL, 0]
    assert numbers(run_dir) == numbers(alone)
    for place in (run_dir / "evaluations").glob("step-*/g8*"):
        assert len(list(place.glob("pictures/*/*.png"))) == 60 and len(list(place.glob("pictures/*"))) == 2
        assert len(list(place.glob("metrics/*"))) == 2


def test_killed_and_run_again(run_dir: Path, words: list[str], alone: Path) -> None:
    """The watcher dies after the first part, after the records, and before the receipt.

    In between, the trainer prunes the exported checkpoint, and the run is moved. Checkpoints are recognised by content.
    """
    for place in (
        "evaluation.parts.store_part",
        "evaluation.commands.format_metrics",
        "evaluation.watch.follow.create_once",
    ):
        process = watcher(run_dir, words, dies_at=place)
        process.join(120)
        assert process.exitcode == 9, place
        shutil.rmtree(run_dir / "checkpoints" / "step-00000002", ignore_errors=True)
        run_dir = run_dir.rename(run_dir.with_name(f"{run_dir.name}-moved"))
    assert watch(run_dir, words) == 0
    assert numbers(run_dir) == numbers(alone)


def test_two_runs_with_one_output(
    run_dir: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other run lacks the step, and its newest weights are different. A copy of the first run is the same run."""
    shared = tmp_path / "shared"
    watched = ["--once", "true", "--until", "2", "--output", str(shared)]
    assert watch(run_dir, words, *watched) == 0
    other, copy = (Path(shutil.copytree(run_dir, tmp_path / name)) for name in ("other", "copy"))
    shutil.rmtree(other / "checkpoints" / "step-00000002")
    place = shared / "evaluations" / "step-00000002-auto"
    sampling = ["sample", "--model", str(other), *words[:-2], "--output", str(place)]
    assert exit_code_of(lambda: command(sampling)) == 2
    assert "contains samples from a different model" in capsys.readouterr().err.replace("\n", " ")
    assert watch(copy, words, *watched) == 0
    assert "60 images" in capsys.readouterr().out  # the receipt of the first run does not count
    assert len(list(place.glob("evaluated-*.json"))) == 2


@pytest.mark.usefixtures("undrawn")
def test_a_checkpoint_that_is_pruned_while_it_is_read(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is skipped, and the others are evaluated."""

    def prune(run: Path, options: ExportConfig) -> Path:
        if options.step == 4:
            shutil.rmtree(run_dir / "checkpoints" / "step-00000004")
        return write_pipeline(run, options)

    monkeypatch.setattr("train.export.pipeline.write_pipeline", prune)
    assert watch(run_dir, words, "--every", "4") == 0
    output = capsys.readouterr().out
    assert "The checkpoint at step 4 in" in output and "was removed while it was being read" in output
    assert evaluated_steps(run_dir) == [6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_an_export(
    run_dir: Path,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    """A scheduler waits only for some seconds, and an export can take minutes. The handlers are restored, and the
    checkpoint is not blamed."""

    def stop_and_wait(run: Path, options: ExportConfig) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)
        pytest.fail("the export continued")

    monkeypatch.setattr("train.export.pipeline.write_pipeline", stop_and_wait)
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with pytest.raises(SystemExit) as stopped:
        watch(run_dir, words, "--once", "true")
    assert stopped.value.code == 75
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    said = " ".join(capsys.readouterr().err.split())
    assert "error: A stop signal ended the export of step 2 in" in said and "cannot be exported" not in said


@pytest.mark.usefixtures("undrawn")
def test_incomplete_checkpoints_are_skipped_and_damaged_ones_reported(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """While a run is copied, files appear in any order. The trainer itself renames complete checkpoints into place."""
    checkpoints = run_dir / "checkpoints"
    missing = checkpoints / "step-00000004" / "optimizer.safetensors"
    missing.rename(run_dir / "later")
    (checkpoints / "step-00000006").rename(checkpoints / ".step-00000006.ab12")
    assert watch(run_dir, words, "--once", "true") == 0
    output = capsys.readouterr().out
    assert "The checkpoint at step 4 in" in output and "is incomplete" in output and "step 6" not in output
    assert evaluated_steps(run_dir) == [2]

    (run_dir / "later").rename(missing)
    (checkpoints / ".step-00000006.ab12").rename(checkpoints / "step-00000006")
    weights = checkpoints / "step-00000006" / "ema" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + bytes(8))
    assert watch(run_dir, words) == 1  # after all attempts
    output = capsys.readouterr().err.replace("\n", " ")
    assert output.count("cannot be exported") == follow.MAX_ATTEMPTS + 1 and "1 checkpoint in" in output
    assert evaluated_steps(run_dir) == [2, 4]


def test_a_checkpoint_that_stays_incomplete_does_not_keep_the_watcher_running(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated: list[int] = []
    monkeypatch.setattr(DRAW_AND_SCORE, lambda config, names, step, place: evaluated.append(step))
    (run_dir / "checkpoints" / "step-00000002" / "optimizer.safetensors").unlink()
    deadline, sleep = time.monotonic() + 30, time.sleep

    def sleep_until_deadline(seconds: float) -> None:
        assert time.monotonic() < deadline, "the watcher still waits for the checkpoint"
        sleep(seconds)

    monkeypatch.setattr("time.sleep", sleep_until_deadline)
    monkeypatch.setattr(follow, "MAX_OUTAGE_SECONDS", 0.5)
    assert watch(run_dir, words) == 1
    printed = capsys.readouterr()
    assert "(step 2: the checkpoint is incomplete: its state.json is damaged, or" in " ".join(printed.err.split())
    assert printed.out.count("is incomplete; it is skipped") == 1 and evaluated == [4, 6]
    monkeypatch.setattr(follow, "MAX_OUTAGE_SECONDS", 900.0)
    assert watch(run_dir, words, "--once", "true") == 1


def test_the_command_overrides_the_schedule_of_the_run(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[Path] = []
    monkeypatch.setattr(DRAW_AND_SCORE, lambda config, names, step, place: evaluated.append(place))
    edit_config(run_dir, evaluate={"every": 4})
    assert watch(run_dir, words) == 0
    elsewhere = run_dir.with_name("elsewhere")
    assert watch(run_dir, words, "--every", "2", "--until", "3", "--output", str(elsewhere)) == 0
    in_run = [step_place(run_dir, step, "auto") for step in (4, 6)]  # multiples of 4, and the last step
    assert evaluated == [*in_run, step_place(elsewhere, 2, "auto")]


def test_watching_ends_with_the_run_if_until_is_a_later_step(
    alone: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: float) -> None:
        raise AssertionError("the watcher waits for another checkpoint")

    monkeypatch.setattr("time.sleep", fail)
    assert watch(alone, words, "--until", "100") == 0


class Recorder:
    """A store that records which of its methods are called."""

    def __init__(self, store: Store):
        self.store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.store, name)


def test_an_idle_poll_reads_the_config_and_lists_the_checkpoints(
    alone: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[list[str]] = []

    def poll(follower: follow.Follower, stop: StopSignal) -> bool:
        run = Recorder(follower.run)
        poll_once(replace(follower, run=run), stop)  # type: ignore[arg-type]
        polls.append(run.calls)
        return len(polls) == 3

    poll_once = follow.Follower.poll
    monkeypatch.setattr(follow.Follower, "poll", poll)
    assert watch(alone, words) == 0
    assert polls == [["read", "listing"]] * 3


def test_folders_that_are_not_runs_and_runs_without_checkpoints(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def output_of(code: int, *arguments: Any) -> str:
        assert watch(*arguments) == code
        printed = capsys.readouterr()
        return (printed.err + printed.out).replace("\n", " ")

    assert "run: it has no config.yaml" in output_of(2, run_dir / "absent", words)
    assert "does not accept --step, because it evaluates many" in output_of(2, run_dir, words, "--step", "2")
    shutil.rmtree(run_dir / "checkpoints")
    process = watcher(run_dir, words)
    assert process.pid is not None
    pid = process.pid
    wait_until(lambda: handles(signal.SIGTERM, pid), process=process)
    os.kill(pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == 75
    assert "has no checkpoint yet; waiting for the first one" in output_of(0, run_dir, words, "--once", "true")


def test_a_slower_watcher_never_removes_lines(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists the records, another watcher adds some and writes the file, and then the first one writes its own."""
    every = evaluations(alone)
    listings = [every[:1], every, every]
    monkeypatch.setattr(runs, "evaluations", lambda place: listings.pop(0))
    runs.write_lines(tmp_path)
    assert written(tmp_path) == written(alone) and listings == []


def test_an_exported_model_is_kept_while_another_command_uses_it(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = run_dir / "evaluations" / "step-00000002-auto" / "model" / "model_index.json"

    def sample(guidance: str) -> int:
        arguments = ["sample", "--model", str(run_dir), "--step", "2", *words[:-2], "--sampling.guidance", guidance]
        return exit_code_of(lambda: command(arguments))

    def stop(*_: object) -> None:
        raise WorkError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("evaluation.sampling.job.run_units", stop)
        assert sample("3") == 1
    assert watch(run_dir, words, "--until", "2") == 0 and index.exists()
    assert sample("3") == 0
    assert watch(run_dir, words, "--until", "2") == 0 and not index.exists()
    assert sample("4") == 0
    assert watch(run_dir, words, "--until", "2") == 0 and index.exists()  # exported after the evaluation


def test_a_model_that_is_deleted_while_its_hash_is_computed(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "step")
    shutil.copytree(pipeline, tmp_path / "step" / "model")
    model = Model("run", 2, "auto", hash_pipeline(pipeline))

    def hash_deleted(folder: Path) -> str:
        drop_export(store)
        return hash_pipeline(folder)

    monkeypatch.setattr("evaluation.sampling.model.hash_pipeline", hash_deleted)
    deleted = r"does not contain the model .* A watcher deletes an exported model after"
    with pytest.raises(WorkError, match=deleted), open_pipeline(model, store):
        pass


@pytest.mark.usefixtures("undrawn")
def test_an_outage_does_not_end_a_watcher(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins while the config is read, and then lasts for as many exports as an evaluation may have attempts."""
    outages = [Outage(f"outage {number}") for number in range(2 + follow.MAX_ATTEMPTS)]

    def fail_first(function: Callable[..., Any], num_left: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if len(outages) > num_left:
                raise outages.pop()
            return function(*arguments)

        return call

    for name, num_left in {
        DRAW_AND_SCORE: follow.MAX_ATTEMPTS,
        "evaluation.watch.follow.read_schedule": 1 + follow.MAX_ATTEMPTS,
        "train.export.pipeline.write_pipeline": 0,
    }.items():
        monkeypatch.setattr(name, fail_first(resolve_name(name), num_left))
    assert watch(run_dir, words, "--until", "2") == 0
    assert capsys.readouterr().err.count("The watcher tries again in 0.1 s.") == 2 + follow.MAX_ATTEMPTS
    assert evaluated_steps(run_dir) == [2]


def test_a_long_outage_ends_a_watcher(
    alone: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise Outage("no answer")

    monkeypatch.setattr(follow, "read_schedule", fail)
    monkeypatch.setattr(follow, "MAX_OUTAGE_SECONDS", 0.05)
    assert watch(alone, words) == 1
    assert capsys.readouterr().err.count("no answer") == 2
    assert watch(alone, words, "--once", "true") == 1
    assert capsys.readouterr().err.count("no answer") == 1


@pytest.mark.usefixtures("undrawn")
def test_checkpoints_that_stay_unreadable_do_not_delay_the_others(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example, their files are being moved to an archive from which they cannot be read, one after the other."""
    tried: list[int] = []

    def export_others(place: Path, config: ExportConfig) -> None:
        assert config.step is not None
        tried.append(config.step)
        if config.step == STEPS[1] and tried.count(STEPS[1]) == 1:
            raise WorkError("damaged")
        if config.step in STEPS[:2]:
            raise Outage("archived")
        write_pipeline(place, config)

    monkeypatch.setattr("train.export.pipeline.write_pipeline", export_others)
    monkeypatch.setattr(follow, "MAX_OUTAGE_SECONDS", 0.5)
    assert watch(run_dir, words) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert "could not be evaluated (step 2: archived; step 4: archived). All others were evaluated" in printed
    assert tried[:3] == list(STEPS) and min(map(tried.count, STEPS[:2])) >= 1 + follow.MAX_ATTEMPTS
    assert evaluated_steps(run_dir) == [6]


def test_a_step_that_another_watcher_evaluates_during_a_poll_is_not_repeated(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other watcher evaluates all checkpoints before this one has recorded the first."""
    drawn: list[int | None] = []

    def draw_slowly(config: Any, names: list[str], step: int | None, output: Path | str) -> None:
        drawn.append(step)
        draw_and_score(config, names, step, output)
        if len(drawn) == 1:
            assert watch(run_dir, words) == 0

    draw_and_score = resolve_name(DRAW_AND_SCORE)
    monkeypatch.setattr(DRAW_AND_SCORE, draw_slowly)
    assert watch(run_dir, words) == 0
    assert drawn == [2, *STEPS]
    assert not list(run_dir.glob("evaluations/*/model/*"))


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_during_an_export_is_an_outage(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(place: Path, config: ExportConfig) -> None:
        monkeypatch.setattr("train.export.pipeline.write_pipeline", write_pipeline)
        raise OSError(errno.ENOSPC, "No space left on device", str(config.output))

    monkeypatch.setattr("train.export.pipeline.write_pipeline", fill_disk)
    assert watch(run_dir, words, "--until", "2") == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "Fix the storage and run the same command again. The watcher tries again in 0.1 s." in printed
    assert evaluated_steps(run_dir) == [2]


def test_a_run_in_an_object_store(trained: Path, words: list[str], tmp_path: Path) -> None:
    """Pictures and records are written next to the checkpoints."""
    address = f"memory://{tmp_path.name}"
    store = open_store(f"{address}/run")
    store.put({path.relative_to(trained).as_posix(): path for path in trained.rglob("*") if path.is_file()})
    before = store.listing("checkpoints")
    assert watch(f"{address}/run", words, "--every", "4", "--until", "4") == 0
    found = [json.loads(line) for line in store.read("evaluations.jsonl").decode().splitlines()]
    assert [(row["step"], row["metric"]) for row in found] == [(4, "toy_fid"), (4, "toy_kid")]
    assert store.listing("checkpoints") == before
    assert len(store.files("tracker/evaluations")) == 1 and not store.files("evaluations/step-00000004-auto/model")
    # the same checkpoint, exported by the command
    there, here = (
        export([str(run), "--output", str(tmp_path / f"{at}")]) for at, run in enumerate((f"{address}/run", trained))
    )
    assert hash_pipeline(there) == hash_pipeline(here)
    output = ["--output", str(tmp_path / "c")]
    for arguments, message in (
        (["run"], r"is a URL, but a pipeline is written to a local folder\. Choose one with --o"),
        (["run", "--step", "5", *output], r"has no checkpoint step-00000005. It has step-00000002, step-"),
        (["nothing", *output], r"nothing is not a run: it has no config.yaml"),
    ):
        with pytest.raises(RequestError, match=message):
            export([f"{address}/{arguments[0]}", *arguments[1:]])
    store.remove(store.files())


def test_wandb_gets_evaluations_in_the_trainings_own_run(
    alone: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training has ended, so the watcher logs its results after the last step. A second watcher repeats a step."""
    use_offline_wandb(monkeypatch)
    run_dir = Path(shutil.copytree(alone, tmp_path / "run"))
    for path in run_dir.glob("evaluations/*/evaluated-*.json"):
        path.unlink()  # so the images and the metrics exist, and every step is logged again
    edit_config(run_dir, log={"tracker": "wandb"})
    with monkeypatch.context() as patch:
        patch.setattr("evaluation.commands.log_remaining_results", lambda run, name: None)
        assert watch(run_dir, words, "--until", "4") == 0
    results = {path: path.read_bytes() for path in (run_dir / "tracker" / "evaluations").glob("*.zip")}
    assert len(results) == 2 and not (run_dir / "wandb").exists()
    for path in run_dir.glob("evaluations/step-00000002-auto/evaluated-*.json"):
        path.unlink()  # as another watcher finds it just before the receipt is created
    assert watch(run_dir, words) == 0
    assert f"{run_dir}: logged 3 evaluations to wandb." in capsys.readouterr().out
    assert {path: path.read_bytes() for path in results} == results
    logged = logged_rows(run_dir)
    assert [row["evaluation/step"] for row in logged] == [2, 4, 6]
    values = [row["value"] for row in written(run_dir) if row["metric"] == "toy_fid"]
    (name,) = (name for name in logged[0] if re.fullmatch(r"evaluation/toy_fid/g8-s1-own \w{8}", name))
    assert [row[name] for row in logged] == values
    widths = [row[f"evaluation/strips/g8-s1-own/{PROMPT}/width"] for row in logged]
    assert widths == [number * (widths[0] + 4) - 4 for number in (1, 2, 3)]  # as wide as the label of an image
    assert logged[0]["evaluation/samples/g8-s1-own/width"] == 140
    (run_id,) = {path.stem.removeprefix("run-") for path in run_dir.glob("wandb/offline-run-*/*.wandb")}
    assert json.loads((run_dir / "tracker.json").read_text()) == {"id": run_id}


def test_results_of_an_unfinished_run_are_left_to_the_trainer(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results file waits for the trainer, and the watcher does not fail. The run is given by a relative path."""
    edit_config(run_dir, log={"tracker": "wandb"}, max_steps=100)
    monkeypatch.chdir(run_dir.parent)
    assert watch(run_dir.name, words, "--once", "true", "--every", "4") == 0
    expected = "has completed 6 of its 100 steps. The launch that resumes the run will log the evaluations"
    printed = " ".join(capsys.readouterr().err.split())
    assert "Some evaluations are not in the run's tracker yet." in printed and expected in printed
    assert len(list((run_dir / "tracker" / "evaluations").glob("*.zip"))) == 1

    def fail(*_: object) -> None:
        raise OSError("no route to the tracker")

    with monkeypatch.context() as patch:
        patch.setattr("train.run.reporting.notify.hold", fail)
        assert watch(run_dir.name, words, "--once", "true", "--every", "4") == 0
    failure = "not all evaluations are in the run's tracker, because logging them failed (OSError: no route to"
    assert failure in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(DRAW_AND_SCORE, lambda *_: None)
    assert watch(run_dir, words, "--until", "2", "--every", "2", "--output", str(run_dir.parent / "apart")) == 0
    expected = "Evaluations are not logged to wandb, because --output is outside the run. Their metrics are in "
    assert f"{expected}{run_dir.parent / 'apart' / 'evaluations.jsonl'}." in capsys.readouterr().out


def test_a_sample_set_without_images_has_nothing_to_draw(tmp_path: Path) -> None:
    assert images(2, [Evaluation(2, "raw", "own", tmp_path, (), 0.0)]) == {}
