"""On each machine one process reads the tables from the store, and the others map its result."""

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.kit.roots import make_root
from shards.base.errors import RequestError, WorkError
from shards.base.store import LocalStore
from shards.root.exclusions import add_exclusion, make_exclusion
from tests.forks import OK, fork, wait_for
from tests.roots import part_of
from train.data.loader import Loader
from train.data.node import KEPT_SECONDS, node_folder, once_per_node
from train.data.spec import DataConfig
from train.data.streams import find_data, open_data
from train.run.checkpoints.local_copy import work_folder

PARTS = [13, 29, 17, 23, 19, 11]
CALLS = ("read", "listing", "entries", "size", "get", "sha256")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_root(tmp_path / "root", {"64x64": PARTS})
    add_exclusion(LocalStore(root), make_exclusion("key", ["000000003", "000040001"]))
    return root


def calls_of(
    root: Path, machine: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch, **fields: object
) -> tuple[Counter[str], set[bytes]]:
    """Return all calls of a machine's ranks to the store, including those of `find_data`, and what each rank opened."""
    machine.mkdir()
    log, opened = machine / "calls", machine / "opened"
    monkeypatch.setattr("tempfile.tempdir", str(machine))
    for name in CALLS:
        monkeypatch.setattr(LocalStore, name, logged(name, log))
    streams = [{"root": str(root), "bucket": "64x64"}]
    config = DataConfig.model_validate({"streams": streams, "num_workers": 0, "num_canonical_nodes": 4, **fields})
    found = find_data(config)

    def rank(number: int) -> None:
        os.environ["LOCAL_RANK"] = str(number)
        spec = open_data(config, 8, found)
        (stream,) = spec.streams
        assert stream.selection is not None and stream.files.names.flags["OWNDATA"] is False
        append(opened, f"{stream.files.num_samples} {stream.selection.sha256} {spec.size_check is not None}\n".encode())

    ranks = [fork(partial(rank, number)) for number in range(num_ranks)]
    assert [wait_for(pid) for pid in ranks] == [OK] * num_ranks
    monkeypatch.undo()
    lines = opened.read_bytes().splitlines()
    assert len(lines) == num_ranks and sum(line.endswith(b"True") for line in lines) == 1
    return Counter(log.read_text().splitlines()), {line.rpartition(b" ")[0] for line in lines}


def logged(name: str, log: Path) -> Callable[..., object]:
    """Wrap a method of LocalStore so that it logs its calls."""
    original = getattr(LocalStore, name)

    def call(store: LocalStore, *args: object) -> object:
        append(log, f"{name} {args[0] if args else ''}\n".encode())
        return original(store, *args)

    return call


def append(path: Path, line: bytes) -> None:
    """Append in a single write, so that lines of different processes do not mix."""
    with open(path, "ab", buffering=0) as file:
        file.write(line)


def test_16_ranks_of_a_machine_make_as_many_store_calls_as_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"filter": {"aesthetic": {"min": 3.0}}}
    calls, opened = zip(*(calls_of(root, tmp_path / str(n), n, monkeypatch, **fields) for n in (1, 4, 16)), strict=True)
    assert calls[0] == calls[1] == calls[2] and opened[0] == opened[1] == opened[2] and len(opened[0]) == 1
    tables = [name for name in calls[0] if "samples.parquet" in name]
    assert len(tables) == len(PARTS) and all(calls[0][name] == 1 for name in tables)
    assert sum(calls[0].values()) <= 2 * len(PARTS) + 20


def test_a_restart_reuses_the_tables_of_the_machine(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, opened = calls_of(root, tmp_path / "machine", 4, monkeypatch)
    cache = tmp_path / "cache"
    cached = [calls_of(root, tmp_path / f"rank{n}", 2, monkeypatch, cache=str(cache)) for n in range(2)]
    assert cached[0][0] == once and cached[0][1] == cached[1][1] == opened
    assert not any(name in line for line in cached[1][0] for name in ("segments", "samples.parquet"))


def test_another_process_takes_over_from_a_killed_one_and_removes_its_leftovers(tmp_path: Path) -> None:
    def killed(folder: Path) -> None:
        (folder / "half").touch()
        os._exit(9)

    assert wait_for(fork(lambda: once_per_node(tmp_path, "key", killed))) == 9
    # the lock file, which the kernel has unlocked, and the unfinished folder
    assert len(list(tmp_path.glob("key.*"))) == 2
    made = once_per_node(tmp_path, "key", lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_failure_leaves_nothing_behind_and_the_next_process_retries(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        once_per_node(tmp_path, "key", lambda folder: 1 / 0)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    once_per_node(tmp_path, "key", lambda folder: None)


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert node_folder(None).parent == tmp_path / f"latentmill-{os.getuid()}"
    assert node_folder(None).parent.stat().st_mode & 0o777 == 0o700
    other = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: other)
    with pytest.raises(RequestError, match=rf"latentmill-{other} belongs to another user"):
        node_folder(None)
    assert node_folder(tmp_path / "cache").parent == tmp_path / "cache"
    assert work_folder("s3://bucket/run").parent == tmp_path / f"latentmill-{other}.runs"
    (tmp_path / f"latentmill-{other}.runs").mkdir()
    with pytest.raises(RequestError, match=rf"latentmill-{other}\.runs belongs to another user"):
        work_folder("s3://bucket/run")


def test_only_one_of_several_concurrent_callers_makes_an_entry(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.1)
        np.save(folder / "a.npy", np.arange(3))

    threads = [threading.Thread(target=once_per_node, args=(tmp_path, "key", make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and (tmp_path / "key" / "a.npy").exists()


def test_different_entries_can_be_made_concurrently(tmp_path: Path) -> None:
    """Each call sweeps the folder while others are about to rename their entries."""

    def make(key: str) -> Path:
        return once_per_node(tmp_path, key, lambda folder: (folder / "a").touch())

    keys = [f"{number:03d}" for number in range(100)]
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(make, keys))
    assert [place.name for place in made] == keys and all((place / "a").exists() for place in made)


def test_unused_entries_are_removed_but_stay_mapped(tmp_path: Path) -> None:
    for key in ("old", "used"):
        once_per_node(tmp_path, key, lambda folder: np.save(folder / "a.npy", np.arange(1000)))
    mapped = np.load(tmp_path / "old" / "a.npy", mmap_mode="r")
    past = time.time() - KEPT_SECONDS - 60
    for key in ("old", "used"):
        os.utime(tmp_path / key, (past, past))
    once_per_node(tmp_path, "used", lambda folder: pytest.fail("it is there"))
    once_per_node(tmp_path, "new", lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["new", "used"]
    assert mapped.sum() == 499500


def to_a_file(path: Path) -> None:
    """Replace a file's folder with a file."""
    shutil.rmtree(path.parent)
    path.parent.touch()


@pytest.mark.parametrize(
    ("tar", "damage", "message"),
    [
        ("00000", Path.unlink, "is missing, but its index lists"),
        ("00002", lambda path: os.truncate(path, 0), "is 0 bytes long, but its index lists"),
        ("00005", to_a_file, "cannot be read: "),
    ],
    ids=["missing", "empty", "unreadable"],
)
def test_a_file_of_the_wrong_size_stops_a_run_before_it_is_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tar: str, damage: Callable[[Path], None], message: str
) -> None:
    """The first, a middle and the last file of three blocks. The first step reads only one file."""
    monkeypatch.setattr("train.data.node.FILES_AT_ONCE", 2)
    path = part_of(root, "64x64", tar) / "shard.00000.mds"
    damage(path)
    streams = [{"root": str(root), "bucket": "64x64"}]
    config = DataConfig.model_validate({"streams": streams, "num_workers": 0, "num_canonical_nodes": 1})
    spec = open_data(config, 8)
    assert spec.size_check is not None
    assert f"{path} {message}" in (spec.size_check.problem or "").replace("The size of ", "")
    with pytest.raises(WorkError, match="The loader failed after step 3"):
        next(iter(Loader(config, spec, 8, 0, 3, torch.arange(8))))
