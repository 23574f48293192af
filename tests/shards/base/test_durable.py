"""Durable files and sealed JSON."""

import errno
import json
import os
import shutil
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.base.durable import (
    DamagedFile,
    atomic_folder,
    copy_file,
    fsync_folder,
    one_writer,
    parse_sealed_json,
    read_sealed_json,
    sealed_json,
    sha256_file,
    write_atomically,
    write_file,
    write_output,
    write_sealed_json,
)
from shards.base.store import LocalStore


def test_every_single_bit_flip_is_seen() -> None:
    data = sealed_json({"samples": 12, "name": "00042", "list": [1, 2]})
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(DamagedFile):
            parse_sealed_json(bytes(flipped), "v.json")


@given(st.dictionaries(st.text(max_size=5).filter(lambda key: key != "sha256"), st.integers() | st.text(max_size=9)))
def test_any_content_survives(value: dict[str, object]) -> None:
    assert parse_sealed_json(sealed_json(value), "v.json") == value


def test_equal_json_in_other_bytes_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    write_sealed_json(path, {"b": [1, 2.5, None], "a": {"ü": "x"}})
    assert read_sealed_json(path) == {"b": [1, 2.5, None], "a": {"ü": "x"}}
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(DamagedFile, match="does not match the SHA-256"):
        read_sealed_json(path)


def test_a_second_writer_says_that_it_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = []

    def second() -> None:
        with one_writer(tmp_path / "new"):
            order.append("second")

    with one_writer(tmp_path / "new"):
        assert not capsys.readouterr().out
        thread = Thread(target=second)
        thread.start()
        while "Waiting for another command that writes to" not in capsys.readouterr().out:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("shards.base.durable.os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def write_folder(target: Path, text: str) -> None:
    with atomic_folder(target) as private:
        (private / "file").write_text(text)


def test_a_folder_is_deleted_only_after_it_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "folder", tmp_path / "link"
    link.symlink_to(target)
    rmtree, found = shutil.rmtree, set()

    def look_and_remove(*arguments: Any, **named: Any) -> None:
        found.add((target / "file").read_text())
        rmtree(*arguments, **named)

    write_folder(target, "old")
    monkeypatch.setattr("shards.base.durable.shutil.rmtree", look_and_remove)
    write_folder(link, "new")
    assert found == {"new"} and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [target, link]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of the two renames fails."""
    target = tmp_path / "folder"
    write_folder(target, "old")
    replace, calls = Path.replace, iter(range(9))

    def fail_once(self: Path, other: Path) -> Path:
        if next(calls) == 1:
            raise OSError("no space left on device")
        return replace(self, other)

    monkeypatch.setattr(Path, "replace", fail_once)
    with pytest.raises(OSError, match="no space"):
        write_folder(target, "new")
    assert (target / "file").read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_errors_of_an_open_file_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own message, `[Errno 5] Input/output error`, names no file."""
    unreadable = Path("/proc/self/mem")  # its first page is never mapped, so reading it fails with EIO
    for read in (
        lambda: sha256_file(unreadable),
        lambda: copy_file(unreadable, tmp_path / "copy"),
        lambda: LocalStore(Path("/proc")).read_range("self/mem", 0, 8),
    ):
        with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
            read()

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/new'"):
        write_file(tmp_path / "new", b"1")
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}'"):
        fsync_folder(tmp_path)


def test_an_output_that_is_a_pipe_or_device_is_not_replaced(tmp_path: Path) -> None:
    """Otherwise, `--output /dev/null` would replace the device with a file when root runs the command."""
    pipe, received = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_output(pipe, b"page")
    reader.join(10)
    assert pipe.is_fifo() and received == [b"page"]
