"""Feature extraction from images that crash their decoder, and the number of requests for receipts."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from cluster.fleet import FleetConfig
from evaluation.features.extractors import ExtractorsConfig
from evaluation.features.job import extract
from evaluation.features.sources import FilesUnit, InputRecord, ReferenceConfig, TarUnit, reference_units
from precompute.encode.overlap import Stuck
from precompute.input.tars import list_tars
from precompute.pixels.decode import LimitsConfig
from shards.base.remote import RemoteStore
from tests.faults.decoders import poisoned
from tests.tiny import make_samples, make_tar

TOY = ExtractorsConfig(toy=True, batch_size=4)
WORKERS = FleetConfig(num_gpus=0, num_cpus=1, backoff=0)
CONFIG = ReferenceConfig(size="64x64")
IMPATIENT = ReferenceConfig(size="64x64", limits=LimitsConfig(decode_seconds=1))
VALID = [members["jpg"] for _, members in make_samples(0, 6, [(80, 64)])]


def in_this_process(monkeypatch: pytest.MonkeyPatch, attempt: int) -> None:
    """Run the given attempt at each unit in this process instead of on Ray."""

    def here(units: Sequence[tuple[str, Any]], function: Callable[..., Any], *rest: object) -> None:
        for _, unit in units:
            function(unit, attempt, lambda count: None)

    monkeypatch.setattr("evaluation.features.job.run_units", here)


def files_unit(folder: Path, pictures: Sequence[bytes], config: ReferenceConfig = CONFIG) -> FilesUnit:
    folder.mkdir()
    paths = tuple(folder / f"{number:05d}.jpg" for number in range(len(pictures)))
    for path, data in zip(paths, pictures, strict=True):
        path.write_bytes(data)
    return FilesUnit(folder.name, paths, config, poisoned)


def tar_unit(folder: Path, pictures: Sequence[bytes]) -> TarUnit:
    samples = [(f"{key:09d}", {"jpg": data, "txt": b"x", "json": b"{}"}) for key, data in enumerate(pictures)]
    make_tar(folder, "00000", samples)
    (tar,) = list_tars(str(folder))
    return TarUnit(tar.name, tar, CONFIG, poisoned)


@pytest.mark.parametrize("unit_of", [files_unit, tar_unit])
def test_the_second_attempt_rejects_pictures_that_crash_their_decoder_and_keeps_the_others(
    unit_of: Callable[[Path, Sequence[bytes]], FilesUnit | TarUnit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch, attempt=1)
    valid = extract([unit_of(tmp_path / "valid", VALID)], "toy", TOY, tmp_path / "one", WORKERS)
    in_this_process(monkeypatch, attempt=2)
    unit = unit_of(tmp_path / "poisoned", [*VALID[:3], b"ABORT", b"<html>", *VALID[3:], b"EXIT"])
    found = extract([unit], "toy", TOY, tmp_path / "two", WORKERS)
    assert found.rejected == {"decoder_crash": 2, "not_an_image": 1} and valid.rejected == {}
    assert len(found.values) == len(VALID) and np.array_equal(found.values, valid.values)


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", partial(ray.init, num_cpus=1))
    yield
    ray.shutdown()


def test_pictures_that_kill_their_worker_are_the_only_ones_lost(own_ray: None, tmp_path: Path) -> None:
    """On Ray, the first attempt at each part is lost with its worker, and the next one rejects the image."""
    killed, loop = ([*VALID[:2], poison, *VALID[2:]] for poison in (b"KILLED", b"LOOP"))
    units = [files_unit(tmp_path / "killed", killed), files_unit(tmp_path / "loop", loop, IMPATIENT)]
    found = extract(units, "toy", TOY, tmp_path / "place", WORKERS)
    assert found.rejected == {"decoder_crash": 2} and len(found.values) == 2 * len(VALID)


def test_decoding_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.features.sources.CLOCK_PER_PROCESSOR_SECOND", 0.2)
    with pytest.raises(Stuck, match=r"decoding an image took more than 0\.2 s"):
        list(files_unit(tmp_path / "files", [b"NAP"], IMPATIENT).pictures(InputRecord()))


def test_each_receipt_is_read_once_in_a_single_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This matters on an object store, where each read takes a round trip."""
    in_this_process(monkeypatch, attempt=1)
    monkeypatch.setattr("evaluation.features.sources.FILES_PER_UNIT", 2)
    files_unit(tmp_path / "files", VALID)
    units = reference_units(ReferenceConfig(pictures=str(tmp_path / "files"), size="64x64"))
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
