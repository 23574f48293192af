"""The two ways in which a command fails, and how each reaches the person at the terminal."""

import sys
import textwrap
from collections.abc import Callable


class RequestError(ValueError):
    """The request was wrong (a config, a path, a root that does not fit). Nothing was written. Exit code 2."""


class WorkError(RuntimeError):
    """The work failed on the way (a shard, a run). What was finished stays valid. Exit code 1."""


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run `command`; turn its errors for people into a paragraph on stderr and an exit code (0, 1 or 2).

    Any other exception is a bug of ours and keeps its traceback.
    """
    try:
        return command() or 0
    except (RequestError, WorkError) as error:
        print(
            textwrap.fill(f"error: {error}", width=110, break_long_words=False, break_on_hyphens=False), file=sys.stderr
        )
        return 2 if isinstance(error, RequestError) else 1
