"""`python -m shards derive ROOT OUT`: derive a root from an existing root, using several processes."""

import functools
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing

import torch

from shards.base.errors import Preempted, RequestError, WorkError
from shards.base.pool import run_each
from shards.base.progress import Progress
from shards.base.scratch import private_folder, sweep, use_scratch
from shards.base.stop import StopSignal
from shards.base.store import Store
from shards.base.table import counted
from shards.derive.conversion import Changes, Conversion, apply_changes, plan_conversion
from shards.derive.part import Derivation, SourceTar, counts_tokens, derive_tar, kept_uncond, load_tokenizer
from shards.derive.projection import compute_from_root
from shards.format.buckets import Bucket
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.projection import TowerGroup, groups_of, inherited_widths, project_texts
from shards.format.receipts import ORIGIN, Receipt, active_parts, generations
from shards.format.towers import Projection, TextTower
from shards.open import open_store
from shards.root.commit import recall
from shards.root.committed import TarReceipts, committed_parts, list_commits, read_receipts
from shards.root.exclusions import add_exclusion, exclusion_ids, load_exclusion
from shards.root.index import write_streaming
from shards.root.manifest import Manifest
from shards.root.publish import PeriodicPublisher
from shards.root.shared import check_root, check_writable, create_root, load_uncond, record_rules, write_uncond

PUBLISH_SECONDS = 300.0


def derive(source: Store, target: Store, changes: Changes, buckets: list[str] | None, processes: int) -> Manifest:
    """Derive `target` from `source`, and return the target's manifest. The target is either a new root, or a root left
    by an interrupted run with the same changes.

    Raises RequestError if the source cannot be converted as requested, the target is an unrelated root or the temporary
    folder does not support file locks, WorkError if parts of the source are damaged (all other parts are derived) or a
    worker process was killed, and Preempted after a stop signal.
    """
    check_writable(target)
    with private_folder():  # if the temporary folder does not support file locks, fail here rather than in the workers
        pass
    requested = None if buckets is None else dict.fromkeys(buckets)
    encoding = apply_changes(EncodingRecord.load(source), changes)
    encoding = resolve_projections(source, target, encoding, changes, requested)
    conversion, tars = prepare(source, target, encoding, requested)
    remaining = missing(target, tars)
    with PeriodicPublisher(target, PUBLISH_SECONDS) as publishing:
        try:
            failed = _run(source, target, conversion, remaining, processes)
        except BrokenProcessPool as error:
            raise WorkError(
                "A worker process was killed while deriving tars, possibly because the machine ran out of memory. "
                "Committed parts are kept. Run the same command again to resume, with fewer --processes if memory is "
                "short."
            ) from error
        finally:
            sweep(target, None)
        manifest = publishing.finish()
    write_streaming(target, manifest)
    if failed:
        named = "; ".join(text.removesuffix(".") for text in failed[:5]) + ("; …" if len(failed) > 5 else "")
        raise WorkError(
            f"{len(failed)} of {counted(len(tars), 'tar')} could not be derived: {named}. All other tars are "
            f"committed. Run the same command again to retry only the failed tars."
        )
    return manifest


def prepare(
    source: Store,
    target: Store,
    encoding: EncodingRecord,
    buckets: Mapping[str, str | None] | None,
    may_encode: bool = False,
) -> tuple[Conversion, list[SourceTar]]:
    """Check that the source can be converted as requested, and create the target's shared files.

    The empty caption's text latents are written only if no text tower is re-encoded. Target parts whose source part has
    since been recalled are recalled as well. `buckets` maps each wanted bucket to the rule that must have filled it
    (None accepts any rule). If `buckets` is None, all of the source's buckets are derived.

    Return the conversion, and the tars of the source with parts in these buckets. Raises RequestError if the source
    cannot be converted as requested, or if the target is an unrelated root or the source itself.
    """
    check_request(source, target, buckets)
    conversion = plan_conversion(EncodingRecord.load(source), encoding, may_encode)
    check_root(target, encoding)
    for name in conversion.target.texts.keys() - conversion.reencoded:
        stored = conversion.source.texts[name]
        if counts_tokens(stored, conversion.target.texts[name]):
            load_tokenizer(stored.tokenizer.name, stored.tokenizer.sha256)  # fails here rather than in the workers
    parts = active_parts(list_commits(source))
    rules = rules_of(source, parts)
    wanted = dict.fromkeys(rules) if buckets is None else buckets
    empty = load_uncond(source)
    create_root(target, encoding)
    for id in exclusion_ids(source):  # they also apply to tars that are added later, and to training runs
        add_exclusion(target, load_exclusion(source, id))
    record_rules(target, {Bucket.parse(bucket): rules[bucket] for bucket in wanted})
    if not conversion.reencoded:
        write_uncond(target, kept_uncond(empty, conversion))
    if old := superseded(source, target):
        why = f"its source part in {source.where()} was recalled"
        recall(target, {receipt.name: receipt.token for receipt in old}, why)
        print(f"Recalled {counted(len(old), 'part')} of {target.where()} to match the recalls in {source.where()}.")
    return conversion, source_tars(parts, wanted)


def resolve_projections(
    source: Store,
    target: Store,
    encoding: EncodingRecord,
    changes: Changes,
    buckets: Mapping[str, str | None] | None,
) -> EncodingRecord:
    """Return the target's encoding with the projections that `changes` requests. They come from the first of these that
    has them: the existing target, `text_projection`, the source. Otherwise they are computed.

    Args:
        buckets: the buckets to derive; None: all.

    Raises:
        RequestError: the states cannot be projected as requested.
        Preempted: after a stop signal.
    """
    texts = encoding.texts
    default = {name: changes.text_width["*"] for name in texts if "*" in changes.text_width and texts[name].states}
    widths = default | {name: width for name, width in changes.text_width.items() if name != "*"}
    joint, like = changes.text_joint, None
    if changes.text_projection is not None:
        like = (str(changes.text_projection), EncodingRecord.load(open_store(changes.text_projection)).texts)
        inherited, inherited_joint = inherited_widths(texts, like[1], like[0])
        widths, joint = inherited | widths, joint or inherited_joint
    if joint and not widths:
        listed = " ".join(map(",".join, joint))
        raise RequestError(
            f"--text.joint {listed} lists text towers to project jointly, but no projection was requested. Add "
            f"--text.width or --text.projection, or leave --text.joint out."
        )
    if not widths:
        return encoding
    stored = EncodingRecord.load(source)

    def compute(texts: dict[str, TextTower], groups: Mapping[TowerGroup, int]) -> dict[str, Projection]:
        check_request(source, target, buckets)
        conversion = plan_conversion(stored, encoding.model_copy(update={"texts": texts}))
        print("Computing the projection from stored states.", file=sys.stderr, flush=True)
        with StopSignal() as stop:
            return compute_from_root(source, conversion, groups, buckets, lambda: stop.received)

    own = (str(source.where()), stored.texts)
    existing = (str(target.where()), EncodingRecord.load(target).texts) if target.size(FILE_NAME) is not None else None
    groups = groups_of(texts, widths, joint)
    return encoding.model_copy(update={"texts": project_texts(texts, groups, existing, like, own, compute)})


def source_tars(parts: Mapping[tuple[str, str], str], buckets: Container[str]) -> list[SourceTar]:
    """Select, from the result of `active_parts`, the tars with parts in these buckets. Return them ordered by name."""
    found: dict[str, dict[str, str]] = {}
    for (tar, bucket), name in parts.items():
        if bucket in buckets:
            found.setdefault(tar, {})[bucket] = name
    return [SourceTar(tar, tuple(names.values()), tuple(names)) for tar, names in found.items()]


def rules_of(source: Store, parts: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Return a dict from bucket to rule. One receipt per bucket is read, because all receipts of a bucket have the same
    rule."""
    one_per_bucket = {bucket: name for (_, bucket), name in parts.items()}
    return {receipt.bucket: receipt.rule for receipt in read_receipts(source, list(one_per_bucket.values()))}


def superseded(source: Store, target: Store) -> list[Receipt]:
    """Return the target's active receipts whose source part was recalled.

    Parts whose source part was re-encoded with identical content are not returned.
    """
    targets, sources = list_commits(target), list_commits(source)
    recalled = {part for part, (_, tombstones) in generations(sources).items() if tombstones}

    def active(store: Store, listed: Iterable[str]) -> Iterator[Receipt]:
        return read_receipts(store, [name for part, name in active_parts(listed).items() if part in recalled])

    current = {(receipt.tar, receipt.bucket): receipt.folder for receipt in active(source, sources)}
    id = EncodingRecord.load(source).id
    return [
        receipt
        for receipt in active(target, targets)
        if (origin := str(receipt.settings.get(ORIGIN, ""))).startswith(f"{id}/")
        and origin != f"{id}/{current.get((receipt.tar, receipt.bucket))}"
    ]


def check_request(source: Store, target: Store, buckets: Mapping[str, str | None] | None) -> None:
    """Check that a root can be derived at `target` from these buckets of the source, whatever its encoding.

    Raises:
        RequestError: the target is the source, or neither empty nor a root; or the source lacks a bucket, or filled it
            by a different rule.
    """
    if source.where() == target.where():
        raise RequestError(
            f"{source.where()} cannot be derived from itself, because latents are never replaced. Choose a different "
            f"target root."
        )
    if target.size(FILE_NAME) is None:
        check_root(target, EncodingRecord.load(source))
    if buckets is not None:
        check_buckets(source, rules_of(source, active_parts(list_commits(source))), buckets)


def check_buckets(source: Store, rules: Mapping[str, str], wanted: Mapping[str, str | None]) -> None:
    """Raise RequestError if the source lacks a wanted bucket, or filled it by a different rule than the wanted one."""
    if missing := wanted.keys() - rules.keys():
        raise RequestError(
            f"{source.where()} has no samples in {' or '.join(sorted(missing))}. Buckets with samples: "
            f"{', '.join(sorted(rules)) or 'none'}. Deriving does not decode images, so to add a bucket, encode the "
            f"tars instead."
        )
    for bucket, rule in wanted.items():
        if rule not in (None, rules[bucket]):
            raise RequestError(
                f"{source.where()} fills bucket {bucket} by the rule `{rules[bucket]}`, but this run would use "
                f"`{rule}`. Use the `buckets` and `aspect` settings that the source was created with."
            )


def missing(target: Store, tars: list[SourceTar]) -> list[SourceTar]:
    """Return the tars for which the target lacks an active receipt in at least one bucket."""
    done = committed_parts(target)
    return [tar for tar in tars if not {(bucket, tar.name) for bucket in tar.buckets} <= done]


def _run(source: Store, target: Store, conversion: Conversion, tars: list[SourceTar], processes: int) -> list[str]:
    """Derive each tar; return one message per failed tar. Raises BrokenProcessPool if a worker was killed, and
    Preempted if this process received a stop signal."""
    failed: list[str] = []
    derive_one = functools.partial(_derive_in_process, str(source.where()), str(target.where()), conversion)
    with (
        StopSignal() as stop,
        Progress("derive", "tars", len(tars)) as progress,
        closing(
            run_each(derive_one, tars, processes, initializer=_begin, should_stop=lambda: stop.received)
        ) as finished,
    ):
        for tar, future in finished:
            progress.advance()
            error = future.exception()
            if isinstance(error, BrokenProcessPool) and stop.received:
                break  # a scheduler signals every process of a job, so the signal may have killed the worker
            if isinstance(error, RequestError | WorkError | OSError):
                failed.append(f"{tar.name}: {error}")
                progress.say(failed[-1])
            elif error is not None:
                raise error
        if stop.received:
            raise Preempted(
                "Stopped by a signal before all tars were derived. Committed parts are kept; run the same command "
                "again to resume."
            )
    return failed


def _begin() -> None:
    use_scratch(None)  # so that local copies of parts are swept if this process is killed
    torch.set_num_threads(1)


def _derive_in_process(source: str, target: str, conversion: Conversion, tar: SourceTar) -> TarReceipts:
    return derive_tar(tar, Derivation(open_store(source), open_store(target), conversion))
