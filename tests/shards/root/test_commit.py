"""The commit protocol, broken between each two of its steps: what is there afterwards, and that it heals."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shards.base.errors import WorkError
from shards.base.remote import RemoteStore
from shards.base.store import LocalStore, Store
from shards.format.receipts import Receipt, load_receipt, load_receipts
from shards.open import open_store
from shards.root.commit import attempt_folder, sweep_attempts
from shards.root.writing import PartWriter
from shards.tools.verify import verify_root
from tests.conftest import encode_all, precompute_config
from tests.roots import tree
from tests.tiny import make_samples, make_tar


class Killed(BaseException):
    """Stands for SIGKILL: nothing that handles errors handles it."""


def die_before(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Raise `Killed` before the `number`-th durable step of a commit: renames into place, and the receipt's replace."""
    steps = iter(range(1000))
    save = Receipt.save

    def counting(put: Callable[[Any, Path, str], None]) -> Callable[[Store, Path, str], None]:
        def counted_put(store: Store, source: Path, name: str) -> None:
            if next(steps) == number:
                raise Killed
            put(store, source, name)

        return counted_put

    def counted_save(receipt: Receipt, root: Store) -> None:
        if next(steps) == number:
            raise Killed
        save(receipt, root)

    for kind in (LocalStore, RemoteStore):
        monkeypatch.setattr(kind, "put", counting(kind.put))
    monkeypatch.setattr(Receipt, "save", counted_save)


@pytest.fixture(params=["folder", "address"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """An empty latents root of either kind."""
    if request.param == "folder":
        yield tmp_path / "root"
        return
    yield f"memory://{tmp_path.name}/root"
    open_store(f"memory://{tmp_path.name}").fs.rm(f"/{tmp_path.name}", recursive=True)  # type: ignore[attr-defined]


def contents(root: Path | str) -> dict[str, bytes]:
    """Every file of a root but its locks."""
    store = open_store(root)
    return {name: store.read(name) for name in store.files() if not name.startswith(".")}


@pytest.mark.parametrize("number", range(4))  # two parts, the rejects, the receipt
def test_a_kill_between_two_steps_leaves_nothing_that_anybody_reads(
    latents: Path, models: Path, tars: Path, root: Path | str, number: int
) -> None:
    config = precompute_config(models, tars, root)
    with pytest.MonkeyPatch.context() as patch:
        die_before(patch, number)
        with pytest.raises(Killed):
            encode_all(config, models)
    assert load_receipts(open_store(config.output)) == []
    encode_all(config, models)
    assert list(verify_root(open_store(config.output))) == []
    one, two = contents(latents), contents(root)
    assert one.keys() == two.keys()
    assert {name for name in one if one[name] != two[name]} <= {name for name in one if name.startswith("commits/")}


@pytest.mark.parametrize("number", range(3))  # one part, the rejects, the receipt
def test_a_kill_while_a_bucket_is_added_leaves_the_committed_one_alone(
    latents: Path, models: Path, tars: Path, root: Path | str, number: int
) -> None:
    encode_all(precompute_config(models, tars, root, buckets=["128x128"]), models)
    parts = {name: data for name, data in contents(root).items() if name.startswith("128x128/0")}
    both = precompute_config(models, tars, root)
    with pytest.MonkeyPatch.context() as patch:
        die_before(patch, number)
        with pytest.raises(Killed):
            encode_all(both, models)
    assert {name: data for name, data in contents(root).items() if name.startswith("128x128/0")} == parts
    assert [list(receipt.parts) for receipt in load_receipts(open_store(root))] == [["128x128"]] * 2
    encode_all(both, models)
    assert list(verify_root(open_store(root))) == []
    for one, two in zip(load_receipts(open_store(latents)), load_receipts(open_store(root)), strict=True):
        timed = {"started", "seconds", "attempts"}
        assert one.model_dump(exclude=timed) == two.model_dump(exclude=timed)


def test_the_later_of_two_attempts_throws_its_work_away(models: Path, tars: Path, tmp_path: Path) -> None:
    """Another job commits one of two buckets while this one is at work: its part stays as it is, byte for byte."""
    root = tmp_path / "root"
    encode_all(precompute_config(models, tars, root, buckets=["64x64"]), models)
    before = tree(root)
    inodes = {path: path.stat().st_ino for path in (root / "64x64").rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        # as a job that looked before the other one's commit
        patch.setattr("precompute.encode.tar.load_receipt", lambda root, shard: None)
        encode_all(precompute_config(models, tars, root), models)
    assert {path: path.stat().st_ino for path in inodes if path.name != "index.json"} == {
        path: inode for path, inode in inodes.items() if path.name != "index.json"
    }
    assert before.items() - tree(root).items() <= {
        item for item in before.items() if item[0].startswith(("commits/", "rej"))
    }
    assert list(verify_root(open_store(root))) == []


def test_another_tar_under_the_same_name_is_refused(models: Path, tmp_path: Path, root: Path | str) -> None:
    make_tar(tmp_path / "one", "00000", make_samples(0, 6, [(200, 150)]))
    make_tar(tmp_path / "two", "00000", make_samples(9, 6, [(200, 150)]))
    encode_all(precompute_config(models, tmp_path / "one", root, buckets=["64x64"]), models)
    with pytest.raises(WorkError, match=r"is not the tar from which shard 00000 was encoded for 64x64"):
        encode_all(precompute_config(models, tmp_path / "two", root), models)
    assert list(load_receipt(open_store(root), "00000").parts) == ["64x64"]  # type: ignore[union-attr]


def test_what_a_killed_attempt_left_is_swept_and_one_at_work_is_not(tmp_path: Path) -> None:
    abandoned = tmp_path / ".attempts" / "00000.dead"
    abandoned.mkdir(parents=True)
    (abandoned / "gigabytes").write_text("x")
    with (
        attempt_folder(open_store(tmp_path), "00000") as at_work,
        attempt_folder(open_store(tmp_path), "00000") as other,
    ):
        assert at_work.is_dir() and other.is_dir() and at_work != other
        assert not abandoned.exists()
    assert not list((tmp_path / ".attempts").iterdir())


def test_books_that_do_not_add_up_are_not_committed(models: Path, tars: Path, root: Path | str) -> None:
    """A writer that loses a sample: the receipt refuses to exist."""
    config = precompute_config(models, tars, root)
    with pytest.MonkeyPatch.context() as patch:
        finish = PartWriter.finish

        def lose_one(self: PartWriter) -> tuple[int, dict[str, int]]:
            samples, refused = finish(self)
            return samples - 1, refused

        patch.setattr(PartWriter, "finish", lose_one)
        with pytest.raises(ValueError, match=r"accounts for \d+ of 23 samples"):
            encode_all(config, models)
    assert load_receipts(open_store(root)) == [] and list(contents(root)) == ["encoding.json", "uncond.safetensors"]


def test_what_dead_attempts_left_is_swept_whatever_their_shard(tmp_path: Path) -> None:
    for name in ("00000.dead", "00001.dead", "a.b.dead"):
        (tmp_path / ".attempts" / name / "64x64").mkdir(parents=True)
    with attempt_folder(open_store(tmp_path), "00002") as alive:
        sweep_attempts(open_store(tmp_path))
        assert list((tmp_path / ".attempts").iterdir()) == [alive]
