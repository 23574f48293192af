"""A run folder at an address: the run of a folder, bit for bit, on any machine, killed wherever it may be killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shards.base.durable import write_sealed_json
from shards.base.errors import Outage, RequestError, WorkError
from shards.base.store import LocalStore
from shards.open import open_store
from tests import ranks
from tests.faults.proxy import FAULTS, set_fault
from tests.runs import curve, train_fields, write_config
from train.__main__ import run as command
from train.run.saving import away
from train.run.saving.away import Away, bring, fetch, find_checkpoints, take, wait_until_free, work_folder
from train.run.saving.checkpoint import list_checkpoints, step_folder, verify_checkpoint

STEPS = 6


def train(latents: Path, folder: Path, run_dir: Path | str, **changes: Any) -> Path:
    """A run in this process; its folder on this machine."""
    fields = train_fields(latents, run_dir, **changes)
    command(["--config", str(write_config(folder, fields))])
    return work_folder(run_dir)


def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on there is nothing in the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir=tmp_path))


@pytest.fixture(scope="module")
def whole(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, in a folder."""
    folder = tmp_path_factory.mktemp("whole")
    return train(latents, folder, folder / "run", max_steps=STEPS)


def test_a_run_goes_on_on_an_empty_machine_bit_for_bit(
    s3: str,
    whole: Path,
    latents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for max_steps in (3, 5, STEPS):
        empty_machine(tmp_path, monkeypatch)
        work = train(latents, tmp_path, f"{s3}/run", max_steps=max_steps)
        assert curve(work) == tuple(values[:max_steps] for values in curve(whole))
    assert f"resuming {s3}/run after step 5 (run, step-00000005)" in capsys.readouterr().out
    store, last = open_store(f"{s3}/run"), list_checkpoints(whole)[-1]
    assert sorted(find_checkpoints(store)) == ["step-00000005", "step-00000006"]
    with store.local(f"checkpoints/{last.name}") as copy:
        assert verify_checkpoint(copy).content["files"] == verify_checkpoint(last).content["files"]
    # what people and `evaluate` read lies there as in a folder
    assert store.read("metrics.jsonl") == (work / "metrics.jsonl").read_bytes()
    assert {"config.yaml", "loss.png", "samples.jsonl"} <= set(store.entries())

    empty_machine(tmp_path, monkeypatch)
    train(latents, tmp_path, tmp_path / "next", max_steps=1, init_from=f"{s3}/run")
    assert f"starting {tmp_path}/next from run after step 6" in capsys.readouterr().out


@pytest.fixture
def failing_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of the proxy of an S3 whose bucket is `s3://mill`."""
    with subprocess.Popen([sys.executable, "-m", "tests.faults.proxy"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(line.strip() for line in server.stdout if line.startswith("http"))
        keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
        for name, value in {"AWS_ENDPOINT_URL": address, **dict.fromkeys(keys, "us-east-1")}.items():
            monkeypatch.setenv(name, value)
        clients = fsspec.get_filesystem_class("s3")
        clients.clear_instance_cache()
        clients().makedirs("mill")
        yield address
        clients.clear_instance_cache()
        server.kill()


def elsewhere(arguments: list[str]) -> None:
    """The trainer, with the environment of its first argument."""
    os.environ.update(json.loads(arguments[0]))
    tempfile.tempdir = None
    command(arguments[1:])


def on_an_empty_machine(folder: Path, config: Path, server: str = "", at: int = 0, fault: str = "", **more: Any) -> int:
    """Train in a process, one of whose requests fails; returns its exit code."""
    variables = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    variables |= {"TMPDIR": tempfile.mkdtemp(dir=folder)}
    program = "tests.train.run.test_away:elsewhere"
    (process,) = ranks.start(folder / "log", [json.dumps(variables), "--config", str(config)], program=program, **more)
    if fault:
        assert process.pid is not None
        set_fault(server, at, fault, process.pid)
    (code,) = ranks.wait([process], 300)
    assert code is not None
    return code


@pytest.mark.parametrize("every", [40, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_any_request_a_run_goes_on_on_an_empty_machine(
    failing_s3: str, latents: Path, tmp_path: Path, every: int
) -> None:
    """Request after request of one run that is begun again each time; no checkpoint is ever seen in pieces."""
    steps, kept = 16, {"every": 1, "keep": 2}
    undisturbed = train(latents, tmp_path, tmp_path / "undisturbed", max_steps=steps, checkpoint=kept)
    config = write_config(tmp_path, train_fields(latents, "s3://mill/run", max_steps=steps, checkpoint=kept))
    store, codes = open_store("s3://mill/run"), []
    faults = ["kill before", "kill after"] if every > 3 else list(FAULTS)
    for number in range(10, 100, every):
        codes.append(on_an_empty_machine(tmp_path, config, failing_s3, number, faults[number // every % len(faults)]))
        assert codes[-1] in (0, -signal.SIGKILL), (tmp_path / "log").read_text()[-3000:]
        for name in find_checkpoints(store):
            fetch(store, Path(tempfile.mkdtemp(dir=tmp_path)), name)  # whole, or it raises
    assert -signal.SIGKILL in codes
    assert on_an_empty_machine(tmp_path, config) == 0
    work = Path(tempfile.mkdtemp(dir=tmp_path))
    bring(store, work)
    assert curve(work) == curve(undisturbed)
    ours, theirs = (verify_checkpoint(step_folder(run, steps)).content["files"] for run in (work, undisturbed))
    assert ours == theirs


@pytest.mark.slow
def test_each_node_fetches_the_checkpoint_once(failing_s3: str, latents: Path, tmp_path: Path) -> None:
    if not ranks.nodes_can_be_simulated():
        pytest.skip("this process may not make a /dev/shm of its own for each machine")
    fields = train_fields(latents, tmp_path / "near", max_steps=STEPS)
    ranks.run(tmp_path / "near.log", ["--config", str(write_config(tmp_path, fields))], 4, 2)
    variables = json.dumps({name: value for name, value in os.environ.items() if name.startswith("AWS_")})
    for max_steps in (3, STEPS):
        fields |= {"run_dir": "s3://mill/nodes", "max_steps": max_steps}
        words = [variables, "--config", str(write_config(tmp_path, fields))]
        program = "tests.train.run.test_away:elsewhere"
        codes = ranks.wait(ranks.start(tmp_path / "log", words, 4, 2, program=program))
        assert codes == [0, 0], (tmp_path / "log").read_text()[-3000:]
    bring(open_store("s3://mill/nodes"), tmp_path / "copy")
    assert curve(tmp_path / "copy") == curve(tmp_path / "near")


# what follows needs no S3: a store is a store


def checkpoint(work: Path, step: int, launch: int, text: str = "weights") -> Path:
    """One of a single file."""
    folder = step_folder(work, step)
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "weights").write_text(text)
    write_sealed_json(folder / "state.json", {"launch": launch, "files": {"unet/weights": away_sha(folder)}})
    return folder


def away_sha(folder: Path) -> str:
    """Of its one file."""
    return away.hashlib.sha256((folder / "unet" / "weights").read_bytes()).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "there")


def launched(store: LocalStore) -> Away:
    """A launch that takes the run over from the newest one."""
    return take(store.where().rstrip("/"), away.newest_sign(store)[0], find_checkpoints(store))


def test_nothing_that_a_superseded_launch_puts_is_read(store: LocalStore, tmp_path: Path) -> None:
    work = tmp_path / "work"
    first = launched(store)
    first.put(checkpoint(work, 1, 1), work)
    second = launched(store)
    assert (first.number, second.number) == (1, 2)
    assert list(find_checkpoints(store)) == ["step-00000001"]  # accepted
    late = checkpoint(work, 2, 1)
    with pytest.raises(RequestError, match=r"there is in use: launch 2 \(host .* took it over from this launch, 1,"):
        first.put(late, work)
    with pytest.raises(RequestError, match="took it over"):
        first.drop_old(2, lambda ages: sorted(ages))
    # or it slept between its look and its requests
    files = {f"checkpoints/step-00000002/{name}": late / name for name in ("unet/weights", "state.json")}
    store.put(files)
    assert list(find_checkpoints(store)) == ["step-00000001"]
    assert sorted(bring(store, tmp_path / "third")) == ["step-00000001"]
    shutil.rmtree(late)
    second.put(checkpoint(work, 2, 2, "others"), work)
    second.put(checkpoint(work, 3, 2), work)
    second.drop_old(3, lambda ages: [1] if sorted(ages) == [1, 2, 3] else [])
    assert sorted(find_checkpoints(store)) == ["step-00000002", "step-00000003"]
    assert store.read("checkpoints/step-00000002/unet/weights") == b"others"
    assert sorted(find_checkpoints(open_store(launched(store).address))) == ["step-00000002", "step-00000003"]


def test_what_changed_between_the_look_and_the_claim_is_not_gone_on_from(store: LocalStore, tmp_path: Path) -> None:
    first, seen = launched(store), find_checkpoints(store)
    first.put(checkpoint(tmp_path / "work", 1, 1), tmp_path / "work")
    with pytest.raises(WorkError, match="changed while this launch was starting: the one before it was not dead"):
        take(first.address, 1, seen)
    assert list(find_checkpoints(store)) == ["step-00000001"]
    assert launched(store).number == 3


def test_of_two_that_claim_a_number_one_wins_also_where_its_reply_was_lost(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(store)
    with pytest.raises(RequestError, match="is in use: launch 1"):
        take(store.where().rstrip("/"), 0, {})
    create = LocalStore.create
    monkeypatch.setattr(LocalStore, "create", lambda *arguments: create(*arguments) and False)
    assert launched(store).number == 2


def test_another_machines_launch_is_waited_for_as_long_as_it_gives_no_sign(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = launched(store)
    monkeypatch.setattr("train.run.launches.machine", lambda: "another")
    began = time.monotonic()
    assert wait_until_free(store, 0.3) == 1 and time.monotonic() - began > 0.3
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            held.sign()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RequestError, match=r"is in use: launch 1 \(host .*\) trains in it"):
            wait_until_free(store, 60)
    finally:
        stop.set()
        thread.join()
    held.sign(ended="now")
    assert wait_until_free(store, 1000) == 1


def test_a_damaged_checkpoint_is_passed_over_and_one_here_that_is_not_there_is_dropped(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, launch = tmp_path / "work", launched(store)
    for step in (1, 2):
        launch.put(checkpoint(work, step, 1), work)
    store.write("checkpoints/step-00000002/unet/weights", b"flipped")
    checkpoint(tmp_path / "other", 3, 1)  # of an earlier run on that machine, which never got it away
    bring(store, tmp_path / "other")
    assert [folder.name for folder in list_checkpoints(tmp_path / "other")] == ["step-00000001"]
    assert "step-00000002 is damaged and passed over" in capsys.readouterr().out
    store.remove(["checkpoints/step-00000001/unet/weights"])
    with pytest.raises(RequestError, match=r"Every checkpoint of .* is damaged \(step-00000001, step-00000002\)"):
        bring(store, tmp_path / "third")


def test_a_store_that_is_out_of_reach_for_a_while_ends_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, launch, left = tmp_path / "work", launched(store), [3]
    put, pauses = LocalStore.put, list[float]()

    def failing(self: LocalStore, files: dict[str, Path]) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise Outage("the store is away.")
        put(self, files)

    monkeypatch.setattr(LocalStore, "put", failing)
    monkeypatch.setattr(away.time, "sleep", pauses.append)
    launch.put(checkpoint(work, 1, 1), work)
    assert pauses == [2.0, 4.0, 8.0] and list(find_checkpoints(store)) == ["step-00000001"]
    assert "is not at" in capsys.readouterr().out
    left[0] = 10**6
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(away.time, "monotonic", lambda: float(next(clock)))
    folder = checkpoint(work, 2, 1)
    for launch.patience, tries in ((900.0, 8), (480.0, 4)):  # the latter of several processes, which wait for it
        pauses.clear()
        with pytest.raises(Outage):
            launch.put(folder, work)
        assert len(pauses) == tries


def test_logs_that_do_not_get_there_undo_no_checkpoint(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, launch, put = tmp_path / "work", launched(store), LocalStore.put

    def without_logs(self: LocalStore, files: dict[str, Path]) -> None:
        if "metrics.jsonl" in files:
            raise Outage("the store is away.")
        put(self, files)

    monkeypatch.setattr(LocalStore, "put", without_logs)
    monkeypatch.setattr(LocalStore, "remove", lambda self, names: pytest.fail(f"{names} removed"))
    folder = checkpoint(work, 1, 1)
    (work / "metrics.jsonl").write_text("{}\n")
    launch.put(folder, work)
    assert list(find_checkpoints(store)) == ["step-00000001"]
    assert "has no newer logs yet: the store is away." in capsys.readouterr().out


def test_what_others_write_meanwhile_is_not_looked_at(store: LocalStore, tmp_path: Path) -> None:
    """Folders of checkpoints come and go while a run's files are listed."""
    work, launch, left = tmp_path / "work", launched(store), threading.Event()
    (work / "tracker").mkdir(parents=True)
    (work / "tracker" / "events").write_text("1")

    def come_and_go() -> None:
        while not left.is_set():
            shutil.rmtree(checkpoint(work, 7, 1))

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(200):
            launch.share(work)
    finally:
        left.set()
        thread.join()
    assert store.read("tracker/events") == b"1" and not any("checkpoints" in name for name in store.entries())
