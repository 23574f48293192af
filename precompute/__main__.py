"""Stage 1: tars of captioned pictures → a latents root.

examples:
  python -m precompute --config configs/precompute.yaml --shards 00000-00099
  python -m precompute --config configs/precompute.yaml --input s3://bucket/tars --workers.num_gpus 0

further commands, each with a --help of its own:
  python -m precompute.select      LAION's metadata → the rows worth downloading
  python -m precompute.download    those rows → webdataset tars, each checked
  python -m precompute.preview     a root's latents → pictures on a contact sheet
"""

import shards.base.interrupt  # noqa: F401

# isort: split

from collections.abc import Sequence

from precompute.cluster.ray_cluster import precision_on_worker, start_ray
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe, with_absolute_paths
from precompute.input.tars import Named, choose_tars, list_tars, say_what_is_unchecked
from precompute.job.ledger import Ledger
from precompute.job.run import announce, conclude, not_committed, run_job
from shards.base.config import load_from_args
from shards.base.device import Precision
from shards.base.errors import console
from shards.base.scratch import sweep_attempts, sweep_scratch
from shards.base.store import Store
from shards.derive.conversion import Conversion
from shards.derive.job import missing, prepare
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.open import open_store
from shards.root.index import write_streaming
from shards.root.manifest import newest_manifest
from shards.root.publish import PeriodicPublisher
from shards.root.shared import check_root, check_rules, create_root, record_rules


def run(arguments: list[str]) -> None:
    """Stage 1 for the tars asked for."""
    config = with_absolute_paths(load_from_args(PrecomputeConfig, arguments, "precompute", __doc__))
    config = config.model_copy(update={"precision": resolved_precision(config)})

    # all that can be wrong with the request is found before anything is written
    encoding, store = describe_encoding(config), open_store(config.output)
    how, tars, waiting = find_work(config, encoding, store)
    if waiting:
        announce(waiting, len(tars), config.to_fill.all)
        if config.source is None:
            say_what_is_unchecked(config.input, waiting)
        start_ray(config.workers)

    if how is None:
        create_root(store, encoding)
        record_rules(store, config.to_fill.rules)
    else:
        encoding = how.target
    with PeriodicPublisher(store, config.index.every) as publishing:
        try:
            recipe = make_recipe(config, encoding, how)
            ledger = run_job(waiting, recipe, config.output, config.workers) if waiting else Ledger(0)
        finally:
            sweep_attempts(store)
            sweep_scratch(config.workers.scratch)
        # who tells a job to leave does not wait until all is listed: what was published last stays
        manifest = newest_manifest(store) if ledger.left else publishing.finish()
    if manifest is not None and not ledger.left:
        write_streaming(store, manifest)
    conclude(ledger, len(tars), str(config.output), manifest)


def resolved_precision(config: PrecomputeConfig) -> Precision:
    """Return the precision given; or for `auto`, that of the root or of its source, or what suits a worker's device.

    Prints one line about what `auto` became, or a warning if the workers' CPU emulates the given precision.
    """
    asked = config.precision
    if asked == "auto":
        for place in (config.output, config.source):
            if place is not None and (record := open_store(place).read_many([FILE_NAME])):
                asked = EncodingRecord.parse(record[FILE_NAME], str(place)).compute_dtype
                break
    return precision_on_worker(asked, config.workers)


def find_work(
    config: PrecomputeConfig, encoding: EncodingRecord, store: Store
) -> tuple[Conversion | None, Sequence[Named], Sequence[Named]]:
    """How the source's numbers become the job's, if there is a source; the tars asked for; those that are left.

    Raises:
        RequestError: tars or root do not fit what is asked for.
    """
    check_root(store, encoding)
    check_rules(store, config.to_fill.rules)
    if config.source is None:
        tars = choose_tars(config.shards, list_tars(config.input))
        return None, tars, not_committed(tars, config.to_fill.all, store)
    rules = {str(bucket): rule for bucket, rule in config.to_fill.rules.items()}
    how, found = prepare(open_store(config.source), store, encoding, rules, may_encode=True)
    sources = choose_tars(config.shards, found)
    return how, sources, missing(store, sources)


main = console(run)

if __name__ == "__main__":
    main()
