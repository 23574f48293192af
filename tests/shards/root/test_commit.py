"""The commit protocol, interrupted between any two steps: the remaining state, and recovery."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shards.base.errors import RequestError, WorkError
from shards.base.remote import RemoteStore
from shards.base.scratch import attempt_folder, sweep_attempts
from shards.base.store import LocalStore, Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import active_receipts
from shards.open import open_store
from shards.root.commit import content_hash, record_files, store_part
from shards.root.committed import list_commits, load_receipts
from shards.root.shared import create_root, record_rules
from shards.root.writing import PartWriter
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, precompute_config
from tests.forks import fork, wait_for
from tests.roots import load_tars, tree
from tests.tiny import make_samples, make_tar

pytestmark = pytest.mark.heavy

STEPS = {LocalStore: ("create", "move"), RemoteStore: ("create", "put")}
"""Calls that change a root of each kind."""
TIMED = {"started", "seconds", "attempts", "token"}


class Killed(BaseException):
    """Stand-in for SIGKILL, which no error handling catches."""


def die_before(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Raise `Killed` before the `number`-th step after the creation of the root."""
    steps = iter(range(1000))

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(store: Store, *arguments: Any) -> Any:
            first = arguments[0] if isinstance(arguments[0], str) else ""
            of_the_root = first.startswith((".unfinished", "rules", "encoding"))
            if not of_the_root and next(steps) == number:
                raise Killed
            return step(store, *arguments)

        return counted

    for kind, names in STEPS.items():
        for name in names:
            monkeypatch.setattr(kind, name, counting(getattr(kind, name)))


@pytest.fixture(params=["folder", "address"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """An empty latents root of either kind."""
    if request.param == "folder":
        yield tmp_path / "root"
        return
    yield f"memory://{tmp_path.name}/root"
    open_store(f"memory://{tmp_path.name}").fs.rm(f"/{tmp_path.name}", recursive=True)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def one_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tar with three intact samples for both buckets, and a bad one."""
    samples = [*make_samples(0, 3, [(200, 150)]), ("000009000", {"jpg": b"<html>", "txt": b"not a picture"})]
    return make_tar(tmp_path_factory.mktemp("one"), "00000", samples).parent


@pytest.fixture(scope="module")
def whole(models: Path, one_tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A latents root of that tar. Tests must not modify it."""
    root = tmp_path_factory.mktemp("whole") / "root"
    encode_all(precompute_config(models, one_tar, root))
    return root


@pytest.mark.parametrize(
    # uncond and the tar's record; for each bucket, the part and the receipt
    ("root", "number"),
    [*(("folder", number) for number in range(6)), ("address", 3)],
    indirect=["root"],
)
def test_a_kill_between_two_steps_leaves_nothing_that_anybody_reads(
    whole: Path, models: Path, one_tar: Path, root: Path | str, number: int
) -> None:
    config = precompute_config(models, one_tar, root)
    with pytest.MonkeyPatch.context() as patch:
        die_before(patch, number)
        with pytest.raises(Killed):
            encode_all(config)
    assert len(active_receipts(list_commits(open_store(root)))) == max(0, number - 2) // 2
    encode_all(config)
    assert list(verify_root(open_store(config.output))) == []
    one, two = tree(whole), tree(root)
    assert one.keys() == two.keys()
    different = {name.partition("/")[0] for name in one if one[name] != two[name] and not name.endswith("index.json")}
    assert different <= {"commits", "tars"}  # these record times and the tar's location


def test_a_kill_while_a_bucket_is_added_leaves_the_committed_one_alone(
    whole: Path, models: Path, one_tar: Path, root: Path | str
) -> None:
    encode_all(precompute_config(models, one_tar, root, buckets=["128x128"]))
    before = {name: data for name, data in tree(root).items() if name.startswith(("128x128/0", "commits"))}
    both = precompute_config(models, one_tar, root)
    for number in (2, 3):  # the tar's record and the part; the second time, the part exists
        with pytest.MonkeyPatch.context() as patch:
            die_before(patch, number - 1)
            with pytest.raises(Killed):
                encode_all(both)
        now = tree(root)
        assert {name: data for name, data in now.items() if name.startswith(("128x128/0", "commits"))} == before
    encode_all(both)
    assert list(verify_root(open_store(root))) == []
    for one, two in zip(load_receipts(open_store(whole)), load_receipts(open_store(root)), strict=True):
        assert one.model_dump(exclude=TIMED) == two.model_dump(exclude=TIMED)


def test_the_later_of_two_attempts_adopts_what_is_there(models: Path, one_tar: Path, tmp_path: Path) -> None:
    """A second job commits one of two buckets during this attempt; its receipts stay unchanged."""
    root = tmp_path / "root"
    encode_all(precompute_config(models, one_tar, root, buckets=["64x64"]))
    before = tree(root)
    with pytest.MonkeyPatch.context() as patch:
        # like a job that listed commits before the other job's commit
        patch.setattr("precompute.encode.tar.current_generation", lambda store, bucket, tar: (0, None))
        encode_all(precompute_config(models, one_tar, root))
    now = tree(root)
    assert {name for name, data in before.items() if now[name] != data} == set()
    assert len(load_receipts(open_store(root))) == 2 and list(verify_root(open_store(root))) == []


def test_a_part_that_lies_there_in_pieces_is_completed(latents: Path, tmp_path: Path, root: Path | str) -> None:
    store = open_store(root)
    receipt = load_receipts(open_store(latents))[0]
    source = shutil.copytree(latents / receipt.folder, tmp_path / "part")
    files = record_files(source, {})
    assert receipt.part == f"{receipt.tar}.{content_hash(files)}"
    right = {name: (source / name).read_bytes() for name in files}
    store.write(f"{receipt.folder}/index.json", b"torn")
    store.write(f"{receipt.folder}/shard.00000.mds", right["shard.00000.mds"][:-1] + b"?")
    store.write(f"{receipt.folder}/another's", b"is not removed")
    store_part(store, source, receipt.folder, files)
    assert {name: store.read(f"{receipt.folder}/{name}") for name in files} == right
    assert store.read(f"{receipt.folder}/another's") == b"is not removed"


def test_an_incomplete_upload_is_not_committed(latents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, (receipt, *_) = RemoteStore("memory://incomplete/root"), load_receipts(open_store(latents))
    monkeypatch.setattr(store, "put", lambda files: None)
    with pytest.raises(WorkError, match="uploaded with 0 bytes instead of"):
        store_part(store, latents / receipt.folder, receipt.folder, receipt.files)


def test_another_tar_under_the_same_name_is_refused(models: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    make_tar(tmp_path / "one", "00000", make_samples(0, 6, [(200, 150)]))
    make_tar(tmp_path / "two", "00000", make_samples(9, 6, [(200, 150)]))
    encode_all(precompute_config(models, tmp_path / "one", root, buckets=["64x64"]))
    with pytest.raises(WorkError, match=r"is not the tar that shard 00000 was first encoded from"):
        encode_all(precompute_config(models, tmp_path / "two", root))
    assert [list(tar.parts) for tar in load_tars(open_store(root))] == [["64x64"]]


def abandon(root: Path, tar: str) -> Path:
    """Create the private folder of a killed attempt."""

    def be_killed() -> None:
        with attempt_folder(open_store(root), tar) as folder:
            (folder / "gigabytes").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for(fork(be_killed)) == -signal.SIGKILL
    return next(iter((root / ".attempts").glob(f"{tar}.*")))


def test_what_killed_attempts_left_is_swept_and_one_at_work_is_not(tmp_path: Path) -> None:
    store, (abandoned, *_) = LocalStore(tmp_path), [abandon(tmp_path, tar) for tar in ("00000", "00001", "a.b")]
    with attempt_folder(store, "00000") as at_work, attempt_folder(store, "00000") as other:
        assert at_work.is_dir() and other.is_dir() and at_work != other and not abandoned.exists()
        sweep_attempts(store)  # whatever their tar
        assert {*(tmp_path / ".attempts").iterdir()} == {at_work, other}
    assert not list((tmp_path / ".attempts").iterdir())


def test_books_that_do_not_add_up_are_not_committed(models: Path, tars: Path, tmp_path: Path) -> None:
    """If a writer loses a sample, the receipt cannot be built."""
    config = precompute_config(models, tars, tmp_path / "root")
    with pytest.MonkeyPatch.context() as patch:
        write = PartWriter.write

        def lose_one(self: PartWriter, *samples: Any) -> None:
            write(self, *samples)
            del self.samples[1:2]

        patch.setattr(PartWriter, "write", lose_one)
        with pytest.raises(ValueError, match=r"is off by -\d+; the tar has 23 samples"):
            encode_all(config)
    assert load_receipts(open_store(config.output)) == []


def test_a_tar_whose_name_is_a_generation_is_refused(models: Path, tmp_path: Path) -> None:
    make_tar(tmp_path / "tars", "a.g1", make_samples(0, 2, [(200, 150)]))
    with pytest.raises(
        RequestError, match=r"The tar name a\.g1 ends in \.gN, a suffix reserved for receipt generations"
    ):
        encode_all(precompute_config(models, tmp_path / "tars", tmp_path / "root"))


@pytest.mark.parametrize("overwrites", [True, False])
def test_a_store_that_ignores_the_condition_is_refused(
    latents: Path, monkeypatch: pytest.MonkeyPatch, overwrites: bool
) -> None:
    """The store reports success for the second create request, whether or not it overwrites the object."""
    store = RemoteStore("memory://ignorant/root")
    pipe = type(store.fs).pipe_file

    def pipe_unconditionally(fs: Any, path: str, data: bytes, mode: str = "") -> None:
        if overwrites or not fs.exists(path):
            pipe(fs, path, data)

    monkeypatch.setattr(type(store.fs), "pipe_file", pipe_unconditionally)
    with pytest.raises(RequestError, match="ignores conditional writes"):
        create_root(store, EncodingRecord.load(open_store(latents)))
    assert store.files() == []


def test_a_root_is_not_made_among_other_files_and_keeps_its_rules(latents: Path, root: Path | str) -> None:
    store, encoding = open_store(root), EncodingRecord.load(open_store(latents))
    store.write("notes.txt", b"")
    with pytest.raises(RequestError, match="neither empty nor a latents root"):
        create_root(store, encoding)
    assert store.files() == ["notes.txt"]
    record_rules(store, {Bucket(64, 64): "covers"})
    with pytest.raises(RequestError, match="fills bucket 64x64 by the rule `covers`"):
        record_rules(store, {Bucket(64, 64): "nearest, base 64, step 8, max_ratio 2"})


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("moment", ["entries", "size", "create", "read"])
def test_another_job_may_make_the_root_in_any_moment(
    latents: Path, root: Path | str, monkeypatch: pytest.MonkeyPatch, moment: str, same: bool
) -> None:
    """With the same encoding, both jobs continue; otherwise the first to write it continues, and the other is
    refused."""
    ours = EncodingRecord.load(open_store(latents))
    theirs = ours if same else ours.model_copy(update={"max_characters": 7})
    store, other = open_store(root), open_store(root)
    ask = getattr(store, moment)
    overtaken: list[EncodingRecord] = []

    def ask_and_be_overtaken(*arguments: Any) -> object:
        found = ask(*arguments) if moment != "create" else None  # the listing is from before
        if not overtaken:
            create_root(other, theirs)
            overtaken.append(theirs)
            other.create("rules/64x64.json", b"{}")
        return found if moment != "create" else ask(*arguments)

    monkeypatch.setattr(store, moment, ask_and_be_overtaken)
    if same:
        create_root(store, ours)
    else:
        with pytest.raises(
            RequestError, match=r"written with a different encoding: max_characters: 7 ≠ \d+ \(root ≠ this"
        ):
            create_root(store, ours)
    assert overtaken == [theirs] and EncodingRecord.load(other) == theirs


def test_of_two_creators_one_is_told_so_without_hard_links_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(tmp_path)
    assert store.create("a/b", b"1") and not store.create("a/b", b"2") and store.read("a/b") == b"1"
    assert store.files() == ["a/b"]
    monkeypatch.setattr("shards.base.durable.RENAME_NOREPLACE", 1 << 20)  # an error of file systems without the call
    with pytest.raises(RequestError, match="supports neither hard links nor RENAME_NOREPLACE"):
        store.create("a/c", b"1")
