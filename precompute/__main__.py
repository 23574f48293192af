"""Stage 1: tars of captioned pictures → a latents root.

examples:
  python -m precompute --config configs/precompute.yaml --shards 00000-00099
  python -m precompute --config configs/precompute.yaml --input s3://bucket/tars --workers.num_gpus 0

further commands, each with a --help of its own:
  python -m precompute.select      LAION's metadata → the rows worth downloading
  python -m precompute.download    those rows → webdataset tars, each checked
  python -m precompute.preview     a root's latents → pictures on a contact sheet
"""

import argparse
import os
import sys

from precompute.cluster.job import RANK_VARIABLES, JobResult, choose_shards, not_committed, run_job
from precompute.cluster.nodes import start_ray
from precompute.config import PrecomputeConfig, describe_encoding, with_absolute_paths
from precompute.input.tars import list_shards, say_what_is_unchecked
from shards.base.config import load_config
from shards.base.errors import Preempted, WorkError, exit_code_of
from shards.open import open_store
from shards.root.commit import sweep_attempts
from shards.root.index import write_indexes
from shards.root.shared import check_root, check_rules, create_root


def run(arguments: list[str]) -> None:
    """Stage 1 for the shards asked for."""
    parser = argparse.ArgumentParser(prog="precompute", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    options, overrides = parser.parse_known_args(arguments)
    config = with_absolute_paths(load_config(PrecomputeConfig, options.config, overrides, "precompute", __doc__))

    # all that can be wrong with the request is found before anything is written
    shards = choose_shards(config.shards, list_shards(config.input))
    encoding = describe_encoding(config)
    store = open_store(config.output)
    check_root(store, encoding)
    check_rules(store, config.rules)

    waiting = not_committed(shards, config, store)
    if waiting:
        say_what_is_unchecked(config.input, waiting)
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        start_ray(config.workers)

    create_root(store, encoding)
    try:
        result = run_job(waiting, config, encoding) if waiting else JobResult()
    finally:  # what is committed can be read, however the job ended
        sweep_attempts(store, config.workers.scratch)
        samples = write_indexes(store)

    taken_in, encoded = (sum(getattr(r, name) for r in result.done) for name in ("samples_in", "encoded"))
    print(
        f"{len(result.done)} shards encoded ({taken_in} samples in, {encoded} accepted, {taken_in - encoded} rejected)"
        f", {len(shards) - len(waiting)} had been done before, {len(result.failed)} failed. {config.output} now holds "
        + (", ".join(f"{count} samples in {bucket}" for bucket, count in samples.items()) or "nothing")
        + "."
    )
    if result.left:
        raise Preempted(
            f"told to leave, {len(result.left)} shards before the end. What is committed stays; the same command again "
            f"goes on."
        )
    if result.failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(result.failed.items()))
        raise WorkError(
            f"{len(result.failed)} of {len(shards)} shards failed ({reasons}). The others are committed; "
            f"the same command again tries just these."
        )


def main() -> None:
    """Console entry point."""
    sys.exit(exit_code_of(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
