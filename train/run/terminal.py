"""Printing from a run with many processes."""

from accelerate import Accelerator


def print_once(accelerator: Accelerator, message: str) -> None:
    """Print on the run's main process only. `Accelerator.print` prints on every machine."""
    if accelerator.is_main_process:
        print(message, flush=True)
