"""Remote, cached, damaged, missing or slow files: samples are correct, or an error names the file."""

import hashlib
import multiprocessing
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from bench.kit.roots import make_root
from shards.base.errors import RequestError, WorkError
from tests import ranks
from tests.forks import fork, wait_for
from tests.roots import part_of
from tests.tiny import flip_a_bit
from tests.train.global_batches import keys_per_step
from train.config import DataConfig
from train.data import loader
from train.data.cache import DATABASE, Cache
from train.data.files import SampleReader
from train.data.loader import Loader, make_files
from train.data.streams import find_data, open_data

pytestmark = pytest.mark.heavy

PARTS = [13, 29, 17, 23, 19, 11]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry downloads at once."""
    monkeypatch.setattr("train.data.files.DOWNLOAD_PAUSES", (0.01, 0.01))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with 64x64 in six files, and three aspect buckets of odd sizes."""
    buckets = {"64x64": PARTS, "128x64": [7, 12, 9], "64x192": [15, 1, 6], "192x128": [5, 14]}
    return make_root(tmp_path_factory.mktemp("plain") / "root", buckets)


def one_of(root: Path) -> Path:
    """An MDS file."""
    return part_of(root, "64x64", "00001") / "shard.00000.mds"


def data_config(root: Path | str, **fields: Any) -> DataConfig:
    streams = fields.pop("streams", [{"root": str(root), "bucket": "64x64"}])
    common = {"num_workers": 0, "num_canonical_nodes": 4, "shuffle_block": 16, "timeout": 60}
    return DataConfig.model_validate({"streams": streams, **common, **fields})


def steps(config: DataConfig, count: int = 30) -> list[list[str]]:
    return keys_per_step(config, open_data(config, 8), 0, count)


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def copies(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.mds"), key=lambda path: path.parts[-2:])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_returns_the_samples_of_the_root(root: Path, tmp_path: Path, num_workers: int) -> None:
    before, expected = hashes(root), steps(data_config(root))
    config = data_config(root, cache=str(tmp_path / "cache"), num_workers=num_workers)
    assert steps(config) == expected
    assert len(copies(tmp_path / "cache")) == len(PARTS) and hashes(root) == before
    # a second run uses the copies, so the originals may be unavailable
    spec = open_data(config, 8)
    shutil.move(root, root.with_name("away"))
    try:
        assert keys_per_step(config, spec, 0, 30) == expected
    finally:
        shutil.move(root.with_name("away"), root)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_keeps_to_its_limit_and_never_changes_an_original(root: Path, tmp_path: Path, num_workers: int) -> None:
    before, expected = hashes(root), steps(data_config(root))
    largest = max(path.stat().st_size for path in root.glob("64x64/*/*.mds"))
    limit = 5 * largest // 2
    config = data_config(root, cache=str(tmp_path / "cache"), cache_limit=limit, num_workers=num_workers)
    spec, cache, most = open_data(config, 8), Cache(tmp_path / "cache", limit), 0
    batches = iter(Loader(config, spec, 8, 3, 0, torch.arange(8)))
    for keys in expected:
        batch = next(batches)
        assert batch.keys == keys
        with cache._database():  # otherwise workers would add and evict copies while they are listed
            most = max(most, sum(path.stat().st_size for path in copies(cache.folder)))
    batches.close()
    assert 0 < most <= limit and hashes(root) == before


def test_a_damaged_copy_is_downloaded_again(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = data_config(root, cache=str(tmp_path / "cache"))
    expected = steps(config)
    for damage in (flip_a_bit, cut_short):
        damage(copies(tmp_path / "cache")[1])
        assert steps(config) == expected
        assert "This file is only a cached copy, so it will be downloaded again" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in copies(tmp_path / "cache")[1:2]} == {
        "shard.00000.mds": (one_of(root)).read_bytes()
    }


def test_a_damaged_copy_that_another_process_has_replaced_is_kept(root: Path, tmp_path: Path) -> None:
    config = data_config(root, cache=str(tmp_path / "cache"))
    steps(config)
    (copy,) = [path for path in copies(tmp_path / "cache") if path.parent.name.startswith("00001")]
    flip_a_bit(copy)
    first, second = (make_files(config, open_data(config, 8)).buckets[0] for _ in range(2))
    check, checked = second.check, []

    def check_then_let_the_other_replace_it(file: int, path: str) -> None:
        checked.append(path)
        try:
            check(file, path)
        finally:
            if len(checked) == 1:
                first.make_ready(1)

    second.check = check_then_let_the_other_replace_it  # type: ignore[method-assign]
    downloaded: list[int] = []
    download = second._download
    second._download = lambda file, target: downloaded.append(file) or download(file, target)  # type: ignore[method-assign, func-returns-value]
    second.make_ready(1)
    assert len(checked) == 2 and not downloaded and copy.read_bytes() == (one_of(root)).read_bytes()


def test_a_copy_that_is_being_verified_is_not_evicted(tmp_path: Path) -> None:
    """Otherwise the process that holds its lock would write into another process's download."""
    cache, other = (Cache(tmp_path / "cache", 19) for _ in range(2))
    room = []

    def download(target: Path) -> None:
        target.write_bytes(bytes(10))

    def sound(copy: Path) -> bool:
        room.append(other._reserve("b", 10))
        return True

    cache.add("a", 10, download)
    cache.add("a", 10, lambda target: pytest.fail(str(target)), sound)
    assert room == [False] and {path.name for path in cache.folder.iterdir()} == {DATABASE, "a"}
    assert other._reserve("b", 10) and not cache.path("a").exists()


def test_the_copy_that_has_not_been_used_for_longest_is_evicted(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "cache", 20)
    for name in "abc":
        cache.add(name, 10, lambda target: target.touch())
        assert Cache(cache.folder, 20).touch("a", 10)
    assert [cache.path(name).exists() for name in "abc"] == [True, False, True] and cache.usage() == 20


def test_a_reader_verifies_files_that_were_not_prefetched_and_closes_them(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "root")
    config = data_config(copy)
    reader = make_files(config, open_data(config, 8))
    keys = [reader.sample(0, row)["key"] for row in range(3)]
    num_open = len(os.listdir("/proc/self/fd"))
    assert [reader.sample(0, row)["key"] for row in range(3)] == keys
    assert len(os.listdir("/proc/self/fd")) == num_open
    flip_a_bit(one_of(copy))
    for _ in range(2):
        with pytest.raises(WorkError, match=r"00001\.\w+/shard\.00000\.mds is damaged"):
            reader.sample(1, 0)


def test_a_copy_that_was_evicted_before_it_is_opened_is_downloaded_again(root: Path, tmp_path: Path) -> None:
    config = data_config(root, cache=str(tmp_path / "cache"))
    (bucket,) = make_files(config, open_data(config, 8)).buckets
    bucket.make_ready(1)
    copies(tmp_path / "cache")[0].unlink()
    descriptor = bucket.open(1)
    assert descriptor is not None and os.pread(descriptor, 1 << 20, 0) == one_of(root).read_bytes()
    os.close(descriptor)


@pytest.mark.parametrize("failures", [2, 3])
def test_downloads_are_retried(root: Path, tmp_path: Path, failures: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first and the third attempt fail, and the second is corrupt."""
    config = data_config(root, cache=str(tmp_path / "cache"))
    (bucket,) = make_files(config, open_data(config, 8)).buckets
    get, asked = bucket.store.get, []

    def stumble(name: str, target: Path) -> None:
        asked.append(name)
        get(name, target)
        if len(asked) == 2:
            flip_a_bit(target)
        elif len(asked) <= failures:
            raise (ConnectionResetError if len(asked) == 1 else WorkError)("connection reset by peer")

    bucket.store.get = stumble  # type: ignore[method-assign]
    if failures == 3:
        with pytest.raises(WorkError, match=r"connection reset by peer"):
            bucket.make_ready(1)
        assert bucket.cache is not None and bucket.cache.usage() == 0
        assert not [path for path in (tmp_path / "cache").rglob("*.mds*") if path.is_file()]
    else:
        bucket.make_ready(1)
        assert copies(tmp_path / "cache")[0].read_bytes() == (one_of(root)).read_bytes()
    assert len(asked) == 3 and "connection reset by peer. Retrying in" in capsys.readouterr().out


def test_several_files_are_downloaded_at_once(root: Path, tmp_path: Path) -> None:
    """Each of the first two downloads waits until the other has started."""
    config = data_config(root, cache=str(tmp_path / "cache"))
    loader = Loader(config, open_data(config, 8), 8, 3, 0, torch.arange(8))
    (bucket,) = loader.batches.files.buckets
    get, both, asked = bucket.store.get, threading.Barrier(2, timeout=60), []

    def wait_for_the_other(name: str, target: Path) -> None:
        asked.append(name)
        if len(asked) <= 2:
            both.wait()
        get(name, target)

    bucket.store.get = wait_for_the_other  # type: ignore[method-assign]
    batches = iter(loader)
    next(batches)
    batches.close()
    assert len(set(asked)) == len(asked) >= 2


DAMAGES = [
    (flip_a_bit, r"64x64/00001\.\w+/shard\.00000\.mds is damaged: its xxh3_64 does not match its index"),
    (cut_short, r"64x64/00001\.\w+/shard\.00000\.mds is \d+ bytes long, but its index lists \d+ bytes"),
    (empty, r"64x64/00001\.\w+/shard\.00000\.mds is 0 bytes long, but its index lists \d+ bytes"),
    (Path.unlink, r"64x64/00001\.\w+/shard\.00000\.mds is missing, but its index lists \d+ bytes"),
]


@pytest.mark.parametrize(
    ("damage", "message", "num_workers", "cached"),
    [
        *((*damage, 0, cached) for damage in DAMAGES for cached in (False, True)),
        (*DAMAGES[0], 2, False),  # workers pass on every error alike
    ],
)
def test_a_file_that_differs_from_its_index_stops_the_run(
    root: Path, tmp_path: Path, damage: Callable[[Path], None], message: str, num_workers: int, cached: bool
) -> None:
    """The error comes at once and names the file, and the damaged copy is not used the next time."""
    copy = shutil.copytree(root, tmp_path / "root")
    cache = {"cache": str(tmp_path / "cache")} if cached else {}
    config = data_config(copy, num_workers=num_workers, **cache)
    spec = open_data(config, 8)
    damage(one_of(copy))
    with pytest.raises(WorkError, match=message):  # rather than the message of a timeout
        keys_per_step(config, spec, 0, 30)
    assert not any(path.parent.name.startswith("00001") for path in copies(tmp_path / "cache"))
    shutil.copyfile(one_of(root), one_of(copy))
    assert keys_per_step(config, spec, 0, 30) == steps(data_config(root))


def test_a_remote_root_needs_a_cache(root: Path, tmp_path: Path) -> None:
    """The root is in fsspec's memory file system."""
    files = fsspec.filesystem("memory")
    files.put(str(root), "/mill", recursive=True)
    try:
        with pytest.raises(
            RequestError, match=r"memory://mill is remote, so data\.cache must be set to a local folder for copies"
        ):
            open_data(data_config("memory://mill"), 8)
        config = data_config("memory://mill", cache=str(tmp_path / "cache"))
        assert steps(config) == steps(data_config(root))
        spec = open_data(config, 8)
        shutil.rmtree(tmp_path / "cache")
        files.pipe_file(f"/mill/{one_of(root).relative_to(root)}", bytes(100))
        with pytest.raises(WorkError, match=r"memory://mill/64x64/00001\.\w+/shard\.00000\.mds is 100 bytes long, but"):
            keys_per_step(config, spec, 0, 30)
    finally:
        files.rm("/mill", recursive=True)


@pytest.mark.parametrize("place", ["", "64x64", ".."])
def test_a_cache_must_not_overlap_with_a_root(root: Path, place: str) -> None:
    with pytest.raises(RequestError, match="overlaps with the latents root"):
        open_data(data_config(root, cache=str(root / place)), 8)


def test_unknown_towers_and_missing_pinned_indexes_are_refused(root: Path) -> None:
    with pytest.raises(RequestError, match=r"data\.towers names texts\.t5, but the latents root"):
        open_data(data_config(root, towers=["texts.t5"]), 8)
    with pytest.raises(RequestError):
        find_data(data_config(root), [{"bucket": "64x64", "index_sha256": "0" * 64}])


def test_wrong_caches_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    with pytest.raises(RequestError, match=r"photos contains files, but is not a latentmill cache"):
        open_data(data_config(root, cache=str(tmp_path / "photos")), 8)
    with pytest.raises(RequestError, match=r"data\.cache_limit 1000 is too small for two files"):
        open_data(data_config(root, cache=str(tmp_path / "cache"), cache_limit=1000), 8)
    with pytest.raises(RequestError, match=r"data\.cache \S+cat\.jpg is a file"):
        open_data(data_config(root, cache=str(tmp_path / "photos" / "cat.jpg")), 8)
    limit = 2 * max(path.stat().st_size for path in root.glob("64x64/*/*.mds"))
    with pytest.raises(RequestError, match=rf"at least {limit}\."):
        open_data(data_config(root, cache=str(tmp_path / "cache"), cache_limit=limit - 1), 8)
    open_data(data_config(root, cache=str(tmp_path / "cache"), cache_limit=limit), 8)
    assert not copies(tmp_path / "cache")
    # an existing cache is refused as well
    with pytest.raises(RequestError, match=r"is too small for two files"):
        open_data(data_config(root, cache=str(tmp_path / "cache"), cache_limit=1000), 8)


def test_a_damaged_database_and_a_file_above_the_limit_are_reported(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 10)

    def download(target: Path) -> None:
        target.write_bytes(bytes(10))

    cache.add("a", 10, download)
    with pytest.raises(WorkError, match=r"b is 11 bytes, which exceeds data\.cache_limit \(10\)"):
        cache.add("b", 11, download)
    assert cache.usage() == 10
    (cache.folder / DATABASE).write_bytes(b"not a database" * 100)
    with pytest.raises(WorkError, match=r"cannot be used: file is not a database\. Remove the folder .*cache"):
        cache.usage()


def test_leftovers_of_a_killed_process_count_until_they_are_evicted(root: Path, tmp_path: Path) -> None:
    """SIGKILL during a download leaves a database row without its file, and a partial file."""
    limit = 3 * max(path.stat().st_size for path in root.glob("64x64/*/*.mds"))
    config = data_config(root, cache=str(tmp_path / "cache"), cache_limit=limit)
    (bucket,) = make_files(config, open_data(config, 8)).buckets
    assert bucket.cache is not None

    def killed(target: Path) -> None:
        target.write_bytes(b"half")
        os._exit(9)

    cache = bucket.cache
    assert wait_for(fork(lambda: cache.add("gone/shard.00000.mds", limit - 1, killed))) == 9
    assert bucket.cache.usage() == limit - 1
    assert steps(config) == steps(data_config(root))
    assert bucket.cache.usage() <= limit and not list((tmp_path / "cache").rglob("*.partial"))


def stall(arguments: list[str]) -> None:
    """Load batches of a config, and stall with the first batch or with a later one."""
    print("said before the stall")
    sample, is_stalled = SampleReader.sample, arguments[1] == "first"

    def stalling(self: SampleReader, file: int, row: int) -> dict[str, Any]:
        if is_stalled:
            time.sleep(3600)
        return sample(self, file, row)

    SampleReader.sample = stalling  # type: ignore[method-assign]
    config = DataConfig.model_validate_json(arguments[0])
    batches = iter(Loader(config, open_data(config, 8), 8, 0, 0, torch.arange(8)))
    if arguments[1] == "hung":
        loader.DIAGNOSIS_SECONDS = 0.1
        os.stat = lambda *_: time.sleep(3600)  # type: ignore[assignment]
        is_stalled = True
    if not is_stalled:
        next(batches)
        time.sleep(2 * config.timeout)  # a slow training step is not a stall
        next(batches)
        is_stalled = True
    next(batches)


@pytest.mark.parametrize(("num_workers", "which"), [(0, "first"), (0, "later"), (1, "hung")])
def test_a_stalled_loader_ends_the_run_in_time(root: Path, num_workers: int, which: str) -> None:
    seconds = (600.0, 2.0) if which == "later" else (2.0, 600.0)
    config = data_config(root, num_workers=num_workers, first_timeout=seconds[0], timeout=seconds[1])
    program = "tests.train.data.test_files:stall"
    code, output, error = ranks.run_command(program, [config.model_dump_json(), which], seconds=60)
    text = " ".join(error.split())
    cause = "The storage does not respond" if which == "hung" else "so the storage may have stalled"
    assert code == 1 and "No batch arrived within 2 s." in text and cause in text
    assert "\x1b" not in error and "said before the stall" in output


def test_a_killed_worker_is_not_blamed_on_the_storage(root: Path) -> None:
    config = data_config(root, num_workers=1)
    batches = iter(Loader(config, open_data(config, 8), 8, 3, 0, torch.arange(8)))
    next(batches)
    (worker,) = (child for child in multiprocessing.active_children() if child.name == "loader worker 0")
    worker.kill()
    with pytest.raises(
        WorkError, match=r"after step \d+: A loader worker was killed by SIGKILL\. .* data\.prefetch_gb\.$"
    ):
        for _ in range(10):
            next(batches)


def test_an_epoch_reads_each_aspect_bucket_according_to_its_weight(root: Path) -> None:
    weights = {"128x64": 1.7, "64x192": 1.0, "192x128": 2.5}
    streams = [{"root": str(root), "bucket": name, "weight": weight} for name, weight in weights.items()]
    config = data_config(root, streams=streams)
    batches = iter(Loader(config, open_data(config, 8), 8, 3, 0, torch.arange(8)))
    shapes = [tuple(next(batches).columns["image_latents"].shape[2:]) for _ in range(12)]
    batches.close()
    # 28, 22 and 19 samples
    assert Counter(shapes) == {(8, 16): 28 * 1.7 // 8, (24, 8): 22 // 8, (16, 24): 19 * 2.5 // 8}
