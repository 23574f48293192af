"""Runs at a URL: they equal runs in a folder bit for bit, on any machine and after a kill at any request.

Tests of what a launch does with the files that it finds use objects in memory. Tests that kill or suspend a launch, or
start several processes, use an S3 server.
"""

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
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shards.base.errors import RequestError
from shards.base.remote import RemoteStore
from shards.base.store import Store
from shards.open import open_store
from tests import ranks
from tests.faults.proxy import FAULTS, resume, set_fault, suspend
from tests.fixtures import Record, s3_variables
from tests.runs import curve, fetch, train_fields, write_config
from train.__main__ import run as command
from train.run.checkpoints.checkpoint import LINES, list_checkpoints, step_folder, verify_checkpoint
from train.run.checkpoints.local_copy import find_checkpoints, lease_backend, work_folder
from train.run.lease.lease import Lease
from train.run.reporting.json_lines import JsonLines

STEPS = 6


def train(latents: Path, folder: Path, run_dir: Path | str, **changes: Any) -> Path:
    """Train in this process, and return the local folder of the run."""
    fields = train_fields(latents, run_dir, **changes)
    command(["--config", str(write_config(folder, fields))])
    return run_dir if isinstance(run_dir, Path) else local_run(run_dir)


def local_run(address: str) -> Path:
    """Return the only local folder of a run at a URL."""
    (folder,) = work_folder(address).glob(f"*/{address.rpartition('/')[2]}")
    return folder


def download_run(store: Store, run: Path) -> None:
    """Download the newest checkpoint and its logs, as a launch on an empty machine does."""
    newest = max(find_checkpoints(store))
    shutil.copytree(fetch(store, run, newest).folder / LINES, run, dirs_exist_ok=True)


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Map each path below a folder to its bytes, or None for a folder."""
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}


def content_at(store: Store) -> dict[str, bytes]:
    """Map each object of a store to its bytes."""
    return {name: store.read(name) for name in store.files()}


def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty temporary folder from here on."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir=tmp_path))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Address of an empty folder in this process's memory, with the same store class as S3 but without a server."""
    yield f"memory://{tmp_path.name}"
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture(scope="module")
def whole(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run in a folder."""
    folder = tmp_path_factory.mktemp("whole")
    return train(latents, folder, folder / "run", max_steps=STEPS)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the objects and the local files of the run that `four_steps` copies."""
    return tmp_path_factory.mktemp("template")


@pytest.fixture
def four_steps(url: str, template: Path, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of a run of four steps, which this machine trained."""
    empty_machine(tmp_path, monkeypatch)
    address, objects = f"{url}/run", template / "objects"
    store = open_store(address)
    if not objects.exists():
        train(latents, tmp_path, address, max_steps=4)
        for name in store.files():
            (objects / name).parent.mkdir(parents=True, exist_ok=True)
            store.get(name, objects / name)
        shutil.copytree(work_folder(address), template / "local")
    else:
        store.put({path.relative_to(objects).as_posix(): path for path in objects.rglob("*") if path.is_file()})
        shutil.copytree(template / "local", work_folder(address))
    return address


def remove_last_state(store: Store) -> None:
    """Remove the state.json of step 4, as if the launch had been killed before it uploaded it."""
    store.remove([f"checkpoints/{name}" for name in store.files("checkpoints") if "4.0001/state.json" in name])


def test_a_run_folder_that_was_moved_to_a_url_keeps_its_logs(
    s3: str, whole: Path, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_machine(tmp_path, monkeypatch)
    store = open_store(f"{s3}/moved")
    store.put({path.relative_to(whole).as_posix(): path for path in whole.rglob("*") if path.is_file()})
    work = train(latents, tmp_path, f"{s3}/moved", max_steps=STEPS + 1)
    assert tuple(values[:STEPS] for values in curve(work)) == curve(whole)
    assert store.read("metrics.jsonl") == (work / "metrics.jsonl").read_bytes()


def test_a_launch_takes_the_snapshot_that_the_run_lacks(
    url: str, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_machine(tmp_path, monkeypatch)
    folder, store = "posthoc/checkpoints/step-00000002", open_store(f"{url}/averaged")
    train(latents, tmp_path, f"{url}/averaged", max_steps=2, ema={"snapshot_every": 2})
    lost = json.loads(store.read(f"{folder}.0001/state.json"))
    for launch in (2, 3):
        store.remove([f"{folder}.0001/{name}" for name in store.files(f"{folder}.0001")])
        train(latents, tmp_path, f"{url}/averaged", max_steps=2 + launch, ema={"snapshot_every": 2})
    states = [name for name in store.files("posthoc/checkpoints") if name.endswith("state.json")]
    assert states == ["step-00000002.0002/state.json", "step-00000004.0002/state.json"]  # and none by the third launch
    taken = json.loads(store.read(f"{folder}.0002/state.json"))
    assert taken["files"] == lost["files"] != {}


def test_snapshots_after_the_resumed_checkpoint_are_removed(
    url: str, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, training diverged after them, and continues from an earlier checkpoint."""
    empty_machine(tmp_path, monkeypatch)
    store, changes = open_store(f"{url}/again"), {"ema": {"snapshot_every": 1}, "checkpoint": {"every": 2}}
    train(latents, tmp_path, f"{url}/again", max_steps=4, **changes)
    store.remove([f"checkpoints/{name}" for name in store.files("checkpoints") if name.startswith("step-00000004")])
    empty_machine(tmp_path, monkeypatch)
    train(latents, tmp_path, f"{url}/again", max_steps=3, **changes)
    states = [name for name in store.files("posthoc/checkpoints") if name.endswith("state.json")]
    assert states == [
        "step-00000001.0001/state.json",
        "step-00000002.0001/state.json",
        "step-00000003.0002/state.json",
    ]


def test_a_launch_after_the_last_step_uploads_its_checkpoint(
    four_steps: str, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(four_steps)
    remove_last_state(store)
    train(latents, tmp_path, four_steps, max_steps=4)
    assert "step-00000004 is complete on this machine but was not uploaded to memory" in capsys.readouterr().out
    assert "step-00000004" in find_checkpoints(store)
    train(latents, tmp_path, four_steps, max_steps=4)
    assert "there is nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("machine", ["empty", "with damaged copies", "ahead"])
def test_check_names_the_step_and_changes_nothing(
    four_steps: str,
    latents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: str,
) -> None:
    address, work, store = four_steps, local_run(four_steps), open_store(four_steps)
    if machine == "ahead":
        remove_last_state(store)
    elif machine == "with damaged copies":
        for name in ("step-00000004", "step-00000009", "step-00000004.abc"):
            (work / "checkpoints" / name).mkdir(exist_ok=True)
            (work / "checkpoints" / name / "state.json").write_text("{}")
        (work / "metrics.jsonl").write_text('{"step": 9}\n')
    else:
        empty_machine(tmp_path, monkeypatch)
    copies = work_folder(address)
    before, stored = content_of(copies), content_at(store)
    config = write_config(tmp_path, train_fields(latents, address, max_steps=STEPS))
    capsys.readouterr()
    command(["check", "--config", str(config)])
    output = capsys.readouterr().out
    assert f"{address} would resume after step 4 (run, step-00000004).\n" in output
    assert ("is complete on this machine" in output) == (machine == "ahead")
    assert (content_of(copies), content_at(store)) == (before, stored)
    assert copies.exists() == (machine != "empty")
    scratch = Path(tempfile.gettempdir()) / f"latentmill-{os.getuid()}.scratch"
    assert not list(scratch.glob("*/"))  # the download was removed

    # the same for a run that starts from these weights
    fields = train_fields(latents, tmp_path / "next", init_from=address)
    command(["check", "--config", str(write_config(tmp_path, fields))])
    output = capsys.readouterr().out
    expected = 2 if machine == "ahead" else 4  # only the run itself resumes from what was not uploaded
    assert f"{tmp_path}/next would start from run after step {expected} (" in output
    assert (content_of(copies), content_at(store)) == (before, stored) and not (tmp_path / "next").exists()


def test_a_refused_launch_changes_nothing(
    four_steps: str, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different machine acquires the run just before this launch would, or sends heartbeats when this one looks."""
    address, store, copies = four_steps, open_store(four_steps), work_folder(four_steps)
    before = content_of(copies)
    assert (step_folder(local_run(address), 4) / "state.json").is_file()
    config = write_config(tmp_path, train_fields(latents, address, max_steps=STEPS))
    monkeypatch.setattr("train.run.lease.owner.machine", lambda: None)
    holders, stopped, acquire = list[Lease](), threading.Event(), Lease.acquire

    def send_heartbeats() -> None:
        while not stopped.wait(0.05):
            holders[0].renew()

    thread = threading.Thread(target=send_heartbeats)

    def acquired_meanwhile(*arguments: Any) -> Any:
        holders.append(acquire(lease_backend(address, tmp_path / "far"), 0.1))
        thread.start()
        return acquire(*arguments)

    try:
        with monkeypatch.context() as patches:
            patches.setattr(Lease, "acquire", acquired_meanwhile)
            with pytest.raises(RequestError, match=r"run/? is in use: launch 2"):
                command(["--config", str(config)])
        assert content_of(copies) == before
        stored = set(store.files()) | {"launches/0002.sign"}
        with pytest.raises(RequestError, match=r"run/? is in use: launch 2"):
            command(["--config", str(config)])
    finally:
        stopped.set()
        thread.join()
    assert content_of(copies) == before and set(store.files()) == stored


def test_a_store_that_ignores_create_if_absent_is_refused(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such a store, two launches could both believe that they hold the run."""

    def overwrite(store: RemoteStore, name: str, data: bytes) -> bool:
        store.write(name, data)
        return True

    monkeypatch.setattr(RemoteStore, "create", overwrite)
    address = f"memory://{tmp_path.name}/run"
    with pytest.raises(RequestError, match=r"/run is on a store that ignores conditional writes .* in this run_dir"):
        command(["--config", str(write_config(tmp_path, train_fields(latents, address)))])
    assert open_store(address).files() == []


@pytest.mark.parametrize("machine", ["empty", "its own", "ahead", "damaged"])
def test_a_run_resumes_bit_exactly_on_any_machine(
    four_steps: str,
    whole: Path,
    latents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: str,
) -> None:
    """Every file of the checkpoint is hashed once. A machine that is ahead uploads its checkpoint."""
    address, work, store = four_steps, local_run(four_steps), open_store(four_steps)
    content = verify_checkpoint(step_folder(work, 4)).content
    files = [*content["files"], *content["lines"]]
    if machine == "ahead":
        remove_last_state(store)
    elif machine == "damaged":
        (step_folder(work, 4) / min(files)).write_bytes(b"flipped")
    elif machine == "empty":
        empty_machine(tmp_path, monkeypatch)
    hashed, digest = list[str](), hashlib.file_digest

    def counted(file: Any, *arguments: Any) -> Any:
        hashed.append(file.name)
        return digest(file, *arguments)

    def hashed_by(words: list[str], step: int) -> list[str]:
        """Return the files of the checkpoint that the command hashed, with repetitions."""
        hashed.clear()
        with monkeypatch.context() as patches:
            patches.setattr(hashlib, "file_digest", counted)
            # the default pipeline would refuse this run's transformer before all files are read
            patches.setattr("train.export.pipeline.check_network", lambda *_: None)
            command(words)
        before = f"step-{step:08d}/"
        return sorted(name.partition(before)[2] for name in hashed if before in name)

    fields = train_fields(latents, address, max_steps=STEPS)
    found = hashed_by(["--config", str(write_config(tmp_path, fields))], 4)
    assert found == sorted([*files, min(files)] if machine == "damaged" else files)
    said = capsys.readouterr().out
    assert f"resuming {address} after step 4 (run, step-00000004)" in said
    assert ("step-00000004 is complete on this machine but was not uploaded to memory" in said) == (machine == "ahead")
    work, last = local_run(address), list_checkpoints(whole)[-1]
    assert curve(work) == curve(whole)
    assert sorted(find_checkpoints(store)) == ["step-00000004", "step-00000006"]
    assert fetch(store, tmp_path / "copy", last.name).content["files"] == verify_checkpoint(last).content["files"]
    verify_checkpoint(step_folder(work, STEPS))
    # the files that users and `evaluation` read
    assert store.read("metrics.jsonl") == (work / "metrics.jsonl").read_bytes()
    assert {"config.yaml", "loss.png", "samples.jsonl"} <= set(store.entries())
    if machine == "empty":
        empty_machine(tmp_path, monkeypatch)
        fields = train_fields(latents, tmp_path / "next", max_steps=1, init_from=address)
        assert hashed_by(["--config", str(write_config(tmp_path, fields))], STEPS) == sorted(files)
        assert f"starting {tmp_path}/next from run after step {STEPS}" in capsys.readouterr().out
        for more in ([], ["--step", str(STEPS)]):
            words = ["export", address, "--output", str(tmp_path / "pipeline"), *more]
            assert hashed_by(words, STEPS) == sorted(files)


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    """Start an S3 server behind a failing proxy, and return the proxy's address."""
    with subprocess.Popen([sys.executable, "-m", "tests.faults.proxy"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield next(line.strip() for line in server.stdout if line.startswith("http"))
        server.kill()


@pytest.fixture
def failing_s3(proxy: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use that server, with a bucket `mill`, and return the proxy's address."""
    for name, value in s3_variables(proxy).items():
        monkeypatch.setenv(name, value)
    clients = fsspec.get_filesystem_class("s3")
    clients.clear_instance_cache()
    clients().makedirs("mill", exist_ok=True)
    yield proxy
    clients.clear_instance_cache()


def elsewhere(arguments: list[str]) -> None:
    """Train with the environment variables in the first argument."""
    os.environ.update(json.loads(arguments[0]))
    tempfile.tempdir = None
    command(arguments[1:])


def start_elsewhere(
    log: Path, config: Path, num_processes: int = 1, num_nodes: int = 1, **variables: str
) -> list[ForkServerProcess]:
    """Train in other processes, with the variables of the S3 server and `variables`."""
    variables |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    words, program = [json.dumps(variables), "--config", str(config)], f"{__name__}:elsewhere"
    return ranks.start(log, words, num_processes, num_nodes, program=program)


def on_an_empty_machine(folder: Path, config: Path, server: str = "", at: int = 0, fault: str = "") -> int:
    """Train in a process with an empty temporary folder, fail one of its requests, and return its exit code."""
    (process,) = start_elsewhere(folder / "log", config, TMPDIR=tempfile.mkdtemp(dir=folder))
    if fault:
        assert process.pid is not None
        set_fault(server, at, fault, process.pid)
    (code,) = ranks.wait([process], 300)
    if fault:
        set_fault(server)
    assert code is not None
    return code


@pytest.mark.parametrize("every", [45, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_bit_exactly_after_a_kill_at_any_request(
    failing_s3: str, latents: Path, tmp_path: Path, every: int, record_property: Record
) -> None:
    """One run is started again and again, and killed at a different request each time."""
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
            fetch(store, Path(tempfile.mkdtemp(dir=tmp_path)), name)
    steps = last() + 1
    assert on_an_empty_machine(tmp_path, config("s3://mill/run", steps)) == 0
    kills = sum(fault.startswith("kill") for _, fault in faults)
    record_property("faults of S3 requests", {"kills": kills, "other faults": len(faults) - kills, "steps": steps})
    undisturbed = train(latents, tmp_path, tmp_path / "undisturbed", max_steps=steps, checkpoint=kept)
    work = Path(tempfile.mkdtemp(dir=tmp_path))
    download_run(store, work)
    assert curve(work) == curve(undisturbed)
    ours, theirs = (verify_checkpoint(step_folder(run, steps)).content["files"] for run in (work, undisturbed))
    assert ours == theirs


def test_a_suspended_upload_harms_nothing_that_the_successor_saves(
    failing_s3: str, whole: Path, latents: Path, tmp_path: Path
) -> None:
    """A launch is suspended while its state.json of step 2 is on its way, and a successor saves the same step.

    The checkpoints of the two differ, because their learning rates do. tests/train/run/lease suspends launches at every
    request; this test shows that the trainer, a real client and a real server behave as that model does.
    """
    address, kept = "s3://mill/suspended", {"every": 1, "keep": 1}
    fields = train_fields(latents, address, max_steps=3, checkpoint=kept, takeover_after=1.0)
    stale = write_config(tmp_path / "stale", fields | {"optimizer": {"lr": 0.5}})
    (process,) = start_elsewhere(tmp_path / "stale.log", stale, TMPDIR=tempfile.mkdtemp(dir=tmp_path))
    assert process.pid is not None
    files = 8  # of the second checkpoint; state.json comes last
    assert suspend(failing_s3, process.pid, files, "step-00000002"), "the checkpoint has fewer files"
    try:
        assert on_an_empty_machine(tmp_path, write_config(tmp_path, fields | {"max_steps": 2})) == 0
    finally:
        resume(failing_s3)
    (code,) = ranks.wait([process], 300)
    said = (tmp_path / "stale.log").read_text()
    assert code == 2 and "took over from this launch (launch 1)," in " ".join(said.split()), said[-3000:]
    assert on_an_empty_machine(tmp_path, write_config(tmp_path, fields)) == 0
    said = (tmp_path / "log").read_text()
    assert f"resuming {address} after step 2" in said and "damaged" not in said
    lines = open_store(address).read("metrics.jsonl").decode().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    # the successor resumed from the first launch's step 1, whose weights differ from the undisturbed run's
    undisturbed = curve(whole)[0][:3]
    assert len(losses) == 3 and losses[0] == undisturbed[0] and losses != undisturbed


def test_sharded_checkpoints_of_two_machines_resume_bit_exactly_on_empty_ones(
    failing_s3: str, whole: Path, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two machines has one process, which holds and uploads a share of the weights. The losses are those of an
    undisturbed run in a folder, up to rounding."""
    if not ranks.nodes_can_be_simulated():
        pytest.skip("this process may not mount a /dev/shm for each simulated machine")
    changes: dict[str, Any] = {"sharding": "full", "checkpoint": {"every": 1}}
    fields = train_fields(latents, "s3://mill/parts", max_steps=2, **changes)
    config, store = write_config(tmp_path, fields), open_store("s3://mill/parts")
    (machines := tmp_path / "machines").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(machines))
    for launch in ("first", "again"):
        codes = ranks.wait(start_elsewhere(tmp_path / launch, config, 2, 2))
        assert codes == [0, 0], (tmp_path / launch).read_text()[-3000:]
        download_run(store, tmp_path / f"copy-{launch}")
        if launch == "first":  # the second launch repeats the last step
            store.remove([f"checkpoints/{name}" for name in store.files("checkpoints") if "step-00000002" in name])
    assert "resuming s3://mill/parts after step 1" in (tmp_path / "again").read_text()
    folders = [list(machine.glob("latentmill-*.runs/*/*/parts")) for machine in machines.glob("node-*")]
    assert [len(found) for found in folders] == [1] * 4, "a process worked in another machine's temporary folder"
    first, again = tmp_path / "copy-first", tmp_path / "copy-again"
    assert curve(again) == curve(first)
    losses, keys = curve(whole)
    assert curve(first) == (pytest.approx(losses[:2], rel=1e-5), keys[:2])
    ours, theirs = (verify_checkpoint(step_folder(run, 2)).content["files"] for run in (again, first))
    assert ours == theirs and "unet/diffusion_pytorch_model-00002-of-00002.safetensors" in ours
    files = {name.partition("/") for name in store.files("checkpoints")}
    lying = {name for folder, _, name in files if "step-00000002" in folder and not name.startswith("lines/")}
    assert lying == {*ours, "state.json"}  # and no receipts


@pytest.mark.slow
def test_sharded_runs_resume_bit_exactly_after_a_kill(failing_s3: str, latents: Path, tmp_path: Path) -> None:
    """One of two machines is killed, in turn, and both start again."""
    if not ranks.nodes_can_be_simulated():
        pytest.skip("this process may not mount a /dev/shm for each simulated machine")
    changes: dict[str, Any] = {"sharding": "full", "checkpoint": {"every": 1, "keep": 2}, "collective_timeout": 60.0}
    near = train_fields(latents, tmp_path / "near", max_steps=16, **changes)
    ranks.run(tmp_path / "near.log", ["--config", str(write_config(tmp_path, near))], 2)
    config = write_config(tmp_path, near | {"run_dir": "s3://mill/killed"})
    store, killed = open_store("s3://mill/killed"), 0
    for turn, number in enumerate(range(12, 120, 12)):  # requests of both
        processes = start_elsewhere(tmp_path / "log", config, 2, 2)
        victim = processes[turn % 2]
        assert victim.pid is not None
        set_fault(failing_s3, number, ("kill before", "kill after")[turn // 2 % 2], victim.pid)
        codes = ranks.wait(processes, 300)
        killed += -signal.SIGKILL in codes
        assert set(codes) <= {0, 1, -signal.SIGKILL}, (tmp_path / "log").read_text()[-3000:]
        for name in find_checkpoints(store):
            fetch(store, Path(tempfile.mkdtemp(dir=tmp_path)), name)
    codes = ranks.wait(start_elsewhere(tmp_path / "log", config, 2, 2), 300)
    assert codes == [0, 0], (tmp_path / "log").read_text()[-5000:]
    download_run(store, tmp_path / "copy")
    assert curve(tmp_path / "copy") == curve(tmp_path / "near")
    ours, theirs = (verify_checkpoint(step_folder(tmp_path / run, 16)).content["files"] for run in ("copy", "near"))
    assert ours == theirs and killed > 5


@pytest.mark.slow
def test_each_node_downloads_the_checkpoint_once(failing_s3: str, latents: Path, tmp_path: Path) -> None:
    if not ranks.nodes_can_be_simulated():
        pytest.skip("this process may not mount a /dev/shm for each simulated machine")
    fields = train_fields(latents, tmp_path / "near", max_steps=STEPS)
    ranks.run(tmp_path / "near.log", ["--config", str(write_config(tmp_path, fields))], 4, 2)
    for max_steps in (3, STEPS):
        fields |= {"run_dir": "s3://mill/nodes", "max_steps": max_steps}
        codes = ranks.wait(start_elsewhere(tmp_path / "log", write_config(tmp_path, fields), 4, 2))
        assert codes == [0, 0], (tmp_path / "log").read_text()[-3000:]
    download_run(open_store("s3://mill/nodes"), tmp_path / "copy")
    assert curve(tmp_path / "copy") == curve(tmp_path / "near")


def test_the_traceback_of_a_failed_run_is_uploaded(s3: str, latents: Path, tmp_path: Path) -> None:
    """The output is uploaded last, after everything that the main process prints."""
    fields = train_fields(latents, f"{s3}/failing", max_steps=3)
    variables = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")} | {"TMPDIR": str(tmp_path)}
    words = [json.dumps(variables), "--config", str(write_config(tmp_path, fields))]
    (code,) = ranks.wait(ranks.start(tmp_path / "log", words, program="tests.train.run.test_remote_run:full"), 300)
    assert code == 1, (tmp_path / "log").read_text()[-3000:]
    said = open_store(f"{s3}/failing").read("logs/0001/rank-00000.log").decode()
    assert "Traceback" in said and "No space left on device" in said


def full(arguments: list[str]) -> None:
    """Train on a disk that is full when the first line of metrics is written."""

    def write(self: JsonLines, **fields: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    JsonLines.write = write  # type: ignore[method-assign]
    elsewhere(arguments)
