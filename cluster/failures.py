"""failures.jsonl: one line for each attempt that failed, beside what the job writes."""

import json
import re
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from cluster.fleet import Failed
from shards.base.errors import Outage
from shards.open import open_store

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class FailureLog:
    """Failed attempts of one job, beside the root at `place`; a context manager.

    Beside a folder it is the file `FOLDER.failures.jsonl`, which later jobs go on with. Object stores do not append:
    there each object `ADDRESS.failures/TIME.jsonl` has some lines. What cannot be written yet, as in an outage, waits;
    what still cannot at the job's end goes to stderr.
    """

    def __init__(self, place: Path | str):
        self.file = Path(f"{place}.failures.jsonl") if isinstance(place, Path) else None
        self.store = None if self.file else open_store(f"{place}.failures")
        self.where = str(self.file or f"{place}.failures")
        self.waiting: list[str] = []

    def __enter__(self) -> "FailureLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if why := self._write():
            lines = "".join(self.waiting)
            print(f"{self.where} cannot be written ({why}); its last lines are:\n{lines}", file=sys.stderr, flush=True)

    def record(self, failed: Failed) -> None:
        """Add an attempt."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "shard": failed.key,
            "node": failed.node,
            "cause": failed.failure.line,
            "attempts": failed.number,
            "outcome": failed.which,
            "final": not failed.again,
            "log": failed.log,
            "trace": COLOURS.sub("", failed.failure.trace),
        }
        self.waiting.append(f"{json.dumps(line)}\n")
        if failed.failure.outage is None:  # or the store itself may be away, and each try take long
            self._write()

    def _write(self) -> Exception | None:
        """Write what waits; returns why that cannot be."""
        text = "".join(self.waiting)
        try:
            if text and self.file:
                with self.file.open("a") as file:
                    file.write(text)
            elif text and self.store:
                name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}.jsonl"
                self.store.create(name, text.encode())
        except (OSError, Outage) as error:
            return error
        self.waiting.clear()
        return None


def named(failed: Sequence[tuple[str, str]], most: int = 5) -> str:
    """The first of units and why they failed, for people."""
    text = "; ".join(f"{key}: {reason}" for key, reason in sorted(failed)[:most])
    return f"{text}; and {len(failed) - most} more" if len(failed) > most else text
