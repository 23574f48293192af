"""`python -m train.launch FLAGS -m train --config …`: accelerate's launcher, as a scheduler needs it.

The flags are those of `accelerate launch`. By itself torch's launcher, which does the work, dies of SIGUSR1 instead of
passing it on, leaves its processes 30 s after a SIGTERM, and ends with 1 whatever happened.
"""

import os
import subprocess
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from shards.base.errors import Preempted, WorkError, exit_code_of
from train.run.processes import LAUNCHER

EXAMPLE = "example: python -m train.launch --multi_gpu --num_processes 8 -m train --config configs/phase1.yaml"
DEFAULTS = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "PET_SHUTDOWN_TIMEOUT": "120",
}
"""Which signals are passed on, and how many seconds the processes then have to save."""


def launch(arguments: list[str]) -> int:
    """Start the processes, again where some is lost; returns the exit code that the first one to fail had.

    Raises:
        Preempted: the launcher was told to leave, and so were they.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        parser = launch_command_parser()
        parser.epilog = EXAMPLE
        launch_command(parser.parse_args(arguments))
    except SignalException as told:
        raise Preempted(
            f"the launcher got {told.sigval.name}, and passed it on. The same command again resumes."
        ) from told
    except ChildFailedError as failed:
        return code_of(failed.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as failed:  # of one process, which has no launcher of torch's
        return code_of(failed.returncode)
    return 0


def code_of(returncode: int) -> int:
    """A process's exit code; 1 where a signal ended it."""
    return returncode if returncode > 0 else WorkError.exit_code


def main() -> None:
    """Console entry point."""
    sys.exit(exit_code_of(lambda: launch(sys.argv[1:])))


if __name__ == "__main__":
    main()
