"""Following a run from other machines: nodes join and leave, and the trainer's files are only read."""

import tempfile
from functools import partial
from pathlib import Path

import pytest
from ray._private.node import Node

from evaluation.parts import read_part
from evaluation.sampling.sets import read_set
from shards.open import open_store
from tests.evaluation.watch.watching import numbers, stay_here, watch, written
from tests.faults.cluster import TwoNodes, workers_of
from tests.runs import wait_until

OWN = {"evaluations", "evaluations.jsonl", ".unfinished"}
"""Entries that a watcher adds to a run folder, besides the tracker's files."""
WAITS = "No node in the cluster can take a worker"


def drawn(place: Path) -> dict[str, bytes]:
    """Return file name → content for all images of a sample set."""
    store = open_store(place)
    return {name: data for part in read_set(place).parts.values() for name, data in read_part(store, part).items()}


@pytest.mark.slow
def test_nodes_join_and_leave_while_watching(
    run_dir: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster has one, two, one, no and one node. The result is that of a run without Ray, without repetitions."""
    words = [{"32x32": "64x64"}.get(word, word) for word in words]  # sampling must outlast the changes
    for name, value in {"steps": "40", "part_size": "10", "batch_size": "10"}.items():
        words[words.index(f"--sampling.{name}") + 1] = value
    with monkeypatch.context() as here:
        stay_here(here)
        assert watch(run_dir, words, "--output", str(tmp_path / "still")) == 0
    log, sets = tmp_path / "log", run_dir / "evaluations"
    with tempfile.TemporaryDirectory(prefix="we-") as short, TwoNodes(Path(short)) as nodes:
        driver = nodes.start_driver(["evaluation", "watch", str(run_dir), *words], log)

        wait = partial(wait_until, process=driver, log=log)

        def at_work(node: Node) -> bool:
            return bool(workers_of(node, "ray::WorkerActor.attempt"))

        first = nodes.node
        wait(lambda: at_work(first))
        second = nodes.add_node()
        wait(lambda: at_work(first) and at_work(second))
        nodes.lose(first)
        committed = len(list(sets.rglob("receipts/*/*.json")))
        wait(lambda: len(list(sets.rglob("receipts/*/*.json"))) > committed and at_work(second))
        nodes.lose(second)
        wait(lambda: WAITS in log.read_text())
        nodes.add_node()
        assert driver.wait(400) == 0, log.read_text()[-3000:]
    output = log.read_text()
    assert numbers(run_dir) == numbers(tmp_path / "still") and len(written(run_dir)) == 6
    for place in sorted((tmp_path / "still" / "evaluations").glob("step-*/g8*")):
        found = sets / place.relative_to(tmp_path / "still" / "evaluations")
        assert drawn(found) == drawn(place) and len(drawn(found)) == 60
        assert output.count(f"{found}: 60 images") == 1 and len(list(found.parent.glob("evaluated-*"))) == 1
    assert len(list((run_dir / "tracker" / "evaluations").iterdir())) == 3


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Return inode, mode, modification time and content of each file and folder."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        found[path.relative_to(folder).as_posix()] = about.st_ino, about.st_mode, about.st_mtime_ns, content
    return found


def test_the_trainers_files_are_not_modified(
    run_dir: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_here(monkeypatch)
    before = snapshot(run_dir)
    words = [*words, "--until", "2"]
    assert watch(run_dir, words, "--output", str(tmp_path / "elsewhere")) == 0
    assert snapshot(run_dir) == before
    assert watch(run_dir, words) == 0
    after = snapshot(run_dir)
    parents = {".", "tracker", ".unfinished"}  # the watcher creates entries in these
    assert all(after.get(name) == about for name, about in before.items() if name not in parents)
    added = {name for name in after.keys() - before.keys() if not name.startswith("tracker/evaluations")}
    assert {name.split("/")[0] for name in added} == OWN - parents
