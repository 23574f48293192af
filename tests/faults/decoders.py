"""Stand-ins for `pixels.decode` that some pictures kill; a child process imports them by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from precompute.pixels import Picture, decode


def poisoned(data: bytes, *args: Any) -> Picture:
    """`decode`, but a picture that begins with the word for it dies, loops, sleeps or hoards."""
    if data.startswith(b"ABORT"):
        os.abort()
    if data.startswith(b"SEGFAULT"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if data.startswith(b"KILLED"):  # as the kernel does where memory runs out
        os.kill(os.getpid(), signal.SIGKILL)
    while data.startswith(b"LOOP"):
        pass
    if data.startswith(b"SLEEP"):
        time.sleep(1e6)
    if data.startswith(b"NAP"):
        time.sleep(4)
    if data.startswith(b"MEMORY"):
        hoard = [bytes(1 << 28) for _ in range(1000)]
        assert not hoard
    if data.startswith(b"EXIT"):
        os._exit(3)
    return decode(data, *args)


def killed_once(data: bytes, *args: Any) -> Picture:
    """Dies at the first sight of a picture that begins with a file name, and decodes what follows at the second."""
    if data.startswith(b"/"):
        name, data = data.split(b"\n", 1)
        if not (path := Path(name.decode())).exists():
            path.touch()
            os.abort()
    return decode(data, *args)
