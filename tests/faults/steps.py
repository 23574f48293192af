"""A commit, broken at each of its steps: `python -m tests.faults.steps FOLDER MODELS EVERY KIND` prints the outcome.

Every system call that changes the disk (open for writing, write, fsync, rename, mkdir, unlink) is counted, from the
attempt's first to the index's last. Each run has SIGKILL after one of them, or one that fails with EIO or ENOSPC. The
models are loaded once, and each run is a fork of this process, so the kill is real.
"""

import builtins
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode.tar import encode_tar
from precompute.input.find import find_input
from shards.base.scratch import sweep_attempts
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.index import write_indexes
from shards.root.shared import create_root, record_rules
from shards.root.writing import PartWriter, Sample
from shards.tools.verify import verify_root
from tests.faults.world import Tally, World, look, make_world, stored_keys
from tests.fixtures import make_towers
from tests.forks import OK, STORAGE_ERROR, fork, wait_for

NEVER, COUNT_ONLY = -1, 0


class Steps:
    """Counts disk-changing calls, and calls `fault` in place of step number `at`."""

    def __init__(self, at: int, fault: Callable[[], None]):
        self.at = at
        self.fault = fault
        self.taken = 0

    def take(self) -> None:
        """Count one step."""
        self.taken += 1
        if self.taken == self.at:
            self.fault()

    def install(self) -> None:
        """Install the counters for the rest of this process's life."""
        for name in ("fsync", "replace", "rename", "link", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self._before(getattr(os, name)))
        pq.write_table = self._before(pq.write_table)
        builtins.open = self._opening(builtins.open)
        io.open = self._opening(io.open)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **named: Any) -> Any:
            self.take()
            return function(*args, **named)

        return stepping

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            if mode == "r" or "r" in mode:
                return function(path, mode, *args, **named)
            self.take()
            file = function(path, mode, *args, **named)
            return Writing(file, self) if "b" in mode else file

        return opening


class Writing:
    """A file whose every write is a step."""

    def __init__(self, file: Any, steps: Steps):
        self.file = file
        self.steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Writing":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        """Write the first half before counting the step, which leaves a torn write."""
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        self.steps.take()
        return half + self.file.write(data[half:])


def kill() -> None:
    """Send SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number: int) -> Callable[[], None]:
    """Return a fault that raises an `OSError` with this number."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


class Encoding:
    """Stage 1 without Ray, in forks of a process with loaded models."""

    def __init__(self, world: World):
        self.world = world
        torch.set_num_threads(1)
        config = world.config(Path("no root"))
        self.record = describe_encoding(config)
        self.towers = make_towers(config, self.record)

    def run(self, root: Path, steps: Steps) -> int:
        """Run stage 1 into `root`; return its exit code, negative for a signal."""
        return wait_for(self.start(root, steps))

    def start(self, root: Path, steps: Steps, other: bool = False) -> int:
        """Start the process."""

        def work() -> None:
            config = self.world.config(root)
            steps.install()
            self.encode(config, other)
            if steps.at == COUNT_ONLY:
                (root.parent / "steps").write_text(str(steps.taken))

        return fork(work, f"step {steps.at}")

    def encode(self, config: PrecomputeConfig, other: bool = False) -> None:
        """Encode in this process; `other` produces slightly different latents, like a different kind of GPU."""
        if other:
            setattr(PartWriter, "write", write_other)  # noqa: B010
        store = open_store(config.output)
        create_root(store, self.record)
        record_rules(store, config.to_fill.rules)
        for tar in find_input(config.input).units(store):
            encode_tar(tar, make_recipe(config, self.record), store, self.towers)
        sweep_attempts(store)
        write_indexes(store)


def write_other(part: PartWriter, *samples: Sample, write: Callable[..., None] = PartWriter.write) -> None:
    """Replace `PartWriter.write`, and write slightly different latents."""
    write(part, *(replace(sample, image_latents=sample.image_latents + 0.25) for sample in samples))


def race(encoding: Encoding, folder: Path, rounds: int, tally: Tally) -> dict[str, object]:
    """Run two processes on one tar, the second one a little later each round; both succeed, with one commit.

    In every other round their bytes differ; each active part must then be entirely that of one process.
    """
    won = 0
    for number in range(rounds):
        root, differ = folder / f"race-{number}", bool(number % 2)
        first = encoding.start(root, Steps(NEVER, kill))
        time.sleep(0.01 * (number % 60))
        second = encoding.start(root, Steps(NEVER, kill), other=differ)
        assert [wait_for(first), wait_for(second)] == [OK, OK]
        assert not list((root / ".attempts").glob("*"))
        if differ:
            assert list(verify_root(open_store(root))) == []
            assert stored_keys(root) == stored_keys(encoding.world.reference)
            theirs = {receipt.part for receipt in load_receipts(open_store(encoding.world.reference))}
            won += sum(receipt.part not in theirs for receipt in load_receipts(open_store(root)))
        else:
            tally.add(root, encoding.world.reference)
        shutil.rmtree(root)
    return {"rounds": rounds, "parts won by other bytes": won}


def break_at(encoding: Encoding, folder: Path, at: int, fault: Callable[[], None], tally: Tally) -> int:
    """Break a run at one step, check the root, run again, and count the outcome.

    The run may succeed anyway if the step is only cleanup.
    """
    root = folder / f"{getattr(fault, '__name__', 'fault')}-{at}"
    code = encoding.run(root, Steps(at, fault))
    look(root)
    assert encoding.run(root, Steps(NEVER, kill)) == OK
    tally.add(root, encoding.world.reference)
    assert not list((root / ".attempts").glob("*")), "an attempt was left behind"
    subprocess.run(["rm", "-r", str(root)], check=True)
    return code


def disk_full(encoding: Encoding, folder: Path, every: int, tally: Tally) -> dict[str, object]:
    """Run on a small file system that grows by a page each time until everything fits, and then with enough space."""
    mount = folder / "small"
    mount.mkdir()
    refusals = 0
    for pages in range(2, 1000, every):
        size = f"size={4 * pages}k"
        if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(mount)], capture_output=True).returncode:
            return {"skipped": "no right to mount a file system"}
        try:
            code = encoding.run(mount / "root", Steps(NEVER, kill))
            assert code in (OK, STORAGE_ERROR), code
            refusals += code == STORAGE_ERROR
            look(mount / "root")
            if code == OK:
                return {"sizes_too_small": refusals, "smallest_that_fits_kib": 4 * pages}
            subprocess.run(["mount", "-o", "remount,size=100m", str(mount)], check=True)
            assert encoding.run(mount / "root", Steps(NEVER, kill)) == OK
            tally.add(mount / "root", encoding.world.reference)
        finally:
            subprocess.run(["umount", str(mount)], check=True)
    raise AssertionError("no size was enough")


def grow(encoding: Encoding, folder: Path, steps: Sequence[int]) -> dict[str, object]:
    """Kill a run at each of these steps, add an image to the input, and kill the next run as well. Then a last run has
    to store every image exactly once."""
    for at in steps:
        root, added = folder / f"growing-{at}", encoding.world.tars / f"added-{at}.jpg"
        assert encoding.run(root, Steps(at, kill)) == -signal.SIGKILL
        shutil.copy(next(iter(sorted(encoding.world.tars.glob("00*.jpg")))), added)
        added.with_suffix(".txt").write_text("added later")
        assert encoding.run(root, Steps(at, kill)) == -signal.SIGKILL
        look(root)
        assert encoding.run(root, Steps(NEVER, kill)) == OK
        assert list(verify_root(open_store(root))) == []
        keys, before = stored_keys(root), stored_keys(encoding.world.reference)
        assert set(keys.values()) == {1} and {key.partition(".")[0] for _, key in keys - before} == {added.stem}
        for path in (added, added.with_suffix(".txt")):
            path.unlink()
        shutil.rmtree(root)
    return {"runs": len(steps), "kills": 2 * len(steps)}


def main(folder: Path, models: Path, every: int, kind: str) -> None:
    """Test kills, EIO and ENOSPC at every `every`-th step, a full disk, and two concurrent runs. An input that is a
    folder also grows meanwhile."""
    encoding = Encoding(make_world(folder, models, num_shards=1, num_samples=5, kind=kind))
    assert encoding.run(folder / "counted", Steps(COUNT_ONLY, kill)) == OK
    num_steps = int((folder / "steps").read_text())
    figures: dict[str, object] = {"steps": num_steps}
    for name, fault, wanted in (
        ("SIGKILL", kill, {-signal.SIGKILL}),
        ("EIO", failing(errno.EIO), {STORAGE_ERROR, OK}),
        ("ENOSPC", failing(errno.ENOSPC), {STORAGE_ERROR, OK}),
    ):
        tally = Tally()
        codes = [break_at(encoding, folder, at, fault, tally) for at in range(1, num_steps + 1, every)]
        assert set(codes) <= wanted, (name, codes)
        figures[name] = {"faults": len(codes), "harmless": codes.count(OK)} | tally.check()
    if kind == "files":
        figures["growing input"] = grow(encoding, folder, range(num_steps // 4, num_steps // 2, every))
    tally = Tally()
    outcome = disk_full(encoding, folder, every, tally)
    figures["full file system"] = outcome | (tally.check() if tally.files else {})
    tally = Tally()
    figures["two at once"] = race(encoding, folder, max(4, 200 // every), tally) | tally.check()
    print(json.dumps(figures))


def run(arguments: list[str]) -> None:
    folder, models, every, kind = arguments
    main(Path(folder), Path(models), int(every), kind)


if __name__ == "__main__":
    run(sys.argv[1:])
