"""Processes forked from the test's own. An error must end them; otherwise they would continue as a second pytest.

They must not train: torch refuses that if the test's process has started autograd's threads. tests/ranks.py can."""

import os
import sys
from collections.abc import Callable

from shards.base.errors import is_storage_error
from tests.rooms import PACKAGES

OK, STORAGE_ERROR, OTHER_ERROR = 0, 10, 11


def fork(work: Callable[[], object], about: str = "a fork") -> int:
    """Fork a process that runs `work` and exits; a failure gives a non-zero exit code."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = OTHER_ERROR
    try:
        work()
        code = OK
    except Exception as error:
        code = STORAGE_ERROR if is_storage_error(error) else OTHER_ERROR
        if code == OTHER_ERROR:
            print(f"{about}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def wait_for(child: int) -> int:
    """Wait for a process, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def import_again(*blocked: str) -> None:
    """Remove the product's modules, so that the next import executes them again, and make all imports from the packages
    `blocked` fail.

    Other packages stay imported, so this does not detect that one of them imports a blocked package.
    """
    for name in list(sys.modules):
        if name.split(".")[0] in (*PACKAGES, "tests"):
            del sys.modules[name]
    # otherwise `from ray.util import …` would find the submodule without importing the package
    loaded = [name for name in sys.modules if name.split(".")[0] in blocked]
    sys.modules.update(dict.fromkeys([*blocked, *loaded]))  # type: ignore[arg-type]
