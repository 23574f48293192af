"""What a worker process does once for its memory: keep what is freed, and let the collector pass libraries over."""

import atexit
import ctypes
import gc

import pyarrow as pa

MALLOC_OPTIONS = ((-3, 32 << 20), (-1, 1 << 30), (-8, 1))
"""As mallopt(3) numbers them: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in bytes, M_ARENA_MAX."""


def warm_up() -> None:
    """What a process does once, when its encoders are loaded."""
    keep_memory()
    pa.array([None])  # loads pandas, where that is installed; or the device would wait for it at the first tar's end
    gc.collect()
    atexit.register(gc.unfreeze)  # libraries complain of objects that are never collected
    gc.freeze()  # or each collection would look through all that the libraries made when they were imported


def keep_memory() -> None:
    """Have glibc keep what is freed for what comes next, and make no heaps of their own for the threads to come.

    Every picture takes some megabytes, in one thread, and gives them back in another. By default they go back to the
    kernel as well, which takes longer to clear fresh pages than decoding takes to fill them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries have none
        for option, value in MALLOC_OPTIONS:
            libc.mallopt(option, value)
