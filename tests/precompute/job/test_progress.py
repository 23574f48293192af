"""The bar that a person at a terminal sees; the JSON lines are in test_job.py."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from tests.runs import environment

SHOW = """
import sys
from precompute.cluster.fleet import Done, Failed, UnderWay
from precompute.cluster.ray_cluster import Failure
from precompute.job.ledger import Ledger
from shards.root.committed import load_books
from shards.open import open_store

first, second = load_books(open_store(sys.argv[1]))
failure = Failure(is_lost=False, is_final=False, line="[no markup]", text="[no markup]")
with Ledger(3) as ledger:
    ledger.record(UnderWay(2, 7))
    ledger.record(Done("00000", None, first))
    ledger.record(Failed("00001", None, "attempt 1 of 3 failed", failure, again=True))
    ledger.record(Done("00001", None, second))
    ledger.record(Failed("00002", None, "attempt 3 of 3 failed", failure, again=False))
"""


def test_a_bar_on_a_terminal(latents: Path) -> None:
    """On stderr, where stdout is a pipe: images/s, accepted, rejected, tars and the time left."""
    ours, its = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SHOW, str(latents)],
        stdout=subprocess.PIPE,
        stderr=its,
        env=environment(COLUMNS="120", TERM="xterm"),
        text=True,
    ) as process:
        os.close(its)
        seen = b""
        try:
            while data := os.read(ours, 1 << 16):
                seen += data
        except OSError:  # the other end is closed
            pass
        assert process.stdout is not None and process.stdout.read() == ""
    os.close(ours)
    assert process.returncode == 0, seen.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "tar 00001: attempt 1 of 3 failed: [no markup]" in text
    assert "3/3 tars" in text and re.search(r"img/s  30 accepted  16 rejected +0:00:00", text), text
