"""Workers with half a GPU each, on a Ray node that claims one GPU. Ray only does bookkeeping, so none is needed."""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray

from cluster.fleet import Done, Fleet
from cluster.pool import Report
from cluster.start import start_ray
from precompute.config import describe_encoding, make_recipe
from precompute.encode.worker import encode_on_worker
from precompute.input.tars import InputTar, list_tars
from shards.open import open_store
from shards.root.index import write_indexes
from shards.root.provenance import source_sha256
from shards.root.shared import create_root, record_rules
from shards.tools.verify import verify_root
from tests.conftest import SIZES, encode_all, folder_of, precompute_config
from tests.roots import tree
from tests.tiny import make_samples, make_tar

pytestmark = pytest.mark.heavy

HALF = {"num_gpus": 0.5, "num_cpus": 1, "decode_threads": 1, "batch_size": 8, "tars_at_once": 1, "attempts": 1}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray on this machine with one GPU, and with CPUs for more workers than fit on that GPU."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", partial(ray.init, num_cpus=4, num_gpus=1))
    yield
    ray.shutdown()


def test_two_workers_are_on_one_gpu_at_once(one_gpu: None, models: Path, tmp_path: Path) -> None:
    """Each worker waits at its first tar for the other one. If they ran one after the other, the first would fail."""
    for shard in range(4):
        make_tar(tmp_path / "tars", f"{shard:05d}", make_samples(shard, 20, SIZES))
    config = precompute_config(models, tmp_path / "tars", tmp_path / "root", workers=HALF)
    store, encoding = open_store(config.output), describe_encoding(config)
    create_root(store, encoding)
    record_rules(store, config.to_fill.rules)
    # the device is a CPU, whatever Ray counts
    encode = partial(
        encode_on_worker,
        recipe=make_recipe(config, encoding),
        output=config.output,
        device="cpu",
        num_cpus=1,
        source=source_sha256(),
    )
    place = tmp_path / "workers"
    place.mkdir()

    def work(tar: InputTar, number: int, report: Report) -> tuple[int, list[int], int]:
        (place / str(os.getpid())).touch()
        end = time.monotonic() + 240
        while (there := len(list(place.iterdir()))) < 2:
            assert time.monotonic() < end, "the other worker did not come"
            time.sleep(0.05)
        encode(tar, number, report)
        return os.getpid(), ray.get_gpu_ids(), there

    start_ray(config.workers)
    fleet = Fleet(config.workers, work, ((tar.name, tar) for tar in list_tars(config.input)), at_once=1)
    done = [event for event in fleet if isinstance(event, Done)]
    assert sorted(event.key for event in done) == ["00000", "00001", "00002", "00003"]
    assert len({event.result[0] for event in done}) == 2, "a third worker was on the GPU, or there was one"
    assert {tuple(event.result[1]) for event in done} == {(0,)}
    assert {event.result[2] for event in done} == {2}

    write_indexes(store)
    assert list(verify_root(store)) == []
    alone = precompute_config(models, tmp_path / "tars", tmp_path / "alone")
    encode_all(alone, models)
    assert parts_of(folder_of(config)) == parts_of(folder_of(alone))


def parts_of(root: Path) -> dict[str, bytes]:
    """Return the files of all parts. Receipts and indexes differ, as they record who wrote them and when."""
    return {name: content for name, content in tree(root).items() if name.startswith(("64x64/", "128x128/"))}
