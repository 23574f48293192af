"""`python -m precompute` with a decoder that some pictures kill: `python -m tests.faults.poisoned_job ARGUMENTS`."""

import functools
import sys

import ray

import precompute.cluster.job
from precompute.__main__ import main
from precompute.config import PrecomputeConfig
from precompute.input.tars import InputShard
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt


def encode_with_poison(
    shard: InputShard, config: PrecomputeConfig, encoding: EncodingRecord, attempt: int, board: ray.actor.ActorHandle
) -> Receipt:
    """Runs in a Ray worker, to which it goes by value, as it is this script's own."""
    import precompute.cluster.job
    import precompute.encode.shard
    from tests.faults.decoders import poisoned

    precompute.cluster.job.encode_shard = functools.partial(precompute.encode.shard.encode_shard, decode=poisoned)
    return precompute.cluster.job.encode_on_worker(shard, config, encoding, attempt, board)


if __name__ == "__main__":
    assert sys.argv[0].endswith("poisoned_job.py")
    precompute.cluster.job.encode_on_worker = encode_with_poison
    main()
