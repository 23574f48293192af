"""Feature extraction from images that crash their decoder, and the number of requests for receipts."""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from cluster.fleet import FleetConfig
from evaluation.features.extractors import ExtractorsConfig
from evaluation.features.job import extract
from evaluation.features.sources import InputRecord, ReferenceConfig, ReferenceUnit, reference_units
from evaluation.units import run_on_worker, run_units
from precompute.input.find import find_input
from precompute.pixels.decode import LimitsConfig
from shards.base.errors import Stuck
from shards.base.remote import RemoteStore
from tests.evaluation.sets import run_here
from tests.faults.decoders import poisoned
from tests.ranks import SERVER
from tests.tiny import make_samples, make_tar

TOY = ExtractorsConfig(toy=True, batch_size=4)
WORKERS = FleetConfig(num_gpus=0, num_cpus=1, backoff=0)
CONFIG = ReferenceConfig(size="64x64")
IMPATIENT = ReferenceConfig(size="64x64", limits=LimitsConfig(decode_seconds=1))
VALID = [members["jpg"] for _, members in make_samples(0, 6, [(80, 64)])]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.features.job.run_units", run_here)


def files_unit(folder: Path, pictures: Sequence[bytes], config: ReferenceConfig = CONFIG) -> ReferenceUnit:
    folder.mkdir()
    for number, data in enumerate(pictures):
        (folder / f"{number:05d}.jpg").write_bytes(data)
    (unit,) = find_input(str(folder)).units()
    return ReferenceUnit(folder.name, unit, config, poisoned)


def tar_unit(folder: Path, pictures: Sequence[bytes]) -> ReferenceUnit:
    samples = [(f"{key:09d}", {"jpg": data, "txt": b"x", "json": b"{}"}) for key, data in enumerate(pictures)]
    make_tar(folder, "00000", samples)
    (tar,) = find_input(str(folder)).units()
    return ReferenceUnit(tar.name, tar, CONFIG, poisoned)


def ignore(count: int) -> None:
    """Ignore a report of progress."""


def test_only_pictures_that_kill_their_worker_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt is lost with its worker; the second one rejects the image and keeps the others."""

    def twice(units: Sequence[tuple[str, Any]], function: Callable[..., Any], workers: FleetConfig, what: str) -> None:
        for _, unit in units:
            worker = SERVER.Process(target=run_on_worker, args=(function, workers, unit, 1, ignore))
            worker.start()
            worker.join(60)
            assert worker.exitcode == -signal.SIGKILL
        run_here(units, function, attempt=2)

    monkeypatch.setattr("precompute.pixels.isolation.TRIES", 1)  # each starts an interpreter
    valid = extract([tar_unit(tmp_path / "valid", VALID)], "toy", TOY, tmp_path / "one", WORKERS)
    monkeypatch.setattr("evaluation.features.job.run_units", twice)
    unit = tar_unit(tmp_path / "killed", [*VALID[:3], b"<html>", *VALID[3:], b"KILLED"])
    found = extract([unit], "toy", TOY, tmp_path / "two", WORKERS)
    assert found.rejected == {"decoder_crash": 1, "not_an_image": 1} and valid.rejected == {}
    assert len(found.values) == len(VALID) and np.array_equal(found.values, valid.values)


@pytest.mark.slow
def test_pictures_that_kill_their_worker_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.features.job.run_units", run_units)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", partial(ray.init, num_cpus=1))
    killed, loop = ([*VALID[:2], poison, *VALID[2:]] for poison in (b"KILLED", b"LOOP"))
    units = [files_unit(tmp_path / "killed", killed), files_unit(tmp_path / "loop", loop, IMPATIENT)]
    try:
        found = extract(units, "toy", TOY, tmp_path / "place", WORKERS)
    finally:
        ray.shutdown()
    assert found.rejected == {"decoder_crash": 2} and len(found.values) == 2 * len(VALID)


def test_relative_and_absolute_paths_name_the_same_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ReferenceConfig(pictures="tars") == ReferenceConfig(pictures=str(tmp_path / "tars"))
    assert ReferenceConfig(pictures="../tars") == ReferenceConfig(pictures=str(tmp_path.parent / "tars"))
    assert ReferenceConfig(pictures="s3://bucket/tars").pictures == "s3://bucket/tars"


def test_decoding_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.features.sources.CLOCK_PER_PROCESSOR_SECOND", 0.2)
    with pytest.raises(Stuck, match=r"a call timed out after 0\.2 s"):
        list(files_unit(tmp_path / "files", [b"NAP"], IMPATIENT).pictures(InputRecord()))


def test_each_receipt_is_read_once_in_a_single_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This matters on an object store, where each read takes a round trip."""
    files_unit(tmp_path / "files", VALID)
    monkeypatch.setattr("precompute.input.numbering.UNIT_SAMPLES", 2)
    units, _ = reference_units(ReferenceConfig(pictures=str(tmp_path / "files"), size="64x64"))
    assert [unit.name for unit in units] == ["00000", "00001", "00002"]
    place = f"memory://{tmp_path.name}/reference"
    first = extract(units, "toy", TOY, place, WORKERS)

    singly: list[str] = []
    batches: list[list[str]] = []
    read, read_many = RemoteStore.read, RemoteStore.read_many

    def counted(store: RemoteStore, name: str) -> bytes:
        singly.append(os.path.basename(name))
        return read(store, name)

    def counted_many(store: RemoteStore, names: list[str]) -> dict[str, bytes]:
        if receipts := [os.path.basename(name) for name in names if name.startswith("receipts/")]:
            batches.append(receipts)
        return read_many(store, names)

    monkeypatch.setattr(RemoteStore, "read", counted)
    monkeypatch.setattr(RemoteStore, "read_many", counted_many)
    again = extract(units, "toy", TOY, place, WORKERS)
    assert (singly, batches) == ([], [["00000.json", "00001.json", "00002.json"]])
    assert np.array_equal(again.values, first.values) and again.inputs == first.inputs

    store = RemoteStore(place)
    (receipt,) = (name for name in store.files("receipts") if name.endswith("00001.json"))
    store.remove([f"receipts/{receipt}"])
    batches.clear()
    again = extract(units, "toy", TOY, place, WORKERS)
    assert batches == [["00000.json", "00001.json", "00002.json"], ["00001.json"]]
    assert set(singly) == {"00001.json"}  # read by the worker that commits the part
    assert np.array_equal(again.values, first.values) and list(again.inputs) == list(first.inputs)
    store.remove(store.files())
