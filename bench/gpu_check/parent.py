"""Kill a lane's process when the check dies, even by SIGKILL."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when process `parent`, its parent, dies. Exit if it is already dead.

    The kernel already does so when the thread that started this process ends. A lane's thread outlives the process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the prctl
        sys.exit(1)
