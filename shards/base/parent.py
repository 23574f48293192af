"""Processes that die with their parent, even if SIGKILL kills it."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""`prctl` option that selects the signal to send to a process when its parent dies."""


def die_with(parent: int) -> bool:
    """Ask the kernel to kill this process when process `parent`, its parent, dies (Linux only).

    The kernel already does so when the thread that started this process ends, so that thread must outlive it.

    Returns:
        Whether the parent is still alive. If it died before the request, the kernel will not kill this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent
