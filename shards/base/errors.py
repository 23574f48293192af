"""Exception types, their exit codes, and functions that print errors on the terminal."""

import errno
import faulthandler
import functools
import os
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


class RequestError(ValueError):
    """An invalid request: a wrong config, path or root. Nothing was written."""

    exit_code = 2


class WorkError(RuntimeError):
    """A failure at run time, for example while encoding a tar or during training. Completed work remains valid."""

    exit_code = 1


class DamagedInput(WorkError):
    """An input that differs from what was originally written. The work is not retried, since a retry would read the
    same bytes."""


class Outage(WorkError):
    """A failure of storage, credentials, models or the cluster rather than of the work itself, so a later attempt may
    succeed."""

    is_transient = True
    """Whether the failure may go away without intervention."""


class UnfitNode(Outage):
    """A failure on a node that lacks something the work needs: models, code, hardware, or access to the root. Other
    nodes may have what is missing."""

    is_transient = False


class Stuck(WorkError):
    """A call in a thread that does not end. Threads cannot be killed, so the process should exit."""


class Preempted(WorkError):
    """A stop request from the scheduler or the user; all progress was saved. Schedulers requeue on exit code 75
    (EX_TEMPFAIL)."""

    exit_code = 75


INTERRUPTED = 128 + signal.SIGINT
"""Exit code for Ctrl-C with nothing to save, following the shell convention."""
PIPE_CLOSED = 128 + signal.SIGPIPE
"""Exit code if whatever read the output has ended, following the shell convention."""
STORAGE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
}
MOUNT_ERRORS = {errno.ENOTCONN, errno.ESHUTDOWN}
"""Errors of a mount whose FUSE daemon has died, or whose Lustre server has evicted this client. Sockets raise them as
well, but without the name of a file."""
PATH_ADVICE = {
    errno.EACCES: "Give this user access",
    errno.EPERM: "Give this user access",
    errno.EISDIR: "Replace the folder with the file that belongs there",
    errno.ENOTDIR: "Replace the file with the folder that belongs there",
    errno.ELOOP: "Remove the link, which leads back to itself",
    errno.ENAMETOOLONG: "Choose a shorter path",
}
"""Error number → advice, for errors caused by the files on disk rather than by a bug in this program."""


def is_storage_error(error: BaseException | None) -> bool:
    """Return whether the error indicates a full, broken or unmounted disk rather than a bug in this program."""
    if not isinstance(error, OSError):
        return False
    return error.errno in STORAGE_ERRORS or (error.errno in MOUNT_ERRORS and error.filename is not None)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add `path` to an OSError raised in the block, unless it names a file. Errors from `open` name one, but errors
    from reading, writing and flushing an open file do not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run `command`, print user-facing errors to stderr, and return an exit code (0, 1, 2, 75, 130 or 141).

    Any other exception is a bug and keeps its traceback. So does a crash in a library's native code.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # `sys.stderr` may have been replaced by something without a file descriptor
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except (RequestError, WorkError) as error:
        say(error)
        return error.exit_code
    except KeyboardInterrupt:
        report_interrupt()
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_closed(1):
            discard_unread_output()
            return PIPE_CLOSED
        path_advice = PATH_ADVICE.get(error.errno or 0) if error.filename else None
        advice = "Fix the storage" if is_storage_error(error) else path_advice
        if advice is None:
            raise
        say(WorkError(f"{error}. Completed work remains valid. {advice} and run the same command again."))
        return WorkError.exit_code


def discard_unread_output() -> None:
    """Discard further output to stdout and stderr where nothing reads it any more: after the reader of a pipe has
    ended, as in `python -m plan | head -1`, or in a closed terminal.

    Otherwise each print would fail, and Python would exit with a code of its own because it cannot write the rest.
    """
    for file in (1, 2):
        if _is_closed(file):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)


def _is_closed(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def console(run: Callable[[list[str]], int | None]) -> Callable[[], NoReturn]:
    """Build a console entry point: call `run` with the command-line arguments and exit with its exit code."""
    return lambda: sys.exit(exit_code_of(lambda: run(sys.argv[1:])))


def report_interrupt() -> None:
    """Print that Ctrl-C ended the command."""
    say(WorkError("Interrupted by Ctrl-C. Completed work remains valid. Run the same command again to continue."))


def say(error: Exception) -> None:
    """Print a user-facing error to stderr, if possible, with each of its lines wrapped."""
    wrap = functools.partial(textwrap.fill, width=110, break_long_words=False, break_on_hyphens=False)
    try:
        print("\n".join(map(wrap, f"error: {error}".splitlines())), file=sys.stderr, flush=True)
    except OSError:  # the exit code still tells how the command ended
        discard_unread_output()
