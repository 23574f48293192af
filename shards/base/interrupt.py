"""Exception hook that reports Ctrl-C in one line instead of a traceback, wherever it interrupts the process.

Importing this module installs the hook. `__main__` modules import it before anything else, because their other imports
take seconds, and `console` cannot catch an interrupt during that time.
"""

import multiprocessing
import sys
from types import TracebackType

from shards.base.errors import INTERRUPTED, report_interrupt


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    if multiprocessing.parent_process() is None:  # a terminal interrupts worker processes too; one report is enough
        report_interrupt()
    sys.exit(INTERRUPTED)


sys.excepthook = _report
