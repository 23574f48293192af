"""SIGKILL of workers, drivers and raylets, and SIGTERM to drivers, at random moments; then the same command again."""

import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from shards.base.errors import Preempted
from tests.faults.cluster import TwoNodes, attempts, wait_for_a_moment
from tests.faults.world import Tally, World, make_world

TOLD_TO_LEAVE = (-signal.SIGKILL, -signal.SIGTERM, Preempted.exit_code)
LONGEST_WAIT = 6.0
"""Seconds between kills, at most; a shard takes about one."""


@pytest.mark.slow
def test_fifty_kills(models: Path, tmp_path: Path, report: dict[str, object], seed: int) -> None:
    world = make_world(tmp_path, models, num_shards=10, num_samples=24)
    report["kills"] = storm(world, tmp_path, {"worker": 25, "driver": 13, "raylet": 12, "SIGTERM": 3}, seed)


def test_a_few_kills(models: Path, tmp_path: Path, report: dict[str, object], seed: int) -> None:
    world = make_world(tmp_path, models, num_shards=3, num_samples=12)
    report["kills"] = storm(world, tmp_path, {"worker": 1, "raylet": 1, "SIGTERM": 1}, seed)


def storm(world: World, folder: Path, kills: dict[str, int], seed: int) -> dict[str, object]:
    """Kill, as often as `kills` says, while the command fills one root after another."""
    rng = random.Random(seed)
    waiting = [victim for victim, count in kills.items() for _ in range(count)]
    rng.shuffle(waiting)
    done: Counter[str] = Counter()
    tally, roots, started = Tally(), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rf-") as short, TwoNodes(Path(short)) as nodes:
        while waiting or not roots:
            root, log = folder / f"root-{roots}", folder / f"root-{roots}.log"
            fields = world.config(root).model_dump(mode="json")
            fields["workers"] |= {"attempts": 1000, "lost_attempts": 1000, "backoff": 0, "node_failures": 1000}
            (config := folder / f"root-{roots}.yaml").write_text(yaml.safe_dump(fields))
            words = ["precompute", "--config", str(config)]
            driver = nodes.start_driver(words, log)
            while driver.poll() is None or driver.returncode in TOLD_TO_LEAVE:
                if driver.poll() is not None:
                    driver = nodes.start_driver(words, log)
                if not waiting:
                    driver.wait(600)
                elif wait_for_a_moment(rng, root, driver, LONGEST_WAIT):
                    at_work = bool(attempts(root))
                    if waiting[-1] == "driver":
                        driver.kill()
                        driver.wait()
                    elif waiting[-1] == "SIGTERM":
                        driver.terminate()
                        if driver.wait() in (0, -signal.SIGTERM):
                            continue  # it was at its end, or had not begun
                        assert driver.returncode == Preempted.exit_code
                        assert "the same command again goes on" in log.read_text().replace("\n", " ")
                        if not done["raylet"]:  # a worker whose raylet was killed may go on for a while
                            assert not attempts(root)
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
            tally.add(root, world.reference)
            roots += 1
            print(f"{root.name} is through: {tally.check()}", flush=True)
    assert {victim: done[victim] for victim in kills} == kills
    return dict(done) | {"roots": roots, "seconds": round(time.monotonic() - started)} | tally.check()
