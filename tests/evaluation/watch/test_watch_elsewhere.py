"""Following a run from other machines: nodes come and go, and the run's own files are only read."""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from ray._private.node import Node

from evaluation.parts import read_part
from evaluation.sampling.job import read_set
from evaluation.watch.follow import Follower
from shards.open import open_store
from tests.evaluation.watch.watching import numbers, stay_here, watch, written
from tests.faults.cluster import TwoNodes, workers_of
from tests.ranks import SERVER

OWN = {"evaluations", "evaluations.jsonl", ".unfinished"}
"""What a watcher adds to a run folder, beside the tracker's."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
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
        driver = nodes.start_driver(["evaluation", "watch", str(run_dir), *words], log)

        def wait_until(happens: Callable[[], object]) -> None:
            end = time.monotonic() + 240
            while not happens():
                assert driver.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.02)

        def at_work(node: Node) -> bool:
            return bool(workers_of(node, "ray::WorkerActor.attempt"))

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


def everything(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Each file and folder: inode, mode, when it changed, what it holds."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        found[path.relative_to(folder).as_posix()] = about.st_ino, about.st_mode, about.st_mtime_ns, content
    return found


def test_nothing_of_the_trainers_is_touched(
    run_dir: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_here(monkeypatch)
    before = everything(run_dir)
    words = [*words, "--until", "2"]
    assert watch(run_dir, words, "--output", str(tmp_path / "elsewhere")) == 0
    assert everything(run_dir) == before
    assert watch(run_dir, words) == 0
    after = everything(run_dir)
    parents = {".", "tracker"}  # into which the watcher's own are put
    assert {name: after.get(name) for name in before.keys() - parents} == {
        name: before[name] for name in before.keys() - parents
    }
    added = {name for name in after.keys() - before.keys() if not name.startswith("tracker/evaluations")}
    assert {name.split("/")[0] for name in added} == OWN


def test_what_a_look_costs_the_run(run_dir: Path, words: list[str], tmp_path: Path) -> None:
    """The config and a listing while nothing is new; of a new checkpoint each file once or twice, none for writing."""
    told = tmp_path / "told.json"
    process = SERVER.Process(target=_watch_and_tell, args=(run_dir, words, told))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    first, *idle, end = json.loads(told.read_text())
    for look in idle:
        assert look["read"] == {"config.yaml": 1} and set(look["listed"].values()) == {1}
        assert all(Path(name).parts[0] == "checkpoints" for name in look["listed"])
    files = {path.relative_to(run_dir).as_posix() for path in (run_dir / "checkpoints").rglob("*") if path.is_file()}
    assert set(first["read"]) == files | {"config.yaml"}
    again = {name for name in files if "/ema/" in name or name.endswith("/state.json")}
    assert {name: first["read"][name] for name in files} == {name: 1 + (name in again) for name in files}
    assert end["listed"] == {"tracker/evaluations": 1} and not end["read"]
    assert not any(look["written"] for look in (first, *idle, end))
    reads = {name.split("/", 2)[2]: first["read"][name] for name in sorted(files) if "step-00000002" in name}
    print(f"nothing new: read {idle[-1]['read']}, checkpoints listed {idle[-1]['listed']['checkpoints']} times")
    print(f"a new checkpoint: read {reads}; opened for writing: {first['written']}")


def _watch_and_tell(run_dir: Path, words: list[str], told: Path) -> None:
    """Three looks at a run that has not ended; of each, which of the run's files and folders were opened, how often."""
    looks: list[dict[str, Counter[str]]] = []

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.scandir", "os.listdir") and looks and str(arguments[0]).startswith(str(run_dir)):
            name = str(Path(str(arguments[0])).relative_to(run_dir))
            writes = event == "open" and int(str(arguments[2])) & WRITES
            looks[-1]["written" if writes else "read" if event == "open" else "listed"][name] += 1

    def look(follower: Follower, *rest: object) -> bool:
        looks.append({"read": Counter(), "listed": Counter(), "written": Counter()})
        look_once(follower, *rest)
        ended = len(looks) == 3
        if ended:
            looks.append({"read": Counter(), "listed": Counter(), "written": Counter()})
        return ended

    monkeypatch = pytest.MonkeyPatch()
    stay_here(monkeypatch)
    look_once: Callable[..., bool] = Follower.look
    monkeypatch.setattr(Follower, "look", look)
    sys.addaudithook(hear)
    code = watch(run_dir, words, "--output", str(told.with_name("elsewhere")), "--until", "100")
    told.write_text(json.dumps(looks))
    os._exit(code)
