"""`python -m precompute` with a decoder that some pictures kill: `python -m tests.faults.poisoned_job ARGUMENTS`."""

import sys
from dataclasses import replace
from typing import Any

import precompute.job.run
from cluster.actor import Report
from precompute.__main__ import main
from precompute.encode.recipe import Recipe
from precompute.encode.worker import encode_on_worker
from precompute.input.tars import TarUnit
from shards.root.committed import TarReceipts
from tests.faults.decoders import poisoned


def encode_with_poison(tar: TarUnit, attempt: int, report: Report, recipe: Recipe, **options: Any) -> TarReceipts:
    """Encode with the poisoned decoder in a Ray worker. Ray pickles this function by value, because it is in the main
    script."""
    return encode_on_worker(tar, attempt, report, replace(recipe, decode=poisoned), **options)


if __name__ == "__main__":
    assert sys.argv[0].endswith("poisoned_job.py")
    setattr(precompute.job.run, "encode_on_worker", encode_with_poison)  # noqa: B010
    main()
