"""failures.jsonl: one line per failed attempt, next to the job's output."""

import errno
import json
import os
import re
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from cluster.fleet import Failed
from shards.base.errors import Outage
from shards.open import open_store

ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class FailureLog:
    """Context manager for the log of a job's failed attempts, which is stored next to the root at `place`.

    For a folder, the log is the file `FOLDER.failures.jsonl`, to which later jobs append. Object stores cannot append,
    so for a URL, each object `URL.failures/TIME.jsonl` holds some of the lines (`URL/.failures/TIME.jsonl` if the URL
    is a whole bucket). Lines that cannot be written yet, for example during an outage, are kept in memory, and printed
    to stderr if they still cannot be written when the job ends.
    """

    def __init__(self, place: Path | str):
        self.file = Path(f"{place}.failures.jsonl") if isinstance(place, Path) else None
        is_bucket = self.file is None and not urlsplit(str(place)).path.strip("/")
        url = f"{str(place).rstrip('/')}/.failures" if is_bucket else f"{place}.failures"
        self.store = None if self.file else open_store(url)
        self.where = str(self.file or url)
        self.unwritten: list[str] = []

    def __enter__(self) -> "FailureLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if reason := self._write():
            lines = "".join(self.unwritten)
            print(
                f"{self.where} cannot be written ({reason}). These lines are missing from it:\n{lines}",
                file=sys.stderr,
                flush=True,
            )

    def record(self, failed: Failed) -> None:
        """Append a line for a failed attempt."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "shard": failed.key,
            "node": failed.node,
            "cause": failed.failure.line,
            "attempts": failed.number,
            "outcome": failed.which,
            "final": not failed.again,
            "log": failed.log,
            "trace": ANSI_COLOURS.sub("", failed.failure.trace),
        }
        self.unwritten.append(f"{json.dumps(line)}\n")
        if failed.failure.outage is None:  # during an outage, writing the log may fail as well, and slowly
            self._write()

    def _write(self) -> Exception | None:
        """Write the pending lines. Return the error if writing fails, or None."""
        text = "".join(self.unwritten)
        try:
            if text and self.file:
                _append(self.file, text.encode())
            elif text and self.store:
                name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}.jsonl"
                self.store.create(name, text.encode())
        except (OSError, Outage) as error:
            return error
        self.unwritten.clear()
        return None


def _append(path: Path, data: bytes) -> None:
    """Append `data` to a file, or nothing if it does not fit on the disk."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        if file.write(data) < len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def summarize(failed: Sequence[tuple[str, str]], most: int = 5) -> str:
    """Format the first `most` failed units (key, reason) for an error message."""
    text = "; ".join(f"{key}: {reason}" for key, reason in sorted(failed)[:most])
    return f"{text}; and {len(failed) - most} more" if len(failed) > most else text
