"""A commit on S3, broken at each of its requests: `python -m tests.faults.steps_s3 FOLDER MODELS EVERY` prints JSON.

In each run one request is reset, answered with 503, executed with its reply lost, or its process is killed there.
This process never opens the store; forks check it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from precompute.config import PrecomputeConfig
from shards.base.scratch import SWEEPER, sweep_scratch, use_scratch
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.reading import read_parts
from shards.tools.verify import verify_root
from tests.faults.proxy import FAULTS, set_fault
from tests.faults.steps import Encoding
from tests.faults.world import look, make_world
from tests.fixtures import s3_variables
from tests.forks import OK, fork, wait_for
from tests.roots import comparable

BUCKET = "s3://mill"
LATER = 0.05
"""Delay of the second of two processes in seconds; a commit to S3 takes one to two seconds."""
SCRATCH = "STEPS_SCRATCH"
"""Environment variable with the scratch folder of all attempts."""


@contextmanager
def served() -> Iterator[str]:
    """Serve the failing S3, for this process's forks too."""
    with subprocess.Popen([sys.executable, "-m", "tests.faults.proxy"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(line.strip() for line in server.stdout if line.startswith("http"))
            os.environ.update(s3_variables(address))
            assert wait_for(fork(make_bucket, "bucket")) == OK
            yield address
        finally:
            server.kill()


def make_bucket() -> None:
    """Make an empty bucket."""
    open_store(BUCKET).fs.makedirs("mill")  # type: ignore[attr-defined]


def encode(encoding: Encoding, root: str, other: bool = False) -> int:
    """Start a process that runs stage 1 into `root`; `other` produces slightly different latents."""

    def work() -> None:
        use_scratch(Path(os.environ[SCRATCH]))
        encoding.encode(config_of(encoding, root), other)

    return fork(work, root)


def config_of(encoding: Encoding, root: str) -> PrecomputeConfig:
    """Make the config of a run into an object-store URL."""
    return encoding.world.config(Path("unused")).model_copy(update={"output": root})


def compare(root: str, reference: Path) -> None:
    """Check that a root is complete and byte-identical to the undisturbed one, except for the receipts' times."""
    store, found, expected = open_store(root), comparable(root), comparable(reference)
    assert list(verify_root(store)) == []
    different = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
    assert not different, different
    for receipt in load_receipts(store):
        keys = [sample["key"] for sample in read_parts(store, receipt.bucket, [receipt.part])]
        assert len(set(keys)) == len(keys) == receipt.samples


def break_at(encoding: Encoding, server: str, at: int, fault: str) -> bool:
    """Break a run at one request, check the root, run again, and compare; return whether the first run succeeded."""
    root = f"{BUCKET}/{fault.replace(' ', '-')}-{at}"
    child = encode(encoding, root)
    set_fault(server, at, fault, child)
    code = wait_for(child)
    set_fault(server)
    assert code == (-signal.SIGKILL if fault.startswith("kill") and code != OK else OK), (root, code)

    def look_and_go_on() -> None:
        look(root)
        encoding.encode(config_of(encoding, root))
        compare(root, encoding.world.reference)

    assert wait_for(fork(look_and_go_on, f"after {root}")) == OK
    return code == OK


def race(encoding: Encoding, folder: Path, rounds: int) -> dict[str, int]:
    """Run two processes on one tar, the second one a little later each round; both succeed, with one commit.

    In every other round their bytes differ; each active part must then be entirely that of one process.
    """
    theirs = {receipt.part for receipt in load_receipts(open_store(encoding.world.reference))}
    won = 0
    for number in range(rounds):
        root, differ = f"{BUCKET}/race-{number}", bool(number % 2)
        first = encode(encoding, root)
        time.sleep(LATER * (number // 2 % 10))
        second = encode(encoding, root, other=differ)
        assert [wait_for(first), wait_for(second)] == [OK, OK]

        def examine(root: str = root, differ: bool = differ) -> None:
            if differ:
                store = open_store(root)
                assert list(verify_root(store)) == []
                receipts = load_receipts(store)
                assert len(receipts) == len(theirs)
                (folder / "won").write_text(str(sum(receipt.part not in theirs for receipt in receipts)))
            else:
                compare(root, encoding.world.reference)

        assert wait_for(fork(examine, root)) == OK
        won += int((folder / "won").read_text()) if differ else 0
    return {"rounds": rounds, "parts won by other bytes": won}


def main(folder: Path, models: Path, every: int) -> None:
    """Test every fault at every `every`-th request, and two concurrent runs. Unless every request is tested, the faults
    are only a lost reply and a kill, which leave the request executed."""
    encoding = Encoding(make_world(folder, models, num_shards=1, num_samples=5))
    os.environ[SCRATCH] = str(folder / "scratch")
    with served() as server:
        set_fault(server)
        assert wait_for(encode(encoding, f"{BUCKET}/counted")) == OK
        requests = set_fault(server)
        figures: dict[str, object] = {"requests": requests}
        faults = FAULTS if every == 1 else ("lost", "kill after")
        for number, fault in enumerate(faults):
            # every fault occurs at least once
            at = range(1 + number * min(every, requests) // len(faults), requests + 1, every)
            figures[fault] = {"faults": len(at), "came through": sum(break_at(encoding, server, n, fault) for n in at)}
        # each delay twice, with equal and with other bytes
        figures["two at once"] = race(encoding, folder, max(2, 40 // every))
        sweep_scratch(folder / "scratch")  # forks exit without cleanup
        assert [path.name for path in (folder / "scratch").glob("*/*")] == [SWEEPER]
    print(json.dumps(figures))


def run(arguments: list[str]) -> None:
    folder, models, every = arguments
    main(Path(folder), Path(models), int(every))


if __name__ == "__main__":
    run(sys.argv[1:])
