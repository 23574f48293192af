"""Progress of a job: a bar on a terminal, JSON lines elsewhere."""

import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.fleet import Done, Failed, UnderWay
from cluster.pool import Failure
from precompute.job.ledger import Ledger
from shards.open import open_store
from tests.cluster.played import Outcome, PlayedPool, error, make_fleet
from tests.roots import load_tars


class Terminal(io.StringIO):
    """A terminal, as far as the bar can tell."""

    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(
    latents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar on stderr shows images/s, accepted, rejected, tars and the time left, even if stdout is a pipe."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    first, second = load_tars(open_store(latents))
    failure = Failure(is_lost=False, is_final=False, line="[no markup]", text="[no markup]")
    ledger = Ledger(3)
    with ledger.progress:
        ledger.record(UnderWay(2, 7))
        ledger.record(Done("00000", None, first))
        ledger.record(Failed("00001", None, "attempt 1 of 3 failed", failure, again=True))
        ledger.record(Done("00001", None, second))
        ledger.record(Failed("00002", None, "attempt 3 of 3 failed", failure, again=False))
        ledger.record(UnderWay(0, 0))
    assert capsys.readouterr().out == ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "tar 00001: attempt 1 of 3 failed: [no markup]" in text
    assert "3/3 tars" in text and re.search(r"img/s  30 accepted  16 rejected +0:00:00", text), text


@pytest.mark.parametrize("told_to_leave", [False, True])
def test_what_has_ended_is_not_in_flight(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told_to_leave: bool
) -> None:
    """At most two tars are in flight; each line is printed when one of them has ended."""

    def play(key: str, number: int, node: str) -> Outcome | None:
        if told_to_leave and key == "s" and not signalled:  # it ends between the signal and the drain
            signalled.append(key)
            os.kill(os.getpid(), signal.SIGTERM)
            return None
        return error(final=True) if key == "q" else "ok"

    signalled: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    seconds = {"total": 1.0}
    books: Any = SimpleNamespace(
        samples_in=10,
        encoded=10,
        rejected={},
        parts={"64x64": SimpleNamespace(started="", seconds=seconds, token="")},
    )
    pool = PlayedPool(play)
    ledger = Ledger(4)
    with ledger.progress:
        for event in make_fleet(monkeypatch, pool, "pqrs", max_in_flight=2, attempts=1):
            ledger.record(Done(event.key, event.node, books) if isinstance(event, Done) else event)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert (lines[-1]["shards_done"], lines[-1]["shards_failed"]) == (3, 1)
    assert [line["shards_done"] + line["shards_failed"] for line in lines] == [1, 2, 3, 4]
    assert [line["shards_in_flight"] for line in lines] == [1, 1, 1, 0]
    assert [line["under_way"] for line in lines] == [10, 10, 10, 0]  # samples: `PlayedPool` reports 10 per attempt


def test_a_job_that_ends_within_a_second_has_a_rate(latents: Path) -> None:
    ledger = Ledger(2)
    ledger.record(UnderWay(2, 0))
    for receipts in load_tars(open_store(latents)):
        ledger.record(Done(receipts.tar, None, receipts))
    ledger.record(UnderWay(0, 0))
    assert ledger.figures()["images_per_second"]
