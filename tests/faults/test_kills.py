"""SIGKILL of workers, drivers and raylets, and SIGTERM to drivers, at random moments; then the same command again.

Roots are on a disk, and on S3.
"""

import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import pytest
import yaml

from shards.base.errors import Preempted
from shards.base.scratch import SWEEPER, sweep_scratch
from tests.faults.cluster import TwoNodes, wait_for_a_moment
from tests.faults.steps_s3 import BUCKET, compare, served
from tests.faults.world import Tally, World, make_world, stored_keys
from tests.fixtures import Record, s3_variables
from tests.roots import tree

TOLD_TO_LEAVE = (-signal.SIGKILL, -signal.SIGTERM, Preempted.exit_code)
LONGEST_WAIT = 6.0
"""Maximum seconds between kills."""
WORK_ON_A_SHARD = 0.3
"""Seconds, at least."""


@dataclass
class OnDisk:
    """Roots in a folder."""

    folder: Path

    def fields(self, world: World, name: str) -> dict[str, Any]:
        """Return the config of a job into a root."""
        return world.config(self.folder / name).model_dump(mode="json")

    def attempts(self, name: str) -> list[Path]:
        """Return the folders of unfinished attempts."""
        return list((self.folder / name / ".attempts").glob("*"))

    def left_by_leaving(self, name: str) -> list[Path]:
        """Return files that a job should have removed when it was asked to stop."""
        return self.attempts(name)

    def add(self, tally: Tally, name: str, reference: Path) -> None:
        """Count a root that a job completed."""
        tally.add(self.folder / name, reference)


@dataclass
class OnS3(OnDisk):
    """Roots on S3; `folder` has the scratch of all workers."""

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    def fields(self, world: World, name: str) -> dict[str, Any]:
        fields = super().fields(world, name)
        return fields | {"output": f"{BUCKET}/{name}", "workers": fields["workers"] | {"scratch": str(self.scratch)}}

    def attempts(self, name: str) -> list[Path]:
        # no other root is being filled; pathlib's glob would raise if a folder disappeared meanwhile
        return list(map(Path, glob(f"{self.scratch}/*/*/latentmill-*.attempts/*/*.*")))

    def left_by_leaving(self, name: str) -> list[Path]:
        return []  # files left by killed workers are removed when the next worker starts

    def add(self, tally: Tally, name: str, reference: Path) -> None:
        compare(f"{BUCKET}/{name}", reference)  # fails if anything differs, is duplicated or is missing
        tally.files += len(tree(reference))
        tally.identical += len(tree(reference))
        tally.samples += stored_keys(reference).total()


@pytest.mark.slow
def test_fifty_kills(models: Path, tmp_path: Path, record_property: Record, seed: int) -> None:
    world = make_world(tmp_path, models, num_shards=10, num_samples=24)
    record_property(
        "kills", storm(world, OnDisk(tmp_path), {"worker": 25, "driver": 13, "raylet": 12, "SIGTERM": 3}, seed)
    )


@pytest.mark.slow
def test_kills_of_jobs_on_s3(
    models: Path, tmp_path: Path, record_property: Record, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in s3_variables(""):
        monkeypatch.setenv(name, "")  # and restored afterwards
    world, roots = make_world(tmp_path, models, num_shards=10, num_samples=24), OnS3(tmp_path)
    with served():
        record_property(
            "kills on S3", storm(world, roots, {"worker": 12, "driver": 6, "raylet": 5, "SIGTERM": 2}, seed)
        )
    sweep_scratch(roots.scratch)  # of workers without a successor
    assert [path.name for path in roots.scratch.glob("*/*")] == [SWEEPER]


def storm(world: World, place: OnDisk, kills: dict[str, int], seed: int) -> dict[str, object]:
    """Kill processes `kills` times while the command fills one root after another."""
    rng = random.Random(seed)
    work = WORK_ON_A_SHARD * len(list(world.tars.glob("*.tar")))
    waiting = [victim for victim, count in kills.items() for _ in range(count)]
    rng.shuffle(waiting)
    done: Counter[str] = Counter()
    tally, roots, started = Tally(), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rf-") as short, TwoNodes(Path(short)) as nodes:
        while waiting or not roots:
            root, log = f"root-{roots}", place.folder / f"root-{roots}.log"
            fields = place.fields(world, root)
            fields["workers"] |= {"attempts": 1000, "lost_attempts": 1000, "backoff": 0, "node_failures": 1000}
            (config := place.folder / f"{root}.yaml").write_text(yaml.safe_dump(fields))
            words = ["precompute", "--config", str(config)]
            driver = nodes.start_driver(words, log)
            while driver.poll() is None or driver.returncode in TOLD_TO_LEAVE:
                if driver.poll() is not None:
                    driver = nodes.start_driver(words, log)
                if not waiting:
                    driver.wait(600)
                elif wait_for_a_moment(rng, partial(place.attempts, root), driver, LONGEST_WAIT, work):
                    at_work = bool(place.attempts(root))
                    if waiting[-1] == "driver":
                        driver.kill()
                        driver.wait()
                    elif waiting[-1] == "SIGTERM":
                        driver.terminate()
                        if driver.wait() in (0, -signal.SIGTERM):
                            continue  # the job was at its end, or had not begun
                        assert driver.returncode == Preempted.exit_code
                        assert "Run the same command again to continue" in log.read_text().replace("\n", " ")
                        if not done["raylet"]:  # a worker whose raylet was killed may continue for a while
                            assert not place.left_by_leaving(root)
                    elif waiting[-1] == "raylet":
                        nodes.kill_raylet()
                    elif workers := nodes.workers():
                        rng.choice(workers).kill()
                    else:
                        continue  # none has started yet
                    done[waiting.pop()] += 1
                    done["during an attempt"] += at_work
                    print(f"{time.monotonic() - started:.0f} s: {dict(done)}", flush=True)
            assert driver.returncode == 0, log.read_text()[-3000:]
            place.add(tally, root, world.reference)
            roots += 1
            print(f"{root} is through: {tally.check()}", flush=True)
    assert {victim: done[victim] for victim in kills} == kills
    return dict(done) | {"roots": roots, "seconds": round(time.monotonic() - started)} | tally.check()
