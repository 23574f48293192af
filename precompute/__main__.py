"""Stage 1: encode webdataset tars of captioned images into a latents root.

examples:
  python -m precompute --config configs/precompute.yaml --shards 00000-00099
  python -m precompute --config configs/precompute.yaml --input s3://bucket/tars --workers.num_gpus 0

other commands (each has its own --help):
  python -m precompute.select      select rows of LAION metadata to download
  python -m precompute.download    download selected rows into verified webdataset tars
  python -m precompute.preview     decode some latents from a root into a contact sheet
"""

import shards.base.interrupt  # noqa: F401

# isort: split

from collections.abc import Sequence

from cluster.start import precision_on_worker, start_ray
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.input.tars import Named, choose_tars, list_tars, note_unverifiable
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
    """Run stage 1 on the requested tars."""
    config = load_from_args(PrecomputeConfig, arguments, "precompute", __doc__)
    config = config.model_copy(update={"precision": resolved_precision(config)})

    # check the whole request before writing anything
    encoding, store = describe_encoding(config), open_store(config.output)
    conversion, tars, waiting = find_work(config, encoding, store)
    if waiting:
        announce(waiting, len(tars), config.to_fill.all)
        if config.source is None:
            note_unverifiable(config.input, waiting)
        start_ray(config.workers)

    if conversion is None:
        create_root(store, encoding)
        record_rules(store, config.to_fill.rules)
    else:
        encoding = conversion.target
    with PeriodicPublisher(store, config.index.every) as publishing:
        try:
            recipe = make_recipe(config, encoding, conversion)
            ledger = run_job(waiting, recipe, config.output, config.workers) if waiting else Ledger(0)
        finally:
            sweep_attempts(store)
            sweep_scratch(config.workers.scratch)
        # listing a large root takes minutes, too long for a job that was asked to stop
        manifest = newest_manifest(store) if ledger.left else publishing.finish()
    if manifest is not None and not ledger.left:
        write_streaming(store, manifest)
    conclude(ledger, len(tars), str(config.output), manifest)


def resolved_precision(config: PrecomputeConfig) -> Precision:
    """Return the precision to use. `auto` selects the precision of the root or its source or, if neither exists yet,
    the best one for the workers. Prints what `auto` selects, or a warning if the workers' CPU emulates the configured
    precision."""
    precision = config.precision
    if precision == "auto":
        for place in (config.output, config.source):
            if place is not None and (record := open_store(place).read_many([FILE_NAME])):
                precision = EncodingRecord.parse(record[FILE_NAME], str(place)).compute_dtype
                break
    return precision_on_worker(precision, config.workers)


def find_work(
    config: PrecomputeConfig, encoding: EncodingRecord, store: Store
) -> tuple[Conversion | None, Sequence[Named], Sequence[Named]]:
    """Check the request against the root and the tars, or raise RequestError. Return the conversion of the source's
    data (None without a source), the requested tars, and the requested tars that are not committed yet."""
    check_root(store, encoding)
    check_rules(store, config.to_fill.rules)
    if config.source is None:
        tars = choose_tars(config.shards, list_tars(config.input))
        return None, tars, not_committed(tars, config.to_fill.all, store)
    rules = {str(bucket): rule for bucket, rule in config.to_fill.rules.items()}
    conversion, found = prepare(open_store(config.source), store, encoding, rules, may_encode=True)
    sources = choose_tars(config.shards, found)
    return conversion, sources, missing(store, sources)


main = console(run)

if __name__ == "__main__":
    main()
