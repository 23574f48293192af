"""The projections of text latents that a job uses: those of an existing root, or new ones from a sample of captions."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from cluster.fleet import Done, Failed, Fleet, FleetConfig, News
from cluster.start import start_ray
from precompute.config import PrecomputeConfig, groups_to_project, make_recipe
from precompute.encode.projection import learn_on_worker
from precompute.encode.recipe import Recipe
from precompute.input.find import choose_units
from precompute.input.numbering import Found
from precompute.input.table import TableConfig
from precompute.input.unit import Unit
from shards.base.device import worker_device
from shards.base.errors import Preempted, WorkError
from shards.base.store import Store
from shards.derive.conversion import plan_conversion
from shards.derive.projection import learn_from_root
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.projection import Rows, names_in, project_texts, sample_order
from shards.format.towers import Projection, TextTower
from shards.open import open_store
from shards.root.provenance import source_sha256
from shards.root.shared import check_root

MAX_SAMPLED_UNITS = 64
"""Maximum number of units from which the sample of captions is taken."""


def projected(
    config: PrecomputeConfig, encoding: EncodingRecord, found: Found | None, tables: tuple[TableConfig, ...]
) -> EncodingRecord:
    """Return the encoding with the projections of text latents that the config requests: those of the existing root,
    of `text.projection`, or of the source, or else new ones, which are computed on a worker.

    Raises:
        RequestError: the towers cannot be projected as requested.
        WorkError: the projections could not be computed.
    """
    store, roots = open_store(config.output), {}
    like = None if config.text.projection is None else EncodingRecord.load(open_store(config.text.projection)).texts
    if like is not None:
        roots[str(config.text.projection)] = like
    groups = groups_to_project(config, encoding.texts, like)
    if not groups:
        return encoding
    if config.source is not None:
        roots[str(config.source)] = EncodingRecord.load(open_store(config.source)).texts

    def learn(texts: dict[str, TextTower], missing: dict[Rows, int]) -> dict[str, Projection]:
        whole = encoding.model_copy(update={"texts": texts})
        check_root(store, whole)
        if found is not None:
            units = found.units(store, is_final=False)
            choose_units(config.shards, units)  # fails now if one of them does not exist
            start_ray(config.workers)
            learned = learn_projections(units, make_recipe(config, whole, None, tables), missing, config.workers)
        else:
            assert config.source is not None
            learned = learn_from_source(config, whole, open_store(config.source), missing, tables)
        if store.size(FILE_NAME) is not None:  # another job has created the root in the meantime
            return {name: t.projection for name, t in EncodingRecord.load(store).texts.items() if t.projection}
        return learned

    own = (str(config.output), EncodingRecord.load(store).texts) if store.size(FILE_NAME) is not None else None
    return encoding.model_copy(update={"texts": project_texts(encoding.texts, groups, own, roots, learn)})


def learn_from_source(
    config: PrecomputeConfig,
    whole: EncodingRecord,
    source: Store,
    groups: dict[Rows, int],
    tables: tuple[TableConfig, ...],
) -> dict[str, Projection]:
    """Compute projections for a root to be derived: from the states that the source stores or, for towers that encode
    captions anew, from a sample of these captions.

    Args:
        whole: the new root's encoding, in which the towers of `groups` are unprojected.
    """
    conversion = plan_conversion(EncodingRecord.load(source), whole, may_encode=True)
    encoded = {
        rows: width for rows, width in groups.items() if conversion.reencoded & {name for row in rows for name in row}
    }
    stored = {rows: width for rows, width in groups.items() if rows not in encoded}
    learned = learn_from_root(source, conversion, stored) if stored else {}
    if encoded:
        start_ray(config.workers)
        learned |= learn_projections([], make_recipe(config, whole, conversion, tables), encoded, config.workers)
    return learned


def learn_projections(
    units: Sequence[Unit], recipe: Recipe, groups: Mapping[Rows, int], workers: FleetConfig
) -> dict[str, Projection]:
    """Compute projections of text latents on one worker, from a sample of the captions of `units` or of the recipe's
    source. Ray must be running.

    Args:
        recipe: a recipe in which the towers of `groups` are unprojected.
        groups: towers that share a projection → number of dimensions.

    Raises:
        WorkError: the projections could not be computed.
        Preempted: the job was stopped.
    """
    widths = ", ".join(f"{names_in(rows)} onto {width}" for rows, width in groups.items())
    print(f"Encoding a sample of captions to choose the dimensions to store: {widths}.", file=sys.stderr, flush=True)
    work = partial(
        learn_on_worker,
        recipe=recipe,
        groups=groups,
        device=worker_device(workers.num_gpus),
        num_cpus=workers.num_cpus,
        source=source_sha256(),
    )
    order = {name: place for place, name in enumerate(sample_order(unit.name for unit in units))}
    chosen = sorted(units, key=lambda unit: order[unit.name])[:MAX_SAMPLED_UNITS]
    for event in Fleet(workers, work, [("projection", chosen)], 1):
        match event:
            case Done(result=projections):
                return projections
            case Failed(which=which, failure=failure, again=True):
                print(f"projection: {which}: {failure.text}", file=sys.stderr, flush=True)
            case Failed(failure=failure):
                raise WorkError(f"The projection that `text.width` requests could not be computed: {failure.line}")
            case News(text=text):
                print(text, file=sys.stderr, flush=True)
    raise Preempted("Stopped by a signal before anything was encoded. Run the same command again.")
