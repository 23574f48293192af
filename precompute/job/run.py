"""Stage 1 for many tars: find the uncommitted ones, encode them on a fleet of workers, and report."""

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cluster.failure_log import FailureLog, summarize
from cluster.fleet import Done, Fleet, FleetConfig
from precompute.encode.recipe import Recipe
from precompute.encode.worker import encode_on_worker
from precompute.input.find import AnyUnit, Named
from precompute.input.layout import MAGIC_BYTES, compression_at
from precompute.input.table import TableConfig
from precompute.input.tars import TarUnit
from precompute.job.ledger import Ledger
from shards.base.device import worker_device
from shards.base.errors import Outage, Preempted, WorkError
from shards.base.store import Store
from shards.base.table import counted
from shards.format.receipts import receipt_name
from shards.format.scores import LAION_SCORES
from shards.format.tables import read_tables
from shards.open import open_store
from shards.root.commit import current_generation
from shards.root.committed import TarReceipts, committed_parts
from shards.root.manifest import Manifest
from shards.root.provenance import source_sha256

MAX_COMPARED = 8
"""Maximum number of tars that are compared with those from which a root was created."""
UNET_STEP = 64
"""U-Nets that halve the latents three times need image sides that are multiples of this number of pixels: 8 for the
VAE, times 8 for the U-Net."""


def run_job(tars: Sequence[Named], recipe: Recipe, output: Path | str, workers: FleetConfig) -> Ledger:
    """Encode `tars` into the root at `output` until each is committed or has failed. Ray must be running.

    On a stop signal, interrupt the running attempts and return.

    Raises:
        WorkError: for `workers.wait_for_resources` seconds, no node in the cluster had room for a worker; or
            `workers.outage_probes` attempts in a row failed because of storage, credentials, models or the cluster.
    """
    work = partial(encode_on_worker, recipe=recipe, output=output, **worker_settings(workers))
    may_warn = checks_scores = True
    with FailureLog(output) as failures:
        ledger = Ledger(len(tars), failures)
        with ledger.progress:
            for event in Fleet(workers, work, ((tar.name, tar) for tar in tars), recipe.worker.tars_at_once):
                ledger.record(event)
                if isinstance(event, Done) and may_warn:
                    with suppress(Outage, OSError):  # then the next tar is checked instead
                        warning = first_warning(event.result, recipe, open_store(output), checks_scores)
                        checks_scores &= event.result.encoded == 0  # this reads a table, so it is done once
                        if warning is not None:
                            may_warn = False
                            ledger.progress.say(warning)
    return ledger


def worker_settings(workers: FleetConfig) -> dict[str, Any]:
    """Return the arguments that tell every function on a worker about its process: device, CPUs, and the driver's
    source code."""
    return {"device": worker_device(workers.num_gpus), "num_cpus": workers.num_cpus, "source": source_sha256()}


def first_warning(receipts: TarReceipts, recipe: Recipe, store: Store, checks_scores: bool) -> str | None:
    """Return a warning if a tar lacks captions, table values or scores that the config names, or None. Raises Outage or
    OSError if the root cannot be read."""
    # a table without this tar's keys also explains missing captions
    warning = table_warning(receipts, recipe.tables) or caption_warning(store, receipts, recipe.encoding.captions)
    if warning is None and checks_scores:
        warning = score_warning(store, receipts, recipe.encoding.scores)
    return warning


def caption_warning(store: Store, receipts: TarReceipts, fields: Sequence[str]) -> str | None:
    """Return a warning if most samples of a tar were rejected for lack of a caption, or if its samples have so few
    captions that none of them may have one of `fields`. Return None otherwise."""
    without = receipts.rejected.get("no_caption", 0)
    if receipts.encoded == 0 and without > receipts.samples_in / 2:
        part = max(receipts.parts.values(), key=lambda part: part.refused.get("no_caption", 0))
        _, refused = read_tables(store, part.folder, part.files)
        first = refused["reason"].index("no_caption")
        key, detail = refused["key"][first], refused["detail"][first]
        return (
            f"warning: no sample of tar {receipts.tar} was accepted, and {without} of its {receipts.samples_in} "
            f"samples have no caption in {', '.join(fields)}. Sample {key}: {detail}. If the other tars are similar, "
            f"stop this job, set `captions` to one of these fields, and choose a new `output`."
        )
    part = max(receipts.parts.values(), key=lambda part: part.samples)
    stored = part.captions["stored"]
    if part.samples and stored <= part.samples * (len(fields) - 1):
        return (
            f"warning: `captions` lists {len(fields)} fields ({', '.join(fields)}), but the {part.samples} samples of "
            f"tar {receipts.tar} in {part.bucket} have only {counted(stored, 'caption')} in total, so one of the "
            f"fields may not exist. If so, stop this job, correct `captions`, and choose a new `output`."
        )
    return None


def table_warning(receipts: TarReceipts, tables: Sequence[TableConfig]) -> str | None:
    """Return a warning if a column of a table has a value for none of a tar's samples, or None."""
    parts = receipts.parts.values()
    for table in tables:
        for column in table.columns:
            # encoding counts the samples of the tar, in every part; deriving counts those of the part
            name = f"tables.{column}.found"
            found = [part.settings.get(f"derived.{name}", part.settings.get(name)) for part in parts]
            looked_up = any(part.samples or part.refused.get("no_caption") for part in parts)
            if looked_up and all(count == 0 for count in found):
                return (
                    f"warning: {table.place} has no {column} for any of the {receipts.samples_in} samples of tar "
                    f"{receipts.tar}. If the other tars are similar, stop this job: its column {table.key} may not "
                    f"hold the keys of these samples. `python -m shards where ROOT KEY` shows a sample by its key."
                )
    return None


def score_warning(store: Store, receipts: TarReceipts, scores: Sequence[str]) -> str | None:
    """Return a warning if none of a tar's samples has one of the scores that the config names, or None."""
    part = max(receipts.parts.values(), key=lambda part: part.samples)
    if tuple(scores) == LAION_SCORES or not part.samples:
        return None
    stored, _ = read_tables(store, part.folder, part.files)
    missing = [name for name in scores if all(map(math.isnan, stored[name]))]
    if not missing:
        return None
    return (
        f"warning: no sample of tar {receipts.tar} has the score {missing[0]}. If the other tars are similar, stop "
        f"this job, correct `scores`, and choose a new `output`."
    )


def not_committed(tars: Sequence[AnyUnit], buckets: Sequence[object], store: Store) -> list[AnyUnit]:
    """Return the tars that lack an active receipt for one or more of `buckets`. The root is listed only once. Raises
    RequestError if a tar's name cannot be used for a receipt."""
    for tar in tars:
        receipt_name("", tar.name)
    done = committed_parts(store)
    return [tar for tar in tars if not {(str(bucket), tar.name) for bucket in buckets} <= done]


def other_tars_warning(chosen: Sequence[Named], waiting: Sequence[Named], bucket: object, store: Store) -> str | None:
    """Return a warning if the chosen tars that count as encoded differ from those that were encoded, or None.

    The sizes of up to MAX_COMPARED tars are compared with those in the receipts of `bucket`. All must differ, because
    single tars may have been repaired. Compressed tars are not compared, because receipts record the size without
    compression. An error is only part of the warning, because the job itself needs neither these tars nor their
    receipts.
    """
    names = {tar.name for tar in waiting}
    tars = [tar for tar in chosen if isinstance(tar, TarUnit) and tar.name not in names]
    warning = None
    try:
        for tar in tars[:: math.ceil(len(tars) / MAX_COMPARED) or 1]:
            _, receipt = current_generation(store, str(bucket), tar.name)
            size = tar.store.size(tar.file)
            if receipt is None or size is None or size == receipt.input["bytes"]:
                return None
            if compression_at(tar.store.read_range(tar.file, 0, MAGIC_BYTES)):
                return None
            warning = (
                f"{tar.address} has {size:,} bytes, but {receipt.input['address']} had {receipt.input['bytes']:,} when "
                f"it was encoded. Tars count as already encoded by their names. If the input has different tars now, "
                f"choose a new `output`, or rename the tars."
            )
    except (OSError, WorkError) as error:
        return f"the tars that are already encoded could not be compared with those in the input: {error}"
    return warning


def announce(waiting: Sequence[object], num_tars: int, buckets: Sequence[object]) -> None:
    """Print on stderr what the job will do, because its workers take a while to start. Also warn about bucket sizes on
    which some U-Nets cannot be trained; stage 1 cannot reject these sizes, because it does not know the backbone."""
    odd = [name for name in map(str, buckets) if any(int(side) % UNET_STEP for side in name.split("x"))]
    if odd:
        print(
            f"warning: the sides of {'bucket' if len(odd) == 1 else 'buckets'} {', '.join(odd)} are not all multiples "
            f"of {UNET_STEP} px. U-Nets such as Stable Diffusion's, which halve the latents three times, cannot be "
            f"trained on these buckets; many transformers can. Check what your backbone needs before you encode. For "
            f"aspect buckets, set aspect.step to {UNET_STEP}.",
            file=sys.stderr,
            flush=True,
        )
    print(
        f"Encoding {len(waiting)} of {counted(num_tars, 'unit')} into {', '.join(map(str, buckets))}. Starting "
        f"workers; they load the encoders first.",
        file=sys.stderr,
        flush=True,
    )


def conclude(ledger: Ledger, num_tars: int, root: str, manifest: Manifest | None) -> None:
    """Print the result of a job over `num_tars` tars, and the contents of `root` according to its newest manifest.

    Raises:
        Preempted: the job was stopped before it finished.
        WorkError: some tars failed, or no sample was accepted.
    """
    sizes = manifest.buckets if manifest is not None else {}
    held = ", ".join(f"{size.samples} samples in {bucket}" for bucket, size in sizes.items()) or "nothing"
    contents = f" {root} held {held} when it was last indexed." if ledger.left else f" {root} now holds {held}."
    print(
        f"Tars: {ledger.done} encoded ({ledger.samples_in} samples in, {ledger.encoded} accepted, "
        f"{ledger.samples_in - ledger.encoded} rejected), {num_tars - ledger.total} already done, "
        f"{len(ledger.failed)} failed.{contents if manifest is not None else ''}"
    )
    if ledger.rejected:
        reasons = ", ".join(f"{reason} {count}" for reason, count in ledger.rejected.most_common())
        print(f"Rejected: {reasons}. The refused.parquet in each part lists the keys and details.")
    if ledger.left:
        raise Preempted(
            f"Stopped by a signal. Tars remaining: {ledger.left}. Committed work is kept. Run the same command again "
            f"to continue."
        )
    if ledger.failed:
        raise WorkError(
            f"{len(ledger.failed)} of {num_tars} tars failed ({summarize(list(ledger.failed.items()))}). All others "
            f"are committed. Run the same command again to retry only the failed tars.{ledger.where_failures}"
        )
    if ledger.samples_in and not ledger.encoded:
        reason, count = ledger.rejected.most_common(1)[0]
        raise WorkError(
            f"Nothing was accepted: all {ledger.samples_in} samples of this job were rejected, {count} of them as "
            f"{reason}. The refused.parquet in each part of {root} lists the keys and reasons. These "
            f"samples are not encoded again, so if you change `captions` or the input, choose a new `output`."
        )
    if num_tars and not ledger.encoded and not any(size.samples for size in sizes.values()):
        raise WorkError(
            f"{root} holds no samples: the input was encoded ({counted(num_tars, 'unit')}), but nothing was "
            f"accepted. The refused.parquet in each part lists the rejected samples and reasons. If you change "
            f"`captions` or the input, choose a new `output`."
        )
