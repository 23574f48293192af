"""Stage 1: encode captioned images (tars, folders, parquet files or MDS datasets) into a latents root.

examples:
  python -m precompute --config configs/precompute.yaml --shards 00000-00099
  python -m precompute --config configs/precompute.yaml --input s3://bucket/tars --workers.num_gpus 0

other commands (each has its own --help):
  python -m precompute.select      select rows of a dataset of URLs to download
  python -m precompute.download    download selected rows into verified webdataset tars
  python -m precompute.preview     write a page that shows a root's images, captions and rejects
"""

import shards.base.interrupt  # noqa: F401

# isort: split

import sys
from collections.abc import Sequence

from cluster.start import precision_on_worker, start_ray
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.input.find import Named, choose_caption_fields, choose_units, find_input
from precompute.input.numbering import Found
from precompute.input.table import CaptionSource, describe_tables
from precompute.job.ledger import Ledger
from shards.base.config import load_from_args
from shards.base.errors import RequestError, WorkError, console
from shards.base.scratch import sweep
from shards.base.store import Store
from shards.derive.job import missing, prepare
from shards.format.encoding import FILE_NAME, TABLE_PREFIX, EncodingRecord
from shards.open import open_store
from shards.root.index import write_streaming
from shards.root.manifest import Manifest, newest_manifest
from shards.root.publish import PeriodicPublisher
from shards.root.shared import check_root, check_rules, check_writable, create_root, record_rules


def run(arguments: list[str]) -> None:
    """Run stage 1 on the requested units."""
    config = load_from_args(PrecomputeConfig, arguments, "precompute", __doc__)

    # imported once the config is valid, because these modules import diffusers, which takes seconds
    from precompute.job.projection import resolve_projections
    from precompute.job.run import announce, conclude, not_committed, other_tars_warning, run_job

    check_writable(open_store(config.output))
    found = find_input(config.input) if config.source is None else None
    config = resolved(config, found)

    # check the whole request before writing anything
    tables = describe_tables(config.captions or (), config.scores)
    encoding, store = describe_encoding(config, tables), open_store(config.output)
    encoding = resolve_projections(config, encoding, found, tables)
    wanted: Sequence[Named]
    waiting: Sequence[Named]
    check_root(store, encoding)
    check_rules(store, config.to_fill.rules)
    if found is None:
        assert config.source is not None
        rules = {str(bucket): rule for bucket, rule in config.to_fill.rules.items()}
        conversion, sources = prepare(open_store(config.source), store, encoding, rules, may_encode=True)
        chosen = choose_units(config.shards, sources)
        wanted, waiting, encoding = chosen, missing(store, chosen), conversion.target
    else:
        conversion = None
        units = found.units(store, is_final=False)
        wanted = chosen_units = choose_units(config.shards, units)
        waiting = not_committed(chosen_units, config.to_fill.all, store)
        if warning := other_tars_warning(chosen_units, waiting, config.to_fill.all[0], store):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    if waiting:
        if found is not None:
            print(found.describe(len(units), encoding.captions), file=sys.stderr, flush=True)
        announce(waiting, len(wanted), config.to_fill.all)
        start_ray(config.workers)

    if found is not None:
        create_root(store, encoding)
        record_rules(store, config.to_fill.rules)
        if waiting:  # another job may have numbered new units since
            wanted = chosen_units = choose_units(config.shards, found.units(store))
            waiting = not_committed(chosen_units, config.to_fill.all, store)
    with PeriodicPublisher(store, config.index.every) as publishing:
        try:
            recipe = make_recipe(config, encoding, conversion, tables)
            ledger = run_job(waiting, recipe, config.output, config.workers) if waiting else Ledger(0)
        finally:
            sweep(store, config.workers.scratch)
        # listing a large root takes minutes, too long for a job that was asked to stop
        manifest = _indexed(store) if ledger.left else publishing.finish()
    if manifest is not None and not ledger.left:
        write_streaming(store, manifest)
    conclude(ledger, len(wanted), str(config.output), manifest)


def _indexed(store: Store) -> Manifest | None:
    """Return the newest manifest, or None if there is none, or if it cannot be read."""
    try:
        return newest_manifest(store)
    except (WorkError, RequestError, OSError) as error:  # a job may be stopped during an outage of its root
        print(f"warning: the root's index cannot be read: {error}", file=sys.stderr, flush=True)
        return None


def resolved(config: PrecomputeConfig, found: Found | None) -> PrecomputeConfig:
    """Return the config with its precision and its caption fields.

    If they are not set, those of the root or its source are used. For a new root, `auto` selects the best precision for
    the workers, and the captions are looked for in the first unit of the input. Prints what was selected, or a warning
    if the workers' CPU emulates the configured precision.
    """
    precision, captions = config.precision, config.captions
    for place in (config.output, config.source):
        if place is not None and (record := open_store(place).read_many([FILE_NAME])):
            encoding = EncodingRecord.parse(record[FILE_NAME], str(place))
            precision = encoding.compute_dtype if precision == "auto" else precision
            captions = captions or _stored_sources(encoding, str(place))
            break
    if captions is None:
        assert found is not None, "a source has caption fields"
        captions = [CaptionSource(field=name) for name in choose_caption_fields(found, config.limits.max_bytes)]
    precision = precision_on_worker(precision, config.workers)
    return config.model_copy(update={"precision": precision, "captions": captions})


def _stored_sources(encoding: EncodingRecord, place: str) -> list[CaptionSource]:
    """Return the caption sources of a root. Raises RequestError if one is a table, whose location is not recorded."""
    if any(name.startswith(TABLE_PREFIX) for name in encoding.captions):
        raise RequestError(
            f"The captions of {place} are from a table ({', '.join(encoding.captions)}), but `captions` is not set. "
            f"Set it as in the job that created the root."
        )
    weights = encoding.caption_weights or (1,) * len(encoding.captions)
    return [CaptionSource(field=n, weight=w) for n, w in zip(encoding.captions, weights, strict=True)]


main = console(run)

if __name__ == "__main__":
    main()
