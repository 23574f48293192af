"""Printing of failures on the terminal."""

import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from shards.base.errors import Preempted, RequestError, WorkError, console, exit_code_of, is_storage_error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RequestError("no such thing"), 2, "error: no such thing"),
        (WorkError("it broke"), 1, "error: it broke"),
        (Preempted("told to leave"), 75, "error: told to leave"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            1,
            "No space left on device: '/x/y'. Completed work",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, "Permission denied: '/x/y'. Completed work"),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error. Completed work remains valid"),
        (
            OSError(errno.ENOTCONN, "Transport endpoint is not connected", "/x"),
            1,
            "not connected: '/x'. Completed work",
        ),
        (OSError(errno.ESHUTDOWN, "Cannot send", "/x/y"), 1, "Cannot send: '/x/y'. Completed work remains valid. Fix"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/x/y"), 1, "Replace the folder with the file that belongs"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x/y"), 1, "Replace the file with the folder that"),
        (OSError(errno.ELOOP, "Too many levels", "/x/y"), 1, "Remove the link, which leads back to itself"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/x/y"), 1, "Choose a shorter path"),
    ],
)
def test_errors_for_people(error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command(words: list[str]) -> None:
        raise error

    with pytest.raises(SystemExit) as left:
        console(command)()
    assert left.value.code == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_unconnected_socket_is_not_a_storage_error() -> None:
    with socket.socket() as unconnected, pytest.raises(OSError) as raised:
        unconnected.getpeername()
    assert raised.value.errno == errno.ENOTCONN and not is_storage_error(raised.value)


def test_a_closed_terminal_does_not_change_the_exit_code() -> None:
    code = "import sys; from shards.base.errors import *\nsys.exit(exit_code_of(lambda: exec('raise Preempted(1)')))"
    reading, writing = os.pipe()
    os.close(reading)
    assert subprocess.run([sys.executable, "-c", code], stderr=writing, timeout=60).returncode == 75
    os.close(writing)


def test_a_command_is_given_the_words_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["command", "--a", "b"])
    with pytest.raises(SystemExit) as left:
        console(lambda words: 0 if words == ["--a", "b"] else 9)()
    assert left.value.code == 0


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EBADF, "Bad file descriptor"), BrokenPipeError(errno.EPIPE, "a socket")],
    ids=["a bug", "a broken connection, not a closed pipe"],
)
def test_other_errors_keep_their_traceback(error: OSError) -> None:
    def command() -> None:
        raise error

    with pytest.raises(type(error), match=error.strerror):
        exit_code_of(command)


def test_a_crash_in_native_code_keeps_its_traceback() -> None:
    program = (
        "import ctypes; from shards.base.errors import exit_code_of; exit_code_of(lambda: ctypes.string_at(0) and 0)"
    )
    crashed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert crashed.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in crashed.stderr and "in exit_code_of" in crashed.stderr


def test_a_reader_that_ends_early_is_no_error() -> None:
    """As in `python -m shards stats ROOT | head -1`, with more output than a pipe holds."""
    code = "from shards.base.errors import console; console(lambda words: print('x' * 200_000))()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
