"""Following a run from other machines: nodes come and go, and the run's own files are only read."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ray._private.node import Node

from evaluate.parts import read_part
from evaluate.sampling.job import read_set
from shards.open import open_store
from tests.evaluate.watching import numbers, stay_here, watch, written
from tests.faults.cluster import TwoNodes, workers_of

WAITS = "No node of the cluster can take a worker"


def drawn(place: Path) -> dict[str, bytes]:
    """Every picture that a sample set's receipts name."""
    store = open_store(place)
    return {name: data for part in read_set(place).parts.values() for name, data in read_part(store, part).items()}


@pytest.mark.slow
def test_nodes_come_and_go_while_it_watches(
    run_dir: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, two, another one, none, and one more: as from this process alone, and each checkpoint once."""
    words = list(words)
    for name, value in {"steps": "40", "part_size": "10", "batch_size": "10"}.items():
        words[words.index(f"--sampling.{name}") + 1] = value
    with monkeypatch.context() as here:
        stay_here(here)
        assert watch(run_dir, words, "--output", str(tmp_path / "still")) == 0
    log, sets = tmp_path / "log", run_dir / "evaluations"
    with tempfile.TemporaryDirectory(prefix="we-") as short, TwoNodes(Path(short)) as nodes:
        driver = nodes.start_driver(["evaluate", "watch", str(run_dir), *words], log)

        def wait_until(happens: Callable[[], object]) -> None:
            end = time.monotonic() + 240
            while not happens():
                assert driver.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.02)

        def at_work(node: Node) -> bool:
            return bool(workers_of(node, "ray::Hands.attempt"))

        first = nodes.node
        wait_until(lambda: at_work(first))
        second = nodes.add_node()
        wait_until(lambda: at_work(first) and at_work(second))
        nodes.lose(first)
        committed = len(list(sets.rglob("receipts/*/*.json")))
        wait_until(lambda: len(list(sets.rglob("receipts/*/*.json"))) > committed and at_work(second))
        nodes.lose(second)
        wait_until(lambda: WAITS in log.read_text())
        nodes.add_node()
        assert driver.wait(400) == 0, log.read_text()[-3000:]
    said = log.read_text()
    assert numbers(run_dir) == numbers(tmp_path / "still") and len(written(run_dir)) == 6
    for place in sorted((tmp_path / "still" / "evaluations").glob("step-*/g8*")):
        found = sets / place.relative_to(tmp_path / "still" / "evaluations")
        assert drawn(found) == drawn(place) and len(drawn(found)) == 60
        assert said.count(f"{found}: 60 pictures") == 1 and len(list(found.parent.glob("evaluated-*"))) == 1
    assert len(list((run_dir / "tracker" / "evaluations").iterdir())) == 3
