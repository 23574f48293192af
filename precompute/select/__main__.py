"""Select the rows of a dataset of URLs that are worth downloading, and count the rows that each rule drops.

examples:
  python -m precompute.select --config configs/select.yaml --metadata laion/ --output runs/data/selected
  python -m precompute.select --config configs/select.yaml --metadata laion/ --filters.min_side 512
"""

import shards.base.interrupt  # noqa: F401

# isort: split

import errno
import time

from precompute.select.config import SelectConfig
from precompute.select.funnel import describe
from precompute.select.job import FUNNEL_NAME, select
from shards.base.config import load_from_args
from shards.base.errors import WorkError, console
from shards.base.table import counted


def run(arguments: list[str]) -> None:
    """Run `python -m precompute.select` with these arguments."""
    config = load_from_args(SelectConfig, arguments, "precompute.select", __doc__)
    start = time.monotonic()
    try:
        funnel = select(config)
    except BrokenPipeError:
        raise
    except OSError as error:
        no_space = error.errno == errno.ENOSPC
        raise WorkError(
            f"{f'No space is left in {config.output}' if no_space else 'The selection stopped'}: {error}. Finished "
            f"work is kept. {'Free some space, then run' if no_space else 'Run'} the same command again to continue."
        ) from error
    print(describe(funnel))
    files = len(funnel["outputs"])
    written = f"{counted(files, 'file')} in {config.output}"
    print(f"{written} ({time.monotonic() - start:.1f} s). See {config.output / FUNNEL_NAME}.")


main = console(run)

if __name__ == "__main__":
    main()
