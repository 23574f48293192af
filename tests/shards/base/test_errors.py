"""How a failure reaches the person at the terminal."""

import errno

import pytest

from shards.base.errors import Preempted, RequestError, WorkError, exit_code_of


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RequestError("no such thing"), 2, "error: no such thing"),
        (WorkError("it broke"), 1, "error: it broke"),
        (Preempted("told to leave"), 75, "error: told to leave"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            1,
            "No space left on device: '/x/y'. What was finished",
        ),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error. What was finished stays valid"),
    ],
)
def test_errors_for_people(error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    assert exit_code_of(command) == code
    assert said in capsys.readouterr().err


def test_a_bug_keeps_its_traceback() -> None:
    def command() -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file"):
        exit_code_of(command)
