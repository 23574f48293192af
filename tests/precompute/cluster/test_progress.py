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
from precompute.cluster.progress import Progress
from shards.format.receipts import load_receipts

first, second = load_receipts(sys.argv[1])
with Progress(3) as progress:
    progress.tick(7, 2)
    progress.shard_done(first)
    progress.attempt_failed("00001", "attempt 1 of 3 failed", "[no markup]")
    progress.shard_done(second)
    progress.shard_failed()
"""


def test_a_bar_on_a_terminal(latents: Path) -> None:
    """On stderr, where stdout is a pipe: images/s, accepted, rejected, shards and the time left."""
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
    assert "shard 00001: attempt 1 of 3 failed: [no markup]" in text
    assert "3/3 shards" in text and re.search(r"img/s  30 accepted  16 rejected +0:00:00", text), text
