"""Stop signals: a closed terminal, and flags inside flags."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from shards.base.stop import STOP_SIGNALS, StopSignal, exit_on_stop_signal
from tests.runs import environment

COMMAND = """
import sys, time
from shards.base.errors import Preempted, exit_code_of
from shards.base.progress import Progress
from shards.base.stop import StopSignal

def command():
    with StopSignal() as stop, Progress("train", "steps", 10) as progress:
        print("ready", flush=True)
        while not stop.received:
            time.sleep(0.01)
        progress.say("saving")
        print("saved", flush=True)
        raise Preempted("stopped")

sys.exit(exit_code_of(command))
"""


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_closed_terminal_ends_a_command_as_other_signals_do(is_launched: bool) -> None:
    """A launched process is in its own session, and gets SIGTERM from its launcher instead of SIGHUP."""

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
        if not is_launched:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=prepare,
        env=environment(),
    )
    os.close(its)
    read = b""
    while b"ready" not in read:
        read += os.read(ours, 1000)
    os.close(ours)
    if is_launched:
        process.terminate()
    assert process.wait(60) == 75


@pytest.fixture
def handlers_restored() -> Iterator[None]:
    """Restore the handlers of all stop signals after a test."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers_restored")
def test_a_signal_sets_the_flags_around_and_inside() -> None:
    with StopSignal() as outer:
        with StopSignal() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.received
        assert outer.received
        exit_on_stop_signal("stopped")  # as starting Ray does between two flags
        with StopSignal() as later:
            assert later.received
    with StopSignal() as unrelated:
        assert not unrelated.received
