"""`python -m precompute` with a decoder that some pictures kill: `python -m tests.faults.poisoned_job ARGUMENTS`."""

import functools
import sys

import ray

import precompute.job
from precompute.__main__ import main
from precompute.config import PrecomputeConfig
from precompute.tars import InputShard
from shards.encoding import EncodingRecord
from shards.receipts import Receipt


def encode_with_poison(
    shard: InputShard, config: PrecomputeConfig, encoding: EncodingRecord, attempt: int, board: ray.actor.ActorHandle
) -> Receipt:
    """Runs in a Ray worker, to which it goes by value, as it is this script's own."""
    import precompute.job
    import precompute.shard
    from tests.faults.decoders import poisoned

    precompute.job.encode_shard = functools.partial(precompute.shard.encode_shard, decode=poisoned)
    return precompute.job.encode_on_worker(shard, config, encoding, attempt, board)


if __name__ == "__main__":
    assert sys.argv[0].endswith("poisoned_job.py")
    precompute.job.encode_on_worker = encode_with_poison
    main()
