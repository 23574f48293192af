"""Memory of prefetched batches: the estimate is exact, and the bound holds."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kit.roots import feature_tower, make_root
from tests.runs import wait_until
from train.data.batch import Batch, Collate
from train.data.loader import MAX_PREFETCH, Loader, plan_prefetch
from train.data.spec import DataConfig
from train.data.streams import open_data

BUCKET, SAMPLES, BATCH = "64x64", 64, 8
DINO = feature_tower(12, "float8")


def batch_bytes(batch: Batch) -> int:
    return sum(tensor.nbytes for name, tensor in batch.columns.items() if not name.startswith("num_tokens"))


def config(root: Path, **changes: Any) -> DataConfig:
    streams = [{"root": root, "bucket": BUCKET}]
    return DataConfig.model_validate({"streams": streams, "num_canonical_nodes": 1, **changes})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("root"), {BUCKET: [SAMPLES]}, (16, 12), features={"dino": DINO})


@pytest.mark.parametrize("num_workers", [1, 2, 8, 64])
def test_the_plan_fits_the_bound_and_uses_it(num_workers: int) -> None:
    for batches in range(1, 400):
        workers, factor = plan_prefetch(1, config(Path(), prefetch_gb=(batches + 0.5) / 1e9, num_workers=num_workers))
        assert 1 <= workers <= num_workers and 1 <= factor <= MAX_PREFETCH
        held = workers * factor + workers + 2
        assert held <= max(4, batches)
        assert workers == num_workers or held + 2 > batches
        assert factor == MAX_PREFETCH or workers < num_workers or held + workers > batches
    assert plan_prefetch(1, config(Path(), num_workers=0)) == (0, 0)


def test_the_estimate_equals_the_size_of_a_batch(root: Path) -> None:
    alone = config(root, num_workers=0)
    spec = open_data(alone, BATCH)
    loader = Loader(alone, spec, BATCH, 0, 0, torch.arange(BATCH))
    batch = next(iter(loader))
    assert loader.num_first == 1
    assert spec.sample_bytes(BUCKET) * BATCH == batch_bytes(batch)


@pytest.mark.parametrize(("room", "workers"), [(4, 1), (6, 2), (9, 3)])
def test_workers_prefetch_no_more_than_planned(
    root: Path, tmp_path: Path, room: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every collated batch is logged with its size. The consumer takes five batches, then stops."""
    made, stack = tmp_path / "made", Collate.__call__

    def logged(self: Collate, samples: list[dict[str, Any]]) -> Batch:
        batch = stack(self, samples)
        with made.open("a") as file:
            file.write(f"{batch_bytes(batch)}\n")
        return batch

    monkeypatch.setattr(Collate, "__call__", logged)
    spec = open_data(config(root), BATCH)
    bound = (room + 0.5) * spec.sample_bytes(BUCKET) * BATCH
    loader = Loader(config(root, prefetch_gb=bound / 1e9), spec, BATCH, 0, 0, torch.arange(BATCH))
    assert loader.num_workers == loader.num_first == workers
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    ahead = room - 2 - workers
    wait_until(lambda: len(made.read_text().splitlines()) >= 5 + workers * (ahead // workers))
    time.sleep(0.3)  # time for one batch too many
    sizes = list(map(int, made.read_text().splitlines()))
    batches.close()
    held = sum(sizes[5:]) + sizes[4] * (workers + 2)  # prefetched, being collated, in use, being pinned
    assert held <= bound and len(sizes) == 5 + workers * (ahead // workers)


@pytest.mark.parametrize(("device", "is_pinned"), [("cpu", False), ("cuda:0", True)])
def test_batches_are_pinned_only_for_the_device_of_the_run(
    root: Path, device: str, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on the CPU of a machine with a GPU does not pin memory, which would take GPU memory."""
    pinned: list[Batch] = []

    def pin_memory(batch: Batch) -> Batch:
        pinned.append(batch)
        return batch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Batch, "pin_memory", pin_memory)
    alone = config(root, num_workers=0)
    next(iter(Loader(alone, open_data(alone, BATCH), BATCH, 0, 0, torch.arange(BATCH), device)))
    assert bool(pinned) == is_pinned
