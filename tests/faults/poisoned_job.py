"""`python -m precompute` with a decoder that some pictures kill: `python -m tests.faults.poisoned_job ARGUMENTS`."""

import functools
import sys
from typing import Any

import precompute.job
from precompute.__main__ import main
from shards.format.receipts import Receipt


def encode_with_poison(*arguments: Any, **named: Any) -> Receipt:
    """Runs in a Ray worker, to which it goes by value, as it is this script's own."""
    import precompute.encode.shard
    import precompute.encode.worker
    from tests.faults.decoders import poisoned

    precompute.encode.worker.encode_shard = functools.partial(precompute.encode.shard.encode_shard, decode=poisoned)
    return precompute.encode.worker.encode_on_worker(*arguments, **named)


if __name__ == "__main__":
    assert sys.argv[0].endswith("poisoned_job.py")
    precompute.job.encode_on_worker = encode_with_poison
    main()
