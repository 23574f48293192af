"""Evaluations reach the run's own run in its tracker, each once, and take no step of training with them."""

import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from shards.base.errors import Outage, Preempted, RequestError
from shards.base.store import LocalStore
from shards.open import open_store
from tests.runs import train_fields, write_config
from tests.train.run.reporting.leaving import leaves_after
from tests.train.run.reporting.offline import go_offline, leave, leave_with, picture_of, rows
from train.__main__ import run as command
from train.run.launches import Launch, take
from train.run.reporting import evaluations
from train.run.reporting.evaluations import Evaluations, untold
from train.run.reporting.log import Log

NAME = "evaluation/toy_fid/own 12345678"


def wait_for_sheets(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make each step wait until the run has seen `count` sheets."""
    samples = Log.samples

    def waited(self: Log, batch: Any, step: int) -> None:
        while self.evaluations is not None and len(self.evaluations.seen) < count:
            time.sleep(0.01)
        samples(self, batch, step)

    monkeypatch.setattr(Log, "samples", waited)


def settings(tracker: str) -> dict[str, Any]:
    return {"tracker": tracker, "project": "mill", "name": "small"}


def test_wandb_has_them_in_the_training_s_own_run(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As wandb's own files have it: while it trains, over a preemption, and after its end."""
    go_offline(monkeypatch)
    monkeypatch.setattr(evaluations, "EVERY", 0.01)
    run_dir, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    words = ["--config", str(write_config(tmp_path, train_fields(latents, run_dir, log=settings("wandb"))))]
    with monkeypatch.context() as patch:
        leaves_after(patch, 2)
        with pytest.raises(Preempted):
            command(words)
    time.sleep(1.1)  # wandb names a launch's folder by the second, and a launch's imports alone take longer
    run = open_store(run_dir)
    for step in (1, 2):
        leave(run, step, **{NAME: step / 10})
    with pytest.raises(RequestError, match=r"has done 2 of its 6 steps\. The launch that trains on tells"):
        command(["tell", str(run_dir)])
    with monkeypatch.context() as patch:
        wait_for_sheets(patch, 2)
        command(words)
    signal.signal(signal.SIGTERM, before)
    time.sleep(1.1)
    assert untold(run) == []
    leave(run, 6, **{NAME: 0.6})
    leave(run, 4, **{NAME: 0.4})
    capsys.readouterr()
    command(["tell", str(run_dir)])
    assert capsys.readouterr().out.splitlines()[-1] == f"{run_dir}: wandb was told of 2 evaluations."
    command(["tell", str(run_dir)])
    assert capsys.readouterr().out == f"{run_dir}: there is nothing that its tracker (wandb) has not been told.\n"

    told = rows(run_dir)
    assert [row["_step"] for row in told if "loss" in row] == [1, 2, 3, 4, 5, 6]
    found = [row for row in told if NAME in row]
    assert [(row["_step"], row["evaluation/step"], row[NAME]) for row in found] == [
        (3, 1, 0.1), (4, 2, 0.2), (7, 4, 0.4), (8, 6, 0.6),
    ]  # fmt: skip
    assert all(row["evaluation/samples/own/width"] == 40 for row in found)
    assert [path.suffix for path in run_dir.glob("wandb/offline-run-*/files/media/images/evaluation/samples/*")] == [
        ".png"
    ] * 4
    ids = {path.stem for path in (run_dir / "wandb").glob("offline-run-*/*.wandb")}
    assert len(ids) == 1 and len(list((run_dir / "wandb").glob("offline-run-*"))) == 3


def test_mlflow_has_them_at_the_checkpoint_s_step(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    known = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    command(["--config", str(write_config(tmp_path, train_fields(latents, tmp_path / "run", log=settings("mlflow"))))])
    for step in (2, 4):
        leave(open_store(tmp_path / "run"), step, **{NAME: step / 10})
    command(["tell", str(tmp_path / "run")])
    (run,) = mlflow.search_runs(experiment_names=["mill"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, NAME)
    (folder,) = (tmp_path / "mlruns").glob(f"*/{run.info.run_id}/artifacts/evaluation/samples/own")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        f"{step:010d}.png": picture_of(step) for step in (2, 4)
    }
    mlflow.set_tracking_uri(known)
    assert run.info.status == "FINISHED"
    assert [(metric.step, metric.value) for metric in history] == [(2, 0.2), (4, 0.4)]


def test_a_run_at_an_address_is_told_of_by_a_launch_of_its_own(
    latents: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go_offline(monkeypatch)
    address = f"{s3}/told"
    command(["--config", str(write_config(tmp_path, train_fields(latents, address, log=settings("wandb"))))])
    store, lines = open_store(address), open_store(address).read("metrics.jsonl")
    checkpoints = store.listing("checkpoints")
    time.sleep(1.1)
    leave(store, 6, **{NAME: 0.6})
    capsys.readouterr()
    command(["tell", address])
    assert f"{address}: wandb was told of 1 evaluations." in capsys.readouterr().out
    assert untold(store) == [] and store.read("metrics.jsonl") == lines
    assert store.listing("checkpoints") == checkpoints
    assert [name for name in store.files("launches") if name.endswith(".json")] == [
        "0001.accepted.json", "0001.json", "0002.accepted.json", "0002.json",
    ]  # fmt: skip
    copy = tmp_path / "copy"
    for name in store.files("wandb"):
        (copy / "wandb" / name).parent.mkdir(parents=True, exist_ok=True)
        store.get(f"wandb/{name}", copy / "wandb" / name)
    assert [row["evaluation/step"] for row in rows(copy) if NAME in row] == [6]


def test_while_it_trains_nobody_else_tells(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000006").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("{max_steps: 6, takeover_after: 5, log: {tracker: wandb}}")
    leave(open_store(tmp_path), 6)
    with Launch(take(tmp_path, 1)) as launch:
        launch.note(pid=1, process=0, machine="another")
        with pytest.raises(RequestError, match=r"is in use: launch 1 .* trains in it, and one launch at a time may"):
            command(["tell", str(tmp_path)])
    with pytest.raises(RequestError, match=r"nothing holds no run: it has no config\.yaml"):
        command(["tell", str(tmp_path / "nothing")])


def test_an_outage_ends_neither_the_run_nor_the_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluations, "EVERY", 0.01)
    files, calls = LocalStore.files, list[int]()

    def fails_twice(store: LocalStore, folder: str = "") -> list[str]:
        calls.append(1)
        if len(calls) <= 2:
            raise Outage("The store does not answer.")
        return files(store, folder)

    monkeypatch.setattr(LocalStore, "files", fails_twice)
    run = open_store(tmp_path)
    leave(run, 2, a=1.0)
    (tmp_path / "tracker" / "evaluations" / "0000000001.00000000.zip").write_bytes(b"cut off")
    with Evaluations(tmp_path) as sheets:
        while sheets.found.empty():
            time.sleep(0.01)
        sheets.tell_next([], 3)
        assert sheets.found.empty()
        sheets.tell_next([], 4)
    said = capsys.readouterr().out
    assert said.count("are not told of yet: The store does not answer.") == 2
    assert said.count("0000000001.00000000.zip is damaged, and the tracker is not told of it") == 1
    assert untold(run) == ["0000000001.00000000"]


class Recorder:
    """A tracker of accelerate's that keeps what it gets, and rejects FORGED."""

    name = "wandb"

    def __init__(self) -> None:
        self.numbers: list[dict[str, float]] = []
        self.pictures: list[bytes] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.numbers.append(values)

    def log_images(self, pictures: dict[str, list[str]], step: int) -> None:
        for (path,) in pictures.values():
            content = Path(path).read_bytes()
            if content == FORGED:
                raise OSError("cannot identify image file")  # as PIL's UnidentifiedImageError is one
            self.pictures.append(content)


FORGED = evaluations.PNG_START + b"no chunk" + evaluations.PNG_END


def damaged_zip(name: str, content: bytes, change: tuple[bytes, bytes]) -> bytes:
    """Pack a valid sheet with one more member, and change bytes of it without correcting checksums."""
    packed = BytesIO()
    with ZipFile(packed, "w") as sheet:
        sheet.writestr("values.json", '{"step": 5, "values": {"a": 5.0}}')
        sheet.writestr(name, content)
    assert change[0] in packed.getvalue()
    return packed.getvalue().replace(*change)


def test_a_damaged_sheet_or_picture_holds_back_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a sheet with a damaged picture the numbers are sent; a sheet that cannot be read is tried again."""
    monkeypatch.setattr(evaluations, "EVERY", 0.01)
    run, sheets = open_store(tmp_path), "tracker/evaluations"
    for step, picture in {1: b"not a png", 2: picture_of(2)[:-20], 3: FORGED, 4: picture_of(4)}.items():
        leave_with(run, step, picture, {"a": float(step)})
    png = picture_of(5)
    run.create(f"{sheets}/0000000005.00000000.zip", damaged_zip("b.png", png, (png[40:], png[40:][::-1])))
    run.create(f"{sheets}/0000000006.00000000.zip", damaged_zip("b.txt", b"", (b'"step": 5', b'"step": 6')))
    packed = BytesIO()
    with ZipFile(packed, "w") as sheet:
        sheet.writestr("values.json", "[]")
    run.create(f"{sheets}/0000000007.00000000.zip", packed.getvalue())
    leave(run, 8, a=8.0)
    leave(run, 9, a=9.0)
    read, failures = LocalStore.read, list[str]()

    def fails_at_first(store: LocalStore, name: str) -> bytes:
        if "0000000008" in name and len(failures) < 2:
            failures.append(name)
            raise PermissionError("not yet")
        return read(store, name)

    monkeypatch.setattr(LocalStore, "read", fails_at_first)
    tracker = Recorder()
    with Evaluations(tmp_path) as found:
        deadline = time.monotonic() + 60
        while len(tracker.numbers) < 7 and time.monotonic() < deadline:
            found.tell_next([tracker], 10)
            time.sleep(0.01)
    assert [values["a"] for values in tracker.numbers] == [1, 2, 3, 4, 5, 9, 8]
    assert tracker.pictures == [picture_of(step) for step in (4, 9, 8)]
    assert untold(run) == ["0000000006.00000000", "0000000007.00000000"]
    said = capsys.readouterr().out
    for step in (1, 2, 5):
        assert said.count(f"{step:010d}.00000000.zip is damaged and is not sent to the tracker") == 1
    for step in (6, 7):
        assert said.count(f"{step:010d}.00000000.zip is damaged, and the tracker is not told of it") == 1
    assert said.count("wandb did not take evaluation/samples/own of step 3: OSError") == 1
    assert said.count("are not told of yet: not yet") == 2


def test_tell_sends_the_numbers_beside_a_damaged_picture(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With wandb's own client, which decodes pictures with PIL."""
    go_offline(monkeypatch)
    run_dir = tmp_path / "run"
    command(["--config", str(write_config(tmp_path, train_fields(latents, run_dir, log=settings("wandb"))))])
    time.sleep(1.1)  # wandb names a launch's folder by the second
    run = open_store(run_dir)
    for step, picture in {2: b"not a png", 4: FORGED, 6: picture_of(6)}.items():
        leave_with(run, step, picture, {NAME: step / 10})
    capsys.readouterr()
    command(["tell", str(run_dir)])
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"{run_dir}: wandb was told of 3 evaluations."
    assert "wandb did not take evaluation/samples/own of step 4: " in said and untold(run) == []
    found = [row for row in rows(run_dir) if NAME in row]
    assert [row[NAME] for row in found] == [0.2, 0.4, 0.6]
    assert ["evaluation/samples/own/width" in row for row in found] == [False, False, True]


def test_sheets_are_read_without_an_image_library() -> None:
    program = "import sys, train.run.reporting.evaluations; print('PIL' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
