"""`python -m shards derive ROOT OUT`: all of a root's parts, made of another root's by several processes."""

import multiprocessing
import signal
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

import torch

from shards.base.errors import Preempted, RequestError, WorkError
from shards.base.pool import start_pool
from shards.base.progress import Progress
from shards.base.scratch import sweep_attempts, sweep_scratch, use_scratch
from shards.base.stop import StopSignal
from shards.base.store import Store
from shards.derive.conversion import Changes, Conversion, apply_changes, plan_conversion
from shards.derive.part import Derivation, counts_tokens, derive_tar, kept_uncond, load_tokenizer
from shards.derive.source import SourceTar, list_contents, superseded
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.commit import recall
from shards.root.committed import TarReceipts, committed_parts
from shards.root.exclusions import add_exclusion, exclusion_ids, load_exclusion
from shards.root.index import write_streaming
from shards.root.manifest import Manifest
from shards.root.publish import PeriodicPublisher
from shards.root.shared import check_root, create_root, load_uncond, record_rules, write_uncond

POLL_SECONDS = 0.5
PUBLISH_SECONDS = 300.0


def derive(source: Store, target: Store, changes: Changes, buckets: list[str] | None, processes: int) -> Manifest:
    """Make `target` of `source`: a new root, or one that was begun with the same changes.

    Returns:
        What the target then holds.

    Raises:
        RequestError: the source does not hold what is asked for, or the target is another root.
        WorkError: parts of the source are damaged; all others are derived.
        Preempted: it was told to leave.
    """
    asked = None if buckets is None else dict.fromkeys(buckets)
    how, tars = prepare(source, target, apply_changes(EncodingRecord.load(source), changes), asked)
    left = missing(target, tars)
    with PeriodicPublisher(target, PUBLISH_SECONDS) as publishing:
        try:
            failed = _run(source, target, how, left, processes)
        except BrokenProcessPool as error:
            raise WorkError(
                "A process was killed while tars were derived; for want of memory, perhaps. What is committed stays: "
                "the same command with fewer --processes goes on."
            ) from error
        finally:
            sweep_attempts(target)
            sweep_scratch(None)
        manifest = publishing.finish()
    write_streaming(target, manifest)
    if failed:
        named = "; ".join(failed[:5]) + (" …" if len(failed) > 5 else "")
        raise WorkError(
            f"{len(failed)} of {len(tars)} tars were not derived ({named}). The others are committed; the same command "
            f"again tries just these."
        )
    return manifest


def prepare(
    source: Store,
    target: Store,
    encoding: EncodingRecord,
    buckets: Mapping[str, str | None] | None,
    may_encode: bool = False,
) -> tuple[Conversion, list[SourceTar]]:
    """Hold what is asked for against what the source holds, and make the target's shared files as far as they can be.

    What was derived of parts that the source has recalled since is recalled in the target too.

    Args:
        buckets: those to derive → the rule that each must be filled by, None for any; None: all of the source's.

    Raises:
        RequestError: it does not hold that, or the target is another root, or the same.
    """
    if source.where() == target.where():
        raise RequestError(f"{source.where()} cannot be derived from itself: latents are never replaced. Give another.")
    how = plan_conversion(EncodingRecord.load(source), encoding, may_encode)
    check_root(target, encoding)
    for name in how.target.texts.keys() - how.reencoded:
        if counts_tokens(here := how.source.texts[name], how.target.texts[name]):
            load_tokenizer(here.tokenizer.name, here.tokenizer.sha256)
    held = list_contents(source)
    wanted = dict.fromkeys(held.rules) if buckets is None else buckets
    check_buckets(source, held.rules, wanted)
    empty = load_uncond(source)
    create_root(target, encoding)
    for id in exclusion_ids(source):  # for what is added to the target later, and for runs on it
        add_exclusion(target, load_exclusion(source, id))
    record_rules(target, {Bucket.parse(bucket): held.rules[bucket] for bucket in wanted})
    if not how.reencoded:
        write_uncond(target, kept_uncond(empty.items(), how))
    if old := superseded(source, target):
        recall(target, old, f"{source.where()} has recalled what it was derived from")
        print(f"{len(old)} parts of {target.where()} were derived from parts recalled since: they are recalled too.")
    return how, held.tars(wanted)


def check_buckets(source: Store, rules: Mapping[str, str], wanted: Mapping[str, str | None]) -> None:
    """See that the source has the buckets, filled by these rules.

    Raises:
        RequestError: it has not.
    """
    if missing := wanted.keys() - rules.keys():
        raise RequestError(
            f"{source.where()} holds nothing in {', '.join(sorted(missing))}; its buckets are "
            f"{', '.join(sorted(rules)) or 'none'}. Pictures are not decoded again: encode the tars for that."
        )
    for bucket, rule in wanted.items():
        if rule not in (None, rules[bucket]):
            raise RequestError(
                f"{source.where()} fills its bucket {bucket} by the rule `{rules[bucket]}`, and this run's would be "
                f"`{rule}`. Set `buckets` and `aspect` as it was made with."
            )


def missing(target: Store, tars: list[SourceTar]) -> list[SourceTar]:
    """Those that have not a receipt in force in the target for each of their buckets."""
    done = committed_parts(target)
    return [tar for tar in tars if not {(bucket, tar.name) for bucket in tar.buckets} <= done]


def _run(source: Store, target: Store, how: Conversion, tars: list[SourceTar], processes: int) -> list[str]:
    """Derive each; returns what failed, in words.

    Raises:
        BrokenProcessPool: a process was killed.
        Preempted: this process was told to leave.
    """
    failed: list[str] = []
    with (
        StopSignal() as stop,
        Progress("derive", "tars", len(tars)) as progress,
        start_pool(min(processes, len(tars)) or 1, begin=_begin) as pool,
    ):
        left, running = iter(tars), dict[Future[TarReceipts], SourceTar]()
        try:
            while not stop.received:
                for tar in islice(left, 2 * processes - len(running)):
                    running[pool.submit(_derive_in_process, str(source.where()), str(target.where()), how, tar)] = tar
                if not running:
                    return failed
                for future in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                    tar, error = running.pop(future), future.exception()
                    progress.advance()
                    if isinstance(error, BrokenProcessPool):
                        raise error
                    if isinstance(error, RequestError | WorkError | OSError):
                        failed.append(f"{tar.name}: {error}")
                        progress.say(failed[-1])
                    elif error is not None:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise error
        except BrokenProcessPool:
            if not stop.received:  # a scheduler signals every process of a job
                raise
        for process in multiprocessing.active_children():
            process.terminate()  # in the middle of a tar, as an attempt may be cut off anywhere
        raise Preempted(
            "told to leave before all tars were derived. What is committed stays; the same command again goes on."
        )


def _begin() -> None:
    use_scratch(None)  # copies of parts that are cut off are swept
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the first process decides
    torch.set_num_threads(1)


def _derive_in_process(source: str, target: str, how: Conversion, tar: SourceTar) -> TarReceipts:
    return derive_tar(tar, Derivation(open_store(source), open_store(target), how))
