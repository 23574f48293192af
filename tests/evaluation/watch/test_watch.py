"""Following a run: each checkpoint is evaluated once, whoever watches, dies or comes too late."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from evaluation.report import records
from evaluation.report.records import evaluations, lines
from evaluation.sampling.model import hash_pipeline
from evaluation.watch import follow
from shards.base.durable import read_sealed_json
from shards.base.errors import RequestError
from shards.open import open_store
from tests.evaluation.watch.watching import numbers, stay_here, train_here, watch, watcher, written
from tests.runs import environment
from tests.train.run.telling.offline import go_offline, rows
from train.export.pipeline import export

STEPS = (2, 4, 6)
PROMPT = hashlib.sha256(b"picture 0").hexdigest()[:16]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_here(monkeypatch)


@pytest.fixture(scope="module")
def alone(trained: Path, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, evaluated by one watcher that nobody disturbed. Not to be written to."""
    run_dir = Path(shutil.copytree(trained, tmp_path_factory.mktemp("alone") / "run"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        stay_here(monkeypatch)
        assert watch(run_dir, words) == 0
    return run_dir


def listens_to(number: signal.Signals, pid: int) -> bool:
    """Whether a process has a handler for the signal."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def test_each_step_once_until_the_runs_last(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert watch(run_dir, words) == 0
    rows = written(run_dir)
    assert [(row["step"], row["metric"]) for row in rows] == [(s, m) for s in STEPS for m in ("toy_fid", "toy_kid")]
    assert [row["set"] for row in rows[::2]] == [f"step-{step:08d}-auto/g8-s1-own" for step in STEPS]
    assert len({row["id"] for row in rows}) == 2 and len({row["value"] for row in rows}) == 6
    assert rows == lines(evaluations(run_dir))
    for step in STEPS:
        place = run_dir / "evaluations" / f"step-{step:08d}-auto"
        assert not list((place / "model").rglob("*.safetensors")) and list(place.glob("evaluated-*.json"))
        assert read_sealed_json(place / "g8-s1-own" / "metrics.json")["metrics"][0]["step"] == step
    after = {path: path.read_bytes() for path in before}
    assert after == before  # what the trainer wrote is as it was
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


def test_two_at_once_and_one_of_them_killed(run_dir: Path, words: list[str], alone: Path) -> None:
    """Checkpoints appear while they watch; the same lines as from one that is not disturbed, and each part once."""
    hidden = Path(shutil.move(run_dir / "checkpoints", run_dir.with_name("hidden")))
    watchers = [watcher(run_dir, words) for _ in range(2)]
    for folder in sorted(hidden.iterdir()):
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        folder.rename(run_dir / "checkpoints" / folder.name)
        first = run_dir / "evaluations" / "step-00000002-auto" / "g8-s1-own" / "receipts" / "pictures" / "00000.json"
        while not first.exists():
            assert all(each.is_alive() for each in watchers)
            time.sleep(0.02)
        if watchers[0].is_alive() and watchers[0].pid is not None:
            os.kill(watchers[0].pid, signal.SIGKILL)
    for each in watchers:
        each.join(120)
    assert [each.exitcode for each in watchers] == [-signal.SIGKILL, 0]
    assert numbers(run_dir) == numbers(alone)
    for place in (run_dir / "evaluations").glob("step-*/g8*"):
        assert len(list(place.glob("pictures/*/*.png"))) == 60 and len(list(place.glob("pictures/*"))) == 2
        assert len(list(place.glob("metrics/*"))) == 2


def test_killed_and_begun_again_at_any_moment(run_dir: Path, words: list[str], alone: Path) -> None:
    """Died after the first part, after the records, before the receipt, again and again: the same lines."""
    for place in ("evaluation.parts.store_part", "evaluation.__main__.table", "evaluation.watch.follow.create_once"):
        process = watcher(run_dir, words, dies_at=place)
        process.join(120)
        assert process.exitcode == 9, place
    assert watch(run_dir, words) == 0
    assert numbers(run_dir) == numbers(alone)


def test_a_checkpoint_that_goes_while_it_is_read(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer drops it; the others are evaluated."""

    def go(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[command.index("--step") + 1] == "4":
            shutil.rmtree(run_dir / "checkpoints" / "step-00000004")
        return train_here(command)

    monkeypatch.setattr("evaluation.sampling.model.subprocess.run", go)
    assert watch(run_dir, words) == 0
    assert "step 4 of" in (said := capsys.readouterr().out) and "was removed while it was read: skipped." in said
    assert [row["step"] for row in written(run_dir)] == [2, 2, 6, 6]


def test_a_run_that_was_moved_is_evaluated_on(run_dir: Path, words: list[str], alone: Path) -> None:
    """Its checkpoints are the same by content, wherever the folder lies; the evaluation was under way."""
    process = watcher(run_dir, words, dies_at="evaluation.__main__.table")
    process.join(120)
    assert process.exitcode == 9
    assert watch(run_dir.rename(run_dir.with_name("moved")), words) == 0
    assert numbers(run_dir.with_name("moved")) == numbers(alone)


def test_a_step_that_was_begun_is_finished_without_its_checkpoint(run_dir: Path, words: list[str]) -> None:
    """The watcher died, and the trainer dropped the checkpoint before the next one came."""
    process = watcher(run_dir, words, dies_at="evaluation.parts.store_part")
    process.join(120)
    assert process.exitcode == 9
    shutil.rmtree(run_dir / "checkpoints" / "step-00000002")
    assert watch(run_dir, words) == 0
    assert [row["step"] for row in written(run_dir)] == [2, 2, 4, 4, 6, 6]


def test_what_is_half_written_is_waited_for_and_what_is_damaged_is_named(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a copy of a run that is under way: files come in any order. The trainer's own have other names till then."""
    checkpoints = run_dir / "checkpoints"
    missing = checkpoints / "step-00000004" / "optimizer.safetensors"
    missing.rename(run_dir / "later")
    (checkpoints / "step-00000006").rename(checkpoints / ".step-00000006.ab12")
    assert watch(run_dir, words, "--once", "true") == 0
    assert "step 4 of" in (said := capsys.readouterr().out) and "is not whole yet" in said and "step 6" not in said
    assert [row["step"] for row in written(run_dir)] == [2, 2]

    (run_dir / "later").rename(missing)
    (checkpoints / ".step-00000006.ab12").rename(checkpoints / "step-00000006")
    weights = checkpoints / "step-00000006" / "ema" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + bytes(8))
    assert watch(run_dir, words) == 1  # after all tries
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.count("cannot be sampled") == follow.TRIES + 1 and "1 checkpoints of" in said
    assert [row["step"] for row in written(run_dir)] == [2, 2, 4, 4]


def test_the_run_may_ask_and_the_command_decides(run_dir: Path, words: list[str]) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config | {"evaluate": {"every": 4}}))
    assert watch(run_dir, words) == 0
    assert [row["step"] for row in written(run_dir)] == [4, 4, 6, 6]  # and the last
    elsewhere = run_dir.with_name("elsewhere")
    assert watch(run_dir, words, "--every", "2", "--until", "3", "--output", str(elsewhere)) == 0
    assert [row["step"] for row in written(elsewhere)] == [2, 2]
    assert [row["step"] for row in written(run_dir)] == [4, 4, 6, 6]


def test_what_is_no_run_and_what_is_empty(run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def said_by(code: int, *arguments: Any) -> str:
        assert watch(*arguments) == code
        printed = capsys.readouterr()
        return (printed.err + printed.out).replace("\n", " ")

    assert "is no run: it has no config.yaml" in said_by(2, run_dir / "absent", words)
    assert "follows many steps: choose them with --every and --until" in said_by(2, run_dir, words, "--step", "2")
    shutil.rmtree(run_dir / "checkpoints")
    process = watcher(run_dir, words)
    assert process.pid is not None
    while not listens_to(signal.SIGTERM, process.pid):
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == 75
    assert "has no checkpoint yet: waiting for one" in said_by(0, run_dir, words, "--once", "true")


def test_a_slower_watcher_never_takes_lines_away(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists the records, another adds some and writes; then the first writes what it knew."""
    every = evaluations(alone)
    listings = [every[:1], every, every]
    monkeypatch.setattr(records, "evaluations", lambda place: listings.pop(0))
    records.write_lines(tmp_path)
    assert written(tmp_path) == written(alone) and listings == []


@pytest.mark.slow
@pytest.mark.faults
def test_two_commands_on_ray_and_one_of_them_killed(run_dir: Path, words: list[str], alone: Path) -> None:
    command = [sys.executable, "-m", "evaluation", "watch", str(run_dir), *words, "--workers.num_cpus", "0.5"]
    options: dict[str, Any] = {"env": environment(), "start_new_session": True, "stdout": subprocess.DEVNULL}
    first = run_dir / "evaluations" / "step-00000002-auto" / "g8-s1-own" / "receipts" / "pictures"
    with subprocess.Popen(command, **options) as killed, subprocess.Popen(command, **options) as other:
        while not list(first.glob("*.json")):
            assert killed.poll() is None and other.poll() is None
            time.sleep(0.05)
        os.killpg(killed.pid, signal.SIGKILL)
        assert other.wait(600) == 0
    assert numbers(run_dir) == numbers(alone)


def test_a_run_at_an_address(trained: Path, words: list[str], s3: str, tmp_path: Path) -> None:
    """A copy of a run folder, of which pictures and records lie beside the checkpoints."""
    store = open_store(f"{s3}/run")
    store.put({path.relative_to(trained).as_posix(): path for path in trained.rglob("*") if path.is_file()})
    before = store.listing("checkpoints")
    assert watch(f"{s3}/run", words, "--every", "4") == 0
    found = [json.loads(line) for line in store.read("evaluations.jsonl").decode().splitlines()]
    assert [(row["step"], row["metric"]) for row in found] == [(s, m) for s in (4, 6) for m in ("toy_fid", "toy_kid")]
    assert store.listing("checkpoints") == before
    assert len(store.files("tracker/evaluations")) == 2 and not store.files("evaluations/step-00000004-auto/model")
    # and exported by hand
    there, here = (
        export([str(run), "--output", str(tmp_path / f"{at}")]) for at, run in enumerate((f"{s3}/run", trained))
    )
    assert hash_pipeline(there) == hash_pipeline(here)
    with pytest.raises(
        RequestError, match=r"is a URL, but a pipeline is written to a local folder\. Give one with --o"
    ):
        export([f"{s3}/run"])
    with pytest.raises(RequestError, match=r"has no checkpoint step-00000005. It has step-00000002, step-"):
        export([f"{s3}/run", "--step", "5", "--output", str(tmp_path / "c")])
    with pytest.raises(RequestError, match=r"nothing holds no run: it has no config.yaml"):
        export([f"{s3}/nothing", "--output", str(tmp_path / "c")])


def name_wandb(run_dir: Path) -> None:
    """As the tracker of the run's config."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    log = config["log"] | {"tracker": "wandb"}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config | {"log": log}))


def test_wandb_has_evaluations_in_the_trainings_own_run(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training has ended: once no step is left, a launch of the run's own tells of all. Two watch at once."""
    go_offline(monkeypatch)
    name_wandb(run_dir)
    with monkeypatch.context() as patch:
        patch.setattr("evaluation.__main__.tell_rest", lambda run, name: None)
        assert watch(run_dir, words, "--until", "4") == 0
    sheets = {path: path.read_bytes() for path in (run_dir / "tracker" / "evaluations").glob("*.zip")}
    assert len(sheets) == 2 and not (run_dir / "wandb").exists()
    for path in run_dir.glob("evaluations/step-00000002-auto/evaluated-*.json"):
        path.unlink()  # as another watcher finds it that is about to conclude the step
    assert watch(run_dir, words) == 0
    assert f"{run_dir}: wandb was told of 3 evaluations." in capsys.readouterr().out
    assert {path: path.read_bytes() for path in sheets} == sheets
    told = rows(run_dir)
    assert [row["evaluation/step"] for row in told] == [2, 4, 6]
    values = [row["value"] for row in written(run_dir) if row["metric"] == "toy_fid"]
    (name,) = (name for name in told[0] if re.fullmatch(r"evaluation/toy_fid/g8-s1-own \w{8}", name))
    assert [row[name] for row in told] == values
    assert [row[f"evaluation/strips/g8-s1-own/{PROMPT}/width"] for row in told] == [64, 132, 200]
    assert told[0]["evaluation/samples/g8-s1-own/width"] == 268
    (run_id,) = {path.stem.removeprefix("run-") for path in run_dir.glob("wandb/offline-run-*/*.wandb")}
    assert json.loads((run_dir / "tracker.json").read_text()) == {"id": run_id}


def test_a_trainer_at_work_tells_by_itself(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the watcher leaves waits for it; nothing fails."""
    name_wandb(run_dir)
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config | {"max_steps": 100}))
    assert watch(run_dir, words, "--once", "true", "--every", "4") == 0
    assert "has done 6 of its 100 steps. The launch that trains on tells the tracker" in capsys.readouterr().out
    assert len(list((run_dir / "tracker" / "evaluations").glob("*.zip"))) == 1
    assert watch(run_dir, words, "--until", "2", "--every", "2", "--output", str(run_dir.parent / "apart")) == 0
    assert "wandb is told nothing of evaluations: they lie outside of the run" in capsys.readouterr().out
