"""A root may grow, and parts may be recalled, while a run trains on it; the run continues unaffected."""

import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench.kit.roots import make_root
from shards.base.errors import RequestError
from shards.base.store import LocalStore
from shards.format.receipts import tombstone_name
from shards.root.exclusions import add_exclusion, make_exclusion
from shards.root.index import write_indexes
from shards.root.publish import Publisher
from tests import ranks
from tests.runs import curve, run_module, train_fields, write_config
from train.run.checkpoints.checkpoint import list_checkpoints, newest_checkpoint
from train.run.fingerprint import check_resume
from train.run.reporting.json_lines import read_json_lines

PARTS = [13, 29, 17, 23, 19, 11]
LATER = ("00000", "00003", "00005")
STEPS = 10


def set_aside(root: Path, tars: Iterable[str]) -> None:
    """Remove the receipts of some tars from a root, and everything published."""
    for tar in tars:
        for receipt in list(root.glob(f"commits/*/{tar}.json")):
            aside = root.with_name("aside") / receipt.parent.name
            aside.mkdir(parents=True, exist_ok=True)
            receipt.rename(aside / receipt.name)
    shutil.rmtree(root / "index")
    for index in root.glob("*/index.json"):
        index.unlink()


def put_back(root: Path, tars: Iterable[str]) -> None:
    """Restore the receipts."""
    for tar in tars:
        for receipt in list(root.with_name("aside").glob(f"*/{tar}.json")):
            receipt.rename(root / "commits" / receipt.parent.name / receipt.name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root of six parts, three of which are committed."""
    root = make_root(tmp_path / "root", {"64x64": PARTS})
    set_aside(root, LATER)
    write_indexes(LocalStore(root))
    return root


def grow(root: Path) -> None:
    put_back(root, LATER)
    write_indexes(LocalStore(root))


def train(tmp_path: Path, fields: dict[str, Any], *more: str) -> str:
    result = run_module("train", "--config", str(write_config(tmp_path, fields)), *more)
    assert result.returncode == 0, result.stderr
    return result.stdout.replace("\n", " ")


def fingerprint_of(run_dir: Path) -> dict[str, Any]:
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None
    return checkpoint.fingerprint


def test_a_run_killed_while_its_root_grows_resumes_with_the_same_curve(root: Path, tmp_path: Path) -> None:
    train(tmp_path, train_fields(root, tmp_path / "reference", max_steps=STEPS))
    before = (root / "64x64" / "index.json").read_bytes()

    config = write_config(tmp_path, train_fields(root, tmp_path / "run", max_steps=STEPS))
    (process,) = ranks.start(tmp_path / "log", ["--config", str(config)])
    while len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) < 3 or not list_checkpoints(tmp_path / "run"):
        assert process.exitcode is None
        time.sleep(0.005)
    grow(root)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and (root / "64x64" / "index.json").read_bytes() != before
    # parts that the run reads are recalled, too
    store = LocalStore(root)
    store.create(tombstone_name("64x64", "00004", 0), b"")
    Publisher(store).publish()

    output = train(tmp_path, train_fields(root, tmp_path / "run", max_steps=STEPS))
    assert f"resuming {tmp_path}/run after step" in output
    assert f"19 of 65 samples in {root}/64x64 were recalled" in output.replace("  ", " ")
    assert curve(tmp_path / "run") == curve(tmp_path / "reference")

    # with data.index newest the run switches to the current index and stays with it
    pinned = fingerprint_of(tmp_path / "run")["streams"][0]
    more = train_fields(root, tmp_path / "run", max_steps=STEPS + 12)
    assert "recalled" not in train(tmp_path, more, "--data.index", "newest")
    taken_up = fingerprint_of(tmp_path / "run")["streams"][0]
    assert (pinned["samples"], taken_up["samples"]) == (65, 93)
    keys = {key for batch in curve(tmp_path / "run")[1][STEPS:] for key in batch}
    assert {key[:5] for key in keys} == {"00000", "00001", "00002", "00003", "00005"}
    newer = make_root(tmp_path / "more" / "root", {"64x64": [*PARTS, 40]})
    (part,) = newer.glob("64x64/00006.*")
    shutil.copytree(part, root / "64x64" / part.name)
    shutil.copyfile(newer / "commits/64x64/00006.json", root / "commits/64x64/00006.json")
    Publisher(store).publish()
    train(tmp_path, train_fields(root, tmp_path / "run", max_steps=STEPS + 14))
    assert fingerprint_of(tmp_path / "run")["streams"][0] == taken_up


def test_a_resumed_run_validates_on_the_samples_that_it_began_with(tmp_path: Path) -> None:
    """A tar that sorts earlier and a new exclusion change nothing unless the run switches to the newest index."""
    data = make_root(tmp_path / "data", {"64x64": PARTS})
    held_out = make_root(tmp_path / "held-out" / "root", {"64x64": [9, 9]})
    set_aside(held_out, ["00000"])
    write_indexes(LocalStore(held_out))
    validation = {"root": str(held_out), "bucket": "64x64", "samples": 8, "batch_size": 4, "every": 2}
    fields = train_fields(data, tmp_path / "run", validation=validation, optimizer={"lr": 1e-12})

    def val_losses() -> list[float]:
        return [row["val_loss"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "val_loss" in row]

    def pin() -> dict[str, Any]:
        return fingerprint_of(tmp_path / "run")["validation"]

    train(tmp_path, fields | {"max_steps": 2})
    began = pin()
    put_back(held_out, ["00000"])
    add_exclusion(LocalStore(held_out), make_exclusion("key", ["000010000"]))
    write_indexes(LocalStore(held_out))
    train(tmp_path, fields | {"max_steps": 4})
    first, second = val_losses()
    assert pin() == began and first == pytest.approx(second, rel=1e-6)

    train(tmp_path, fields | {"max_steps": 6}, "--data.index", "newest")
    assert pin()["index_sha256"] != began["index_sha256"] and len(pin()["exclusions"]) == 1
    assert val_losses()[2] != pytest.approx(first, rel=1e-4)


def test_validation_can_be_added_or_removed_during_a_run() -> None:
    saved: dict[str, Any] = {"seed": 0, "unet": {}, "streams": []}
    check_resume(Path("step"), saved, saved | {"validation": {"bucket": "64x64"}})
    check_resume(Path("step"), saved | {"validation": {"bucket": "64x64"}}, saved)


def test_a_changed_filter_is_refused_even_with_a_newer_index() -> None:
    """A newer index may change the number of samples, but a filter that changes it is a different setting."""
    stream = {"bucket": "64x64", "samples": 30, "filter": None}
    saved = {"seed": 0, "unet": {}, "streams": [stream]}
    grown = {"seed": 0, "unet": {}, "streams": [stream | {"samples": 40}]}
    less = stream | {"samples": 20, "filter": {"aesthetic": {"min": 5.0}}}
    filtered = {"seed": 0, "unet": {"later": None}, "streams": [less]}
    check_resume(Path("step"), saved, grown, allow_newer_index=True)
    with pytest.raises(RequestError, match=r"streams.filter: None ≠ .*'min': 5"):
        check_resume(Path("step"), saved, filtered, allow_newer_index=True)
