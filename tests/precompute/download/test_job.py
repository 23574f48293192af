"""Worker processes that fail or die, a full disk, and missing modules of img2dataset."""

import importlib.util
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from precompute.download.config import DownloadConfig
from precompute.download.fetch import require_img2dataset
from precompute.download.job import fetch_missing
from precompute.download.rows import PlannedTar
from shards.base.errors import RequestError, WorkError
from shards.base.pool import start_pool

pytestmark = pytest.mark.usefixtures("forked")


def config(folder: Path, **fields: Any) -> DownloadConfig:
    return DownloadConfig.model_validate({"input": folder, "output": folder} | fields)


# stand-in for fetch_tar, whose behaviour depends on the number of the tar
def pretend(config: DownloadConfig, shard: PlannedTar) -> dict[str, Any]:
    marker = config.output / f"tried-{shard.name}"
    is_first = not marker.exists()
    marker.write_text(f"{marker.read_text() if not is_first else ''}x")
    if shard.shard_id == 1 and is_first:
        raise WorkError("a hiccup")
    if shard.shard_id == 2:
        raise WorkError("broken for good")
    if shard.shard_id == 3 and is_first:
        os._exit(9)
    if shard.shard_id == 99:
        raise OSError(28, "No space left on device")
    return {"successes": 1, "count": 1, "duration": 1.0, "latentmill": {"tar_bytes": 5}}


def test_tars_are_retried_and_a_dead_worker_fails_only_a_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = config(tmp_path, processes=2, shard_attempts=3)
    shards = [PlannedTar(number, tmp_path / "in.parquet", 0, 1) for number in range(8)]
    assert fetch_missing(request, shards, pretend) == (7, {"00002": "broken for good"})
    tries = {path.name[6:]: len(path.read_text()) for path in tmp_path.glob("tried-*")}
    assert 2 <= tries["00002"] <= 3  # 2 if the worker of 00003 died before 00002 started in parallel
    assert tries["00001"] >= 2 and tries["00003"] >= 2
    assert "tar 00003 failed and will be retried: a worker process died" in capsys.readouterr().out


def test_a_worker_that_dies_between_two_tars_fails_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []

    def first_dead(*arguments: Any) -> ProcessPoolExecutor:
        pools.append(start_pool(*arguments))
        if len(pools) == 1:
            assert isinstance(pools[0].submit(os._exit, 9).exception(), BrokenProcessPool)
        return pools[-1]

    monkeypatch.setattr("shards.base.pool.start_pool", first_dead)
    shards = [PlannedTar(number, tmp_path / "in.parquet", 0, 1) for number in (4, 5)]
    assert fetch_missing(config(tmp_path, shard_attempts=1), shards, pretend) == (2, {})
    assert len(pools) == 2


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    shards = [PlannedTar(99, tmp_path / "in.parquet", 0, 1)]
    with pytest.raises(WorkError, match=r"No space is left in .* Published tars are kept. Free some space"):
        fetch_missing(config(tmp_path, processes=1), shards, pretend)


@pytest.mark.parametrize("name", ["img2dataset", "imghdr"])
def test_what_img2dataset_needs_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: None if wanted == name else find(wanted))
    with pytest.raises(RequestError, match=rf"The download needs {name}, which cannot be found.* its download extra"):
        require_img2dataset()
