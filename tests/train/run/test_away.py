"""A run folder at an address: the run of a folder, bit for bit, on any machine, killed wherever it may be killed."""

import errno
import hashlib
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shards.base.durable import write_sealed_json
from shards.base.errors import Outage, RequestError, WorkError
from shards.base.store import LocalStore, Store
from shards.open import open_store
from tests import ranks
from tests.faults.proxy import FAULTS, resume, set_fault, suspend
from tests.runs import curve, train_fields, write_config
from train.__main__ import run as command
from train.run.checkpoints import remote
from train.run.checkpoints.checkpoint import VERSION, Checkpoint, list_checkpoints, step_folder, verify_checkpoint
from train.run.checkpoints.local_copy import (
    download,
    find,
    find_checkpoints,
    install,
    obtain_same,
    sha256_of_state,
    stored_checkpoints,
    work_folder,
)
from train.run.checkpoints.remote import RemoteRun, take, wait_until_free
from train.run.checkpoints.shares import AtAddress, Writers
from train.run.health.output import outdated
from train.run.reporting.json_lines import JsonLines

STEPS = 6


def train(latents: Path, folder: Path, run_dir: Path | str, **changes: Any) -> Path:
    """A run in this process; its folder on this machine."""
    fields = train_fields(latents, run_dir, **changes)
    command(["--config", str(write_config(folder, fields))])
    return work_folder(run_dir)


def fetch(store: Store, run: Path, name: str) -> Checkpoint:
    """Download a checkpoint to the folder `run`: the whole of it, or an error is raised."""
    return download(store, stored_checkpoints(store)[name], step_folder(run, int(name.removeprefix("step-"))))


def bring(store: Store, work: Path, alone: bool = False) -> dict[str, str]:
    """Do to `work` what a launch does before and after it takes the run; returns the checkpoints at the address."""
    own = work / "launches" / "0001"
    own.mkdir(parents=True, exist_ok=True)
    with ExitStack() as downloads:
        found, checkpoint = find(store, work, downloads, alone)
        install(checkpoint, work, own)
    return found


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Paths below a folder, and the bytes of files."""
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}


def content_at(store: Store) -> dict[str, bytes]:
    """The objects of a store, and their bytes."""
    return {name: store.read(name) for name in store.files()}


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
    copy = fetch(store, tmp_path / "copy", last.name)
    assert copy.content["files"] == verify_checkpoint(last).content["files"]
    # what people and `evaluate` read lies there as in a folder
    assert store.read("metrics.jsonl") == (work / "metrics.jsonl").read_bytes()
    assert {"config.yaml", "loss.png", "samples.jsonl"} <= set(store.entries())

    empty_machine(tmp_path, monkeypatch)
    train(latents, tmp_path, tmp_path / "next", max_steps=1, init_from=f"{s3}/run")
    assert f"starting {tmp_path}/next from run after step 6" in capsys.readouterr().out


def test_a_machine_goes_on_from_what_it_has_and_puts_it_there(
    s3: str, whole: Path, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{s3}/ahead"
    train(latents, tmp_path, address, max_steps=4)
    store = open_store(address)
    # as if the launch had been killed before it came
    store.remove([f"checkpoints/{name}" for name in store.files("checkpoints") if "4.0001/state.json" in name])
    work = train(latents, tmp_path, address, max_steps=STEPS)
    said = capsys.readouterr().out
    assert "step-00000004 is whole on this machine and not at s3" in said
    assert f"resuming {address} after step 4" in said
    assert curve(work) == curve(whole)
    assert sorted(find_checkpoints(store)) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("machine", ["empty", "with another run's files", "ahead"])
def test_check_names_the_step_and_changes_nothing(
    s3: str,
    latents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: str,
) -> None:
    address = f"{s3}/checked"
    empty_machine(tmp_path, monkeypatch)
    work, store = train(latents, tmp_path, address, max_steps=4), open_store(address)
    if machine == "ahead":
        store.remove([f"checkpoints/{name}" for name in store.files("checkpoints") if "4.0001/state.json" in name])
    elif machine == "with another run's files":
        for name in ("step-00000004", "step-00000009", "step-00000004.abc"):
            (work / "checkpoints" / name).mkdir(exist_ok=True)
            (work / "checkpoints" / name / "state.json").write_text("{}")
        (work / "metrics.jsonl").write_text('{"step": 9}\n')
    elif machine == "empty":
        empty_machine(tmp_path, monkeypatch)
        work = work_folder(address)
    before, there = content_of(work), content_at(store)
    config = write_config(tmp_path, train_fields(latents, address, max_steps=STEPS))
    capsys.readouterr()
    command(["check", "--config", str(config)])
    said = capsys.readouterr().out
    assert f"{address} would resume after step 4 (checked, step-00000004).\n" in said
    assert ("is whole on this machine" in said) == (machine == "ahead")
    assert (content_of(work), content_at(store)) == (before, there)
    assert work.exists() == (machine != "empty")
    scratch = Path(tempfile.gettempdir()) / f"latentmill-{os.getuid()}.scratch"
    assert not list(scratch.glob("*/"))  # the download is gone

    # so does one of a run that begins with these weights
    fields = train_fields(latents, tmp_path / "next", init_from=address)
    command(["check", "--config", str(write_config(tmp_path, fields))])
    said = capsys.readouterr().out
    expected = 2 if machine == "ahead" else 4  # only the run's own machine resumes from what was not uploaded
    assert f"{tmp_path}/next would start from checked after step {expected} (" in said
    assert (content_of(work), content_at(store)) == (before, there) and not (tmp_path / "next").exists()


def test_a_launch_that_is_refused_changes_nothing(
    s3: str, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has the run: when this launch looks, or just before it would take it."""
    address = f"{s3}/refused"
    empty_machine(tmp_path, monkeypatch)
    machine = tempfile.gettempdir()
    work, store = train(latents, tmp_path, address, max_steps=2), open_store(address)
    empty_machine(tmp_path, monkeypatch)
    train(latents, tmp_path, address, max_steps=4)
    monkeypatch.setattr(tempfile, "tempdir", machine)
    (work / "checkpoints" / "step-00000004.abc").mkdir()
    before = content_of(work)
    assert "checkpoints/step-00000002/state.json" in before
    config = write_config(tmp_path, train_fields(latents, address, max_steps=STEPS))
    taken = list[RemoteRun]()

    def taken_meanwhile(*arguments: Any) -> Any:
        taken.append(launched(store))
        monkeypatch.setattr("train.run.launches.machine", lambda: "another")
        return take(*arguments)

    with monkeypatch.context() as patches:
        patches.setattr(remote, "take", taken_meanwhile)
        with pytest.raises(RequestError, match=r"refused/? is in use: launch 3"):
            command(["--config", str(config)])
    assert content_of(work) == before

    def beat() -> None:
        while not stop.wait(0.05):
            taken[0].sign()

    stop = threading.Event()
    thread = threading.Thread(target=beat)
    thread.start()
    there = set(store.files()) | {"launches/0003.sign"}
    try:
        with pytest.raises(RequestError, match=r"refused/? is in use: launch 3"):
            command(["--config", str(config)])
    finally:
        stop.set()
        thread.join()
    assert content_of(work) == before and set(store.files()) == there


@pytest.mark.parametrize("machine", ["empty", "its own", "ahead", "damaged"])
def test_every_file_of_a_checkpoint_at_an_address_is_hashed_once(
    s3: str, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    address = f"{s3}/hashed"
    work, store = train(latents, tmp_path, address, max_steps=4), open_store(address)
    content = verify_checkpoint(step_folder(work, 4)).content
    files = [*content["files"], *content["lines"]]
    if machine == "ahead":
        store.remove([f"checkpoints/{name}" for name in store.files("checkpoints") if "4.0001/state.json" in name])
    elif machine == "damaged":
        (step_folder(work, 4) / min(files)).write_bytes(b"flipped")
    elif machine == "empty":
        empty_machine(tmp_path, monkeypatch)
    hashed, digest = list[str](), hashlib.file_digest

    def counted(file: Any, *arguments: Any) -> Any:
        hashed.append(file.name)
        return digest(file, *arguments)

    def hashed_by(words: list[str], step: int) -> list[str]:
        """Files of the checkpoint that the command hashed, with each repetition."""
        hashed.clear()
        with monkeypatch.context() as patches:
            patches.setattr(hashlib, "file_digest", counted)
            command(words)
        before = f"step-{step:08d}/"
        return sorted(name.partition(before)[2] for name in hashed if before in name)

    fields = train_fields(latents, address, max_steps=5)
    found = hashed_by(["--config", str(write_config(tmp_path, fields))], 4)
    assert found == sorted([*files, min(files)] if machine == "damaged" else files)
    verify_checkpoint(step_folder(work_folder(address), 5))
    if machine == "empty":
        empty_machine(tmp_path, monkeypatch)
        fields = train_fields(latents, tmp_path / "next", init_from=address)
        assert hashed_by(["check", "--config", str(write_config(tmp_path, fields))], 5) == sorted(files)
        for more in ([], ["--step", "5"]):
            assert hashed_by(["export", address, "--output", str(tmp_path / "pipeline"), *more], 5) == sorted(files)


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
    if fault:
        set_fault(server)
    assert code is not None
    return code


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_request_a_run_goes_on_on_an_empty_machine(
    failing_s3: str, latents: Path, tmp_path: Path, every: int
) -> None:
    """Request after request of one run that is begun again each time; no checkpoint is ever seen in pieces."""
    kept, store = {"every": 1, "keep": 2}, open_store("s3://mill/run")
    # killed before it, after it
    faults = [(number, FAULTS[3 + number // every % 2]) for number in range(10, 100, every)]
    if every == 1:
        faults += [(number, FAULTS[number // 3 % 3]) for number in range(10, 100, 3)]  # none of which ends it

    def last() -> int:
        return max((int(name.removeprefix("step-")) for name in find_checkpoints(store)), default=0)

    def config(run_dir: Path | str, steps: int) -> Path:
        return write_config(tmp_path, train_fields(latents, run_dir, max_steps=steps, checkpoint=kept))

    for number, fault in faults:
        steps = last() + 8  # which are more than a hundred requests
        code = on_an_empty_machine(tmp_path, config("s3://mill/run", steps), failing_s3, number, fault)
        expected = -signal.SIGKILL if fault.startswith("kill") else 0
        assert code == expected, f"{fault} at {number}: {(tmp_path / 'log').read_text()[-3000:]}"
        for name in find_checkpoints(store):
            fetch(store, Path(tempfile.mkdtemp(dir=tmp_path)), name)  # whole, or it raises
    steps = last() + 1
    assert on_an_empty_machine(tmp_path, config("s3://mill/run", steps)) == 0
    print(f"{sum(fault.startswith('kill') for _, fault in faults)} kills, {len(faults)} faults in all, {steps} steps")
    undisturbed = train(latents, tmp_path, tmp_path / "undisturbed", max_steps=steps, checkpoint=kept)
    work = Path(tempfile.mkdtemp(dir=tmp_path))
    bring(store, work)
    assert curve(work) == curve(undisturbed)
    ours, theirs = (verify_checkpoint(step_folder(run, steps)).content["files"] for run in (work, undisturbed))
    assert ours == theirs


FILES = 8
"""Of the second checkpoint; the first one has no moving average, and two less."""


@pytest.mark.parametrize(
    ("at", "of", "steps"),
    [
        (FILES, "step-00000002", 2),  # state.json, which makes it a checkpoint
        *(pytest.param(at, "step-00000002", 2, marks=pytest.mark.slow) for at in range(1, FILES)),
        *(pytest.param(at, "step-00000001", 2, marks=pytest.mark.slow) for at in range(1, FILES - 1)),
        # it removes the first checkpoint: its state.json, and then the rest
        *(pytest.param(at, "step-00000001", 3, marks=pytest.mark.slow) for at in (FILES - 1, FILES)),
    ],
)
def test_a_launch_suspended_at_a_request_harms_nothing_that_its_successor_saves(
    failing_s3: str, whole: Path, latents: Path, tmp_path: Path, at: int, of: str, steps: int
) -> None:
    """A launch is suspended while a write or a removal is on its way. Another one takes over and saves the same steps.
    Then the first one resumes, and so does its request. Nothing of the run is lost, and the next launch continues it.

    The first one's checkpoints differ from its successor's, because their learning rates do.
    """
    address, kept = "s3://mill/suspended", {"every": 1, "keep": 1}
    fields = train_fields(latents, address, max_steps=3, checkpoint=kept, takeover_after=1.0)
    stale = write_config(tmp_path / "stale", fields | {"optimizer": {"lr": 0.5}})
    variables = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    variables |= {"TMPDIR": tempfile.mkdtemp(dir=tmp_path)}
    words, program = [json.dumps(variables), "--config", str(stale)], "tests.train.run.test_away:elsewhere"
    (process,) = ranks.start(tmp_path / "stale.log", words, program=program)
    assert process.pid is not None
    assert suspend(failing_s3, process.pid, at, of), f"there is no request {at} that writes {of}"
    try:
        assert on_an_empty_machine(tmp_path, write_config(tmp_path, fields | {"max_steps": steps})) == 0
    finally:
        resume(failing_s3)
    (code,) = ranks.wait([process], 300)
    said = (tmp_path / "stale.log").read_text()
    assert code == 2 and "it over from this launch, 1," in said, said[-3000:]
    assert on_an_empty_machine(tmp_path, write_config(tmp_path, fields | {"max_steps": STEPS})) == 0
    said = (tmp_path / "log").read_text()
    assert f"resuming {address} after step {steps}" in said and "damaged" not in said
    lines = open_store(address).read("metrics.jsonl").decode().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    # the first step's loss comes before any update; later ones hold only if nothing of the stale launch was trained on
    assert len(losses) == STEPS and (losses == curve(whole)[0]) == (of == "step-00000001" and steps == 2)


def test_machines_put_their_parts_and_empty_ones_go_on_bit_for_bit(
    failing_s3: str, latents: Path, tmp_path: Path
) -> None:
    """Two machines of a process each hold parts of the weights; each has nothing but what the address has."""
    if not ranks.nodes_can_be_simulated():
        pytest.skip("this process may not make a /dev/shm of its own for each machine")
    changes: dict[str, Any] = {"sharding": "full", "checkpoint": {"every": 3}}
    near = train_fields(latents, tmp_path / "near", max_steps=STEPS, **changes)
    ranks.run(tmp_path / "near.log", ["--config", str(write_config(tmp_path, near))], 2)
    variables = json.dumps({name: value for name, value in os.environ.items() if name.startswith("AWS_")})
    store, program = open_store("s3://mill/parts"), "tests.train.run.test_away:elsewhere"
    for max_steps in (3, STEPS):
        fields = near | {"run_dir": "s3://mill/parts", "max_steps": max_steps}
        words = [variables, "--config", str(write_config(tmp_path, fields))]
        codes = ranks.wait(ranks.start(tmp_path / "log", words, 2, 2, program=program))
        assert codes == [0, 0], (tmp_path / "log").read_text()[-3000:]
    assert "resuming s3://mill/parts after step 3" in (tmp_path / "log").read_text()
    bring(store, tmp_path / "copy")
    assert curve(tmp_path / "copy") == curve(tmp_path / "near")
    ours, theirs = (verify_checkpoint(step_folder(tmp_path / run, STEPS)).content["files"] for run in ("copy", "near"))
    assert ours == theirs and "unet/diffusion_pytorch_model-00002-of-00002.safetensors" in ours
    files = {name.partition("/") for name in store.files("checkpoints")}
    lying = {name for folder, _, name in files if "step-00000006" in folder and not name.startswith("lines/")}
    assert lying == {*ours, "state.json"}  # and no receipts


@pytest.mark.slow
def test_machines_killed_at_any_request_go_on_bit_for_bit(failing_s3: str, latents: Path, tmp_path: Path) -> None:
    """Of two machines that each put their part one is killed, the one and the other in turn; then both begin again."""
    if not ranks.nodes_can_be_simulated():
        pytest.skip("this process may not make a /dev/shm of its own for each machine")
    changes: dict[str, Any] = {"sharding": "full", "checkpoint": {"every": 1, "keep": 2}, "collective_timeout": 60.0}
    near = train_fields(latents, tmp_path / "near", max_steps=16, **changes)
    ranks.run(tmp_path / "near.log", ["--config", str(write_config(tmp_path, near))], 2)
    variables = json.dumps({name: value for name, value in os.environ.items() if name.startswith("AWS_")})
    words = [variables, "--config", str(write_config(tmp_path, near | {"run_dir": "s3://mill/killed"}))]
    store, program, killed = open_store("s3://mill/killed"), "tests.train.run.test_away:elsewhere", 0
    for turn, number in enumerate(range(12, 120, 12)):  # requests of both
        processes = ranks.start(tmp_path / "log", words, 2, 2, program=program)
        victim = processes[turn % 2]
        assert victim.pid is not None
        set_fault(failing_s3, number, ("kill before", "kill after")[turn // 2 % 2], victim.pid)
        codes = ranks.wait(processes, 300)
        killed += -signal.SIGKILL in codes
        assert set(codes) <= {0, 1, -signal.SIGKILL}, (tmp_path / "log").read_text()[-3000:]
        for name in find_checkpoints(store):
            fetch(store, Path(tempfile.mkdtemp(dir=tmp_path)), name)  # whole, or it raises
    assert ranks.wait(ranks.start(tmp_path / "log", words, 2, 2, program=program), 300) == [0, 0]
    bring(store, tmp_path / "copy")
    assert curve(tmp_path / "copy") == curve(tmp_path / "near")
    ours, theirs = (verify_checkpoint(step_folder(tmp_path / run, 16)).content["files"] for run in ("copy", "near"))
    assert ours == theirs and killed > 5


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


def checkpoint(work: Path, step: int, launch: RemoteRun, text: str = "weights", token: str = "") -> Path:
    """A launch's checkpoint, of a single file. `token`: a different run's."""
    folder = step_folder(work, step)
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "weights").write_text(text)
    content = {
        "version": VERSION,
        "launch": launch.number,
        "token": token or launch.token,
        "files": {"unet/weights": away_sha(folder)},
    }
    write_sealed_json(folder / "state.json", content)
    return folder


def away_sha(folder: Path) -> str:
    """Of its one file."""
    return hashlib.sha256((folder / "unet" / "weights").read_bytes()).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "there")


def launched(store: Store) -> RemoteRun:
    """A launch that takes the run over from the newest one."""
    return take(store.where().rstrip("/"), remote.newest_sign(store)[0], find_checkpoints(store))


def test_nothing_that_a_superseded_launch_puts_is_read(store: LocalStore, tmp_path: Path) -> None:
    work = tmp_path / "work"
    first = launched(store)
    first.put(checkpoint(work, 1, first), work)
    second = launched(store)
    assert (first.number, second.number) == (1, 2)
    assert list(find_checkpoints(store)) == ["step-00000001"]  # accepted
    late = checkpoint(work, 2, first)
    with pytest.raises(RequestError, match=r"there is in use: launch 2 \(host .* took it over from this launch, 1,"):
        first.put(late, work)
    with pytest.raises(RequestError, match="took it over"):
        first.drop_old(2, lambda ages: sorted(ages))
    # or it slept between its look and its requests
    files = {f"checkpoints/step-00000002.0001/{name}": late / name for name in ("unet/weights", "state.json")}
    store.put(files)
    assert list(find_checkpoints(store)) == ["step-00000001"]
    assert sorted(bring(store, tmp_path / "third")) == ["step-00000001"]
    shutil.rmtree(late)
    second.put(checkpoint(work, 2, second, "others"), work)
    second.put(checkpoint(work, 3, second), work)
    for step in (0, 9):  # the one was cut off, the other is on its way
        store.write(f"checkpoints/step-{step:08d}/unet/weights", b"")
    second.drop_old(3, lambda ages: [1] if sorted(ages) == [1, 2, 3] else [])
    there = {name.partition("/")[0] for name in store.files("checkpoints")}
    assert there == {"step-00000002.0002", "step-00000003.0002", "step-00000009"}
    assert sorted(find_checkpoints(store)) == ["step-00000002", "step-00000003"]
    assert (fetch(store, tmp_path / "copy", "step-00000002").folder / "unet/weights").read_bytes() == b"others"
    assert sorted(find_checkpoints(open_store(launched(store).address))) == ["step-00000002", "step-00000003"]


def test_what_changed_between_the_look_and_the_claim_is_not_gone_on_from(store: LocalStore, tmp_path: Path) -> None:
    first, seen = launched(store), find_checkpoints(store)
    first.put(checkpoint(tmp_path / "work", 1, first), tmp_path / "work")
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
        launch.put(checkpoint(work, step, launch), work)
    store.write("checkpoints/step-00000002.0001/unet/weights", b"flipped")
    checkpoint(tmp_path / "other", 3, launch)  # of an earlier run on that machine, which never got it away
    bring(store, tmp_path / "other")
    assert [folder.name for folder in list_checkpoints(tmp_path / "other")] == ["step-00000001"]
    assert "step-00000002 is damaged and passed over" in capsys.readouterr().out
    store.remove(["checkpoints/step-00000001.0001/unet/weights"])
    with pytest.raises(RequestError, match=r"Every checkpoint of .* is damaged \(step-00000001, step-00000002\)"):
        bring(store, tmp_path / "third")


def test_one_that_is_whole_here_and_not_there_yet_is_gone_on_from(store: LocalStore, tmp_path: Path) -> None:
    work, launch = tmp_path / "work", launched(store)
    launch.put(checkpoint(work, 1, launch), work)
    ahead = checkpoint(work, 2, launch)
    damaged = checkpoint(work, 3, launch)
    (damaged / "unet" / "weights").write_text("flipped")
    checkpoint(tmp_path / "other", 2, launch, token="another run's, which lay at the address before")
    for folder, alone, expected in (
        (tmp_path / "other", True, "step-00000001"),
        (work, True, ahead.name),
        (work, True, ahead.name),  # and again: a launch may be refused, or die, before it has taken the run
        (work, False, "step-00000001"),  # other machines would lack it
    ):
        found = bring(store, folder, alone)
        assert list(found) == ["step-00000001"]
        assert list_checkpoints(folder)[-1].name == expected
    checkpoint(work, 2, launch)
    bring(store, work, alone=True)
    second = take(launch.address, 1, found, ahead={ahead.name: sha256_of_state(ahead) or ""})
    assert list(find_checkpoints(store)) == ["step-00000001"]
    bring(store, work, alone=True)  # the second launch was killed before it had uploaded what it accepted
    assert list_checkpoints(work)[-1].name == ahead.name
    second.put(ahead, work)
    assert list(find_checkpoints(store)) == ["step-00000001", ahead.name]
    # from here on the run goes another way
    checkpoint(work, 3, launch)
    bring(store, work, alone=True)
    assert list_checkpoints(work)[-1].name == ahead.name


def test_each_machine_obtains_the_checkpoint_that_the_main_process_found(store: LocalStore, tmp_path: Path) -> None:
    work, other, launch = tmp_path / "work", tmp_path / "other", launched(store)
    launch.put(checkpoint(work, 1, launch), work)
    checkpoint(other, 1, launch, "of an earlier run, and sound")
    with ExitStack() as downloads:
        _, found = find(store, work, downloads)
        assert found is not None and found.folder == step_folder(work, 1)
        same = obtain_same(store, found, other, downloads)
        assert same.content == found.content and (same.folder / "unet/weights").read_text() == "weights"
        store.remove([f"checkpoints/{name}" for name in store.files("checkpoints")])
        with pytest.raises(WorkError, match=r"no longer has the checkpoint step-00000001 that this launch found"):
            obtain_same(store, found, other, downloads)
    assert (step_folder(other, 1) / "unet/weights").read_text() == "of an earlier run, and sound"


class Killed(BaseException):
    """A process is no more."""


def test_killed_at_any_request_parts_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes put theirs; one of their requests is the last of both. A later launch does the step again."""
    left, sound = [0], 0

    def counted(name: str) -> None:
        method = getattr(LocalStore, name)

        def until_killed(self: LocalStore, *arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return method(self, *arguments)

        monkeypatch.setattr(LocalStore, name, until_killed)

    for name in ("put", "write", "create", "remove"):
        counted(name)
    for last in range(12):
        left[0], store = 100, LocalStore(tmp_path / f"there-{last}")
        first = launched(store)
        first.put(checkpoint(tmp_path / f"work-{last}", 1, first), tmp_path / f"work-{last}")
        left[0] = last
        with suppress(Killed):
            put_in_parts(tmp_path / f"first-{last}", first, "one")
        left[0] = 100
        found = find_checkpoints(store)
        for name in found:
            fetch(store, tmp_path / f"copy-{last}", name)  # whole, or it raises
        sound += len(found) - 1
        if len(found) == 1:
            second = launched(store)
            put_in_parts(tmp_path / f"second-{last}", second, "another")
            assert list(find_checkpoints(store)) == ["step-00000001", "step-00000002"]
            fetched = fetch(store, tmp_path / f"second-copy-{last}", "step-00000002")
            assert (fetched.folder / "unet-2").read_text() == "another" and fetched.content["launch"] == 2
    assert 0 < sound < 12


def put_in_parts(work: Path, launch: RemoteRun, text: str) -> None:
    """A checkpoint of step 2 by two processes, the second of which is done first."""
    target = step_folder(work, 2)
    meetings = [AtAddress(work, Writers(rank, 2), launch) for rank in (0, 1)]
    hashes = {}
    for rank in (1, 0):
        private = meetings[rank].private(target)
        (private / f"unet-{rank + 1}").write_text(text)
        hashes = {f"unet-{rank + 1}": hashlib.sha256(text.encode()).hexdigest()}
        meetings[rank].hand_in(private, target, hashes)
    hashes |= meetings[0].wait_for(private, target, 1)
    content = {"version": VERSION, "launch": launch.number, "token": launch.token, "lines": {}, "files": hashes}
    meetings[0].publish(private, target, content)


def test_kept_output_of_old_launches_goes(store: LocalStore, tmp_path: Path) -> None:
    launch = launched(store)
    for name in ("0001", "0002", "0012"):
        store.write(f"logs/{name}/rank-00000.log", b"")
    launch.drop_logs(lambda names: outdated(names, 12, 11))
    launch.drop_logs(lambda names: outdated(names, 12, 11))
    assert store.files("logs") == ["0002/rank-00000.log", "0012/rank-00000.log"]


def test_the_last_words_of_a_run_are_at_its_address(s3: str, latents: Path, tmp_path: Path) -> None:
    """With their traceback: after the run's last checkpoint, and after all that the main process printed."""
    fields = train_fields(latents, f"{s3}/failing", max_steps=3)
    variables = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")} | {"TMPDIR": str(tmp_path)}
    words = [json.dumps(variables), "--config", str(write_config(tmp_path, fields))]
    (code,) = ranks.wait(ranks.start(tmp_path / "log", words, program="tests.train.run.test_away:full"), 300)
    assert code == 1, (tmp_path / "log").read_text()[-3000:]
    said = open_store(f"{s3}/failing").read("logs/0001/rank-00000.log").decode()
    assert "Traceback" in said and "No space left on device" in said


def full(arguments: list[str]) -> None:
    """The trainer on a disk that is full when a line is to be written."""

    def write(self: JsonLines, **fields: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    JsonLines.write = write  # type: ignore[method-assign]
    elsewhere(arguments)


def test_a_part_that_does_not_come_is_named(store: LocalStore, tmp_path: Path) -> None:
    meeting = AtAddress(tmp_path, Writers(0, 2, patience=0.1), launched(store))
    target = step_folder(tmp_path, 2)
    store.write("checkpoints/step-00000002.0001/part-00001-of-an-earlier-launch.json", b"{}")
    with pytest.raises(WorkError, match=r"process 1 has not written its share of it in 0.1 s .* or reach its address"):
        meeting.wait_for(meeting.private(target), target, 1)


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
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    launch.put(checkpoint(work, 1, launch), work)
    assert pauses == [2.0, 4.0, 8.0] and list(find_checkpoints(store)) == ["step-00000001"]
    assert "is not at" in capsys.readouterr().out
    left[0] = 10**6
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(remote.time, "monotonic", lambda: float(next(clock)))
    folder = checkpoint(work, 2, launch)
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
    folder = checkpoint(work, 1, launch)
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
            shutil.rmtree(checkpoint(work, 7, launch))

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(200):
            launch.share(work)
    finally:
        left.set()
        thread.join()
    assert store.read("tracker/events") == b"1" and not any("checkpoints" in name for name in store.entries())
