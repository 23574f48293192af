"""The projections of text latents that a job uses: those of an existing root, or new ones from calibration captions."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from cluster.fleet import Done, Failed, Fleet, FleetConfig, News
from cluster.start import start_ray
from precompute.config import PrecomputeConfig, groups_to_project, make_recipe
from precompute.encode.projection import compute_on_worker
from precompute.encode.recipe import Recipe
from precompute.input.find import choose_units
from precompute.input.numbering import Found
from precompute.input.table import TableConfig
from precompute.input.unit import Unit
from precompute.job.run import worker_settings
from shards.base.errors import Preempted, RequestError, WorkError
from shards.base.store import Place, Store
from shards.derive.conversion import plan_conversion
from shards.derive.job import check_request
from shards.derive.projection import STOPPED, compute_from_root
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.projection import TowerGroup, hash_order, project_texts, towers_in
from shards.format.towers import Projection, TextTower
from shards.open import open_store
from shards.root.shared import check_root

MAX_CALIBRATION_UNITS = 64
"""Maximum number of units from which calibration captions are taken."""


def resolve_projections(
    config: PrecomputeConfig, encoding: EncodingRecord, found: Found | None, tables: tuple[TableConfig, ...]
) -> EncodingRecord:
    """Return the encoding with the projections of text latents that the config requests. They come from the first of
    these that has them: the existing root, `text.projection`, the source. Otherwise they are computed.

    Raises:
        RequestError: the towers cannot be projected as requested.
        WorkError: the projections could not be computed.
    """
    store = open_store(config.output)
    like, source = (_root(place) if place is not None else None for place in (config.text.projection, config.source))
    groups = groups_to_project(config, encoding.texts, like[1] if like else None)
    if not groups:
        _refuse_projected(store, encoding)
        return encoding

    def compute(texts: dict[str, TextTower], missing: dict[TowerGroup, int]) -> dict[str, Projection]:
        unprojected = encoding.model_copy(update={"texts": texts})
        check_root(store, unprojected)
        if found is not None:
            units = found.units(store, is_final=False)
            choose_units(config.shards, units)  # fail early if a requested unit does not exist
            start_ray(config.workers)
            recipe = make_recipe(config, unprojected, None, tables)
            return compute_projections(units, recipe, missing, config.workers)
        assert config.source is not None
        buckets = {str(bucket): rule for bucket, rule in config.to_fill.rules.items()}
        check_request(open_store(config.source), store, buckets)
        return compute_from_source(config, unprojected, open_store(config.source), missing, tables)

    existing = _root(config.output) if store.size(FILE_NAME) is not None else None
    texts = project_texts(encoding.texts, groups, existing, like, source, compute)
    if existing is None and store.size(FILE_NAME) is not None:  # another job has created the root in the meantime
        texts = project_texts(encoding.texts, groups, _root(config.output), None, None, compute)
    return encoding.model_copy(update={"texts": texts})


def _refuse_projected(store: Store, encoding: EncodingRecord) -> None:
    """Raise RequestError if the root stores projected states of a text tower, although none are requested."""
    if store.size(FILE_NAME) is None:
        return
    stored = EncodingRecord.load(store).texts
    widths = [f"{name} {tower.width}" for name, tower in stored.items() if tower.projection and name in encoding.texts]
    if widths:
        raise RequestError(
            f"{store.where()} stores projected text latents (dimensions: {', '.join(widths)}), but `text.width` is not "
            f"set, and the encoding of a root cannot change. Set `text.width` or `texts.NAME.width` as in the job that "
            f"created the root, or write to a new root."
        )


def _root(place: Place) -> tuple[str, dict[str, TextTower]]:
    return str(place), EncodingRecord.load(open_store(place)).texts


def compute_from_source(
    config: PrecomputeConfig,
    unprojected: EncodingRecord,
    source: Store,
    groups: dict[TowerGroup, int],
    tables: tuple[TableConfig, ...],
) -> dict[str, Projection]:
    """Compute projections for a root to be derived: from the states that the source stores or, for towers that encode
    captions again, from calibration captions.

    Args:
        unprojected: the new root's encoding, in which the towers of `groups` are unprojected.
    """
    conversion = plan_conversion(EncodingRecord.load(source), unprojected, may_encode=True)
    encoded = {group: width for group, width in groups.items() if not conversion.reencoded.isdisjoint(towers_in(group))}
    stored = {group: width for group, width in groups.items() if group not in encoded}
    computed = compute_from_root(source, conversion, stored) if stored else {}
    if encoded:
        start_ray(config.workers)
        recipe = make_recipe(config, unprojected, conversion, tables)
        computed |= compute_projections([], recipe, encoded, config.workers)
    return computed


def compute_projections(
    units: Sequence[Unit], recipe: Recipe, groups: Mapping[TowerGroup, int], workers: FleetConfig
) -> dict[str, Projection]:
    """Compute projections of text latents on one worker, from calibration captions of `units` or of the recipe's
    source. Ray must be running.

    Args:
        recipe: a recipe in which the towers of `groups` are unprojected.
        groups: group of towers → number of dimensions.

    Raises:
        WorkError: the projections could not be computed.
        Preempted: the job was stopped.
    """
    widths = ", ".join(f"{' and '.join(towers_in(group))} onto {width}" for group, width in groups.items())
    print(f"Encoding calibration captions to compute the projection: {widths} dimensions.", file=sys.stderr, flush=True)
    work = partial(compute_on_worker, recipe=recipe, groups=groups, **worker_settings(workers))
    order = {name: place for place, name in enumerate(hash_order(unit.name for unit in units))}
    chosen = sorted(units, key=lambda unit: order[unit.name])[:MAX_CALIBRATION_UNITS]
    found: dict[str, Projection] | None = None
    for event in Fleet(workers, work, [("projection", chosen)], 1):  # to the end, so that the worker is released
        match event:
            case Done(result=projections):
                found = projections
            case Failed(which=which, failure=failure, again=True):
                print(f"projection: {which}: {failure.text}", file=sys.stderr, flush=True)
            case Failed(failure=failure):
                raise WorkError(
                    f"The projection for `text.width` could not be computed: {failure.line} Nothing was written. Fix "
                    f"the cause and run the same command again, or use the projection of an existing root "
                    f"(`text.projection`)."
                )
            case News(text=text):
                print(text, file=sys.stderr, flush=True)
    if found is not None:
        return found
    raise Preempted(STOPPED)
