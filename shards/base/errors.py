"""The ways in which a command fails, and how each reaches the person at the terminal."""

import errno
import signal
import sys
import textwrap
from collections.abc import Callable
from typing import NoReturn


class RequestError(ValueError):
    """The request was wrong (a config, a path, a root that does not fit). Nothing was written."""

    exit_code = 2


class WorkError(RuntimeError):
    """The work failed on the way (a shard, a run). What was finished stays valid."""

    exit_code = 1


class DamagedInput(WorkError):
    """What was to be read is not what was once written. Another attempt would find the same, so there is none."""


class Outage(WorkError):
    """Storage, credentials, models or the cluster failed, and not the work: the same work may go well later."""

    passes = True
    """Whether waiting may help."""


class UnfitNode(Outage):
    """This machine lacks what the work needs: models, the root, the code. Other machines may have it."""

    passes = False


class Preempted(WorkError):
    """The run was told to leave; it saved first. The code is EX_TEMPFAIL, on which a scheduler requeues."""

    exit_code = 75


INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C where there was nothing to save, as shells report it."""
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}


def is_storage_error(error: BaseException | None) -> bool:
    """Whether a disk is full, broken or gone: no bug of ours."""
    return isinstance(error, OSError) and error.errno in STORAGE_ERRORS


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run `command`; turn its errors for people into a paragraph on stderr and an exit code (0, 1, 2 or 75).

    Any other exception is a bug of ours and keeps its traceback.
    """
    try:
        return command() or 0
    except (RequestError, WorkError) as error:
        say(error)
        return error.exit_code
    except KeyboardInterrupt:
        say(WorkError("Interrupted by Ctrl-C. What was finished stays valid: the same command again continues."))
        return INTERRUPTED
    except OSError as error:
        if not is_storage_error(error):
            raise
        say(WorkError(f"{error}. What was finished stays valid: mend that, and give the same command again."))
        return WorkError.exit_code


def console(run: Callable[[list[str]], int | None]) -> Callable[[], NoReturn]:
    """A command's console entry point: `run` is given the command line's words, and its exit code ends the process."""
    return lambda: sys.exit(exit_code_of(lambda: run(sys.argv[1:])))


def say(error: Exception) -> None:
    """An error for people, as a paragraph on stderr."""
    text = textwrap.fill(f"error: {error}", width=110, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr, flush=True)
