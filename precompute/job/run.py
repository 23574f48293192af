"""Stage 1 over many tars: which are left, a fleet of workers on them, and the ledger of what came of each."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from precompute.cluster.failures import FailureLog, named
from precompute.cluster.fleet import Done, Fleet, FleetConfig
from precompute.encode.recipe import Recipe
from precompute.encode.worker import encode_on_worker
from precompute.input.tars import InputTar, Named
from precompute.job.ledger import Ledger
from shards.base.device import worker_device
from shards.base.errors import Preempted, WorkError
from shards.base.store import Store
from shards.format.receipts import receipt_name
from shards.format.tables import read_tables
from shards.open import open_store
from shards.root.committed import TarReceipts, committed_parts
from shards.root.manifest import Manifest
from shards.root.provenance import source_sha256

UNET_STEP = 64
"""Pixels: the VAE divides sides by 8, and three halvings by another 8."""


def run_job(tars: Sequence[Named], recipe: Recipe, output: Path | str, workers: FleetConfig) -> Ledger:
    """Encode `tars` into the root at `output`, on Ray, which was started, until each is done or has failed.

    On SIGTERM, SIGUSR1 or SIGINT it abandons the attempts that are under way, and returns.

    Raises:
        WorkError: no node of the cluster could take a worker for `workers.wait_for_resources` seconds; or storage,
            credentials, models or the cluster were out of order for `workers.outage_probes` attempts.
    """
    device = worker_device(workers.num_gpus)
    work = partial(
        encode_on_worker,
        recipe=recipe,
        output=output,
        device=device,
        num_cpus=workers.num_cpus,
        source=source_sha256(),
    )
    with FailureLog(output) as failures, Ledger(len(tars), failures) as ledger:
        warned = False
        for event in Fleet(workers, work, ((tar.name, tar) for tar in tars), recipe.worker.tars_at_once):
            ledger.record(event)
            if isinstance(event, Done) and not warned and lacks_captions(event.result):
                warned = True
                ledger.progress.say(explain_lack(open_store(output), event.result, recipe.encoding.captions))
    return ledger


def lacks_captions(books: TarReceipts) -> bool:
    """Whether every sample of a tar was rejected for want of a caption."""
    return books.samples_in > 0 and books.rejected.get("no_caption", 0) == books.samples_in


def explain_lack(store: Store, books: TarReceipts, fields: Sequence[str]) -> str:
    """A warning about such a tar, with what its first sample has instead."""
    part = books.parts[min(books.parts)]
    _, refused = read_tables(store, part.folder, part.files)
    key, detail = refused["key"][0], refused["detail"][0]
    return (
        f"warning: no sample of tar {books.tar} has a caption in {', '.join(fields)}, so all {books.samples_in} were "
        f"rejected. Sample {key}: {detail}. If the other tars are alike, stop this job, set `captions` to one of "
        f"these fields, and give a new `output`."
    )


def not_committed(tars: Sequence[InputTar], buckets: Sequence[object], store: Store) -> list[InputTar]:
    """Those that have not a receipt in force for every one of `buckets`; one listing.

    Raises:
        RequestError: a tar has a name that no receipt can have.
    """
    for tar in tars:
        receipt_name("", tar.name)
    done = committed_parts(store)
    return [tar for tar in tars if not {(str(bucket), tar.name) for bucket in buckets} <= done]


def announce(waiting: Sequence[object], num_tars: int, buckets: Sequence[object]) -> None:
    """Say on stderr what a job is about to do: its workers take a while to start.

    Stage 1 knows no backbone, so it can only warn of sizes that the most demanding ones refuse.
    """
    odd = [name for name in map(str, buckets) if any(int(side) % UNET_STEP for side in name.split("x"))]
    if odd:
        print(
            f"warning: the sides of {', '.join(odd)} are not all multiples of {UNET_STEP} px. U-Nets such as Stable "
            f"Diffusion's, which halve latents of 1/8 three times, cannot be trained on them; many transformers can. "
            f"See what your backbone needs before you encode: for aspect buckets set aspect.step to {UNET_STEP}.",
            file=sys.stderr,
            flush=True,
        )
    print(
        f"{len(waiting)} of {num_tars} tars to encode, into {', '.join(map(str, buckets))}. Starting workers, which "
        f"load the encoders first.",
        file=sys.stderr,
        flush=True,
    )


def conclude(ledger: Ledger, num_tars: int, root: str, manifest: Manifest | None) -> None:
    """Say what came of a job's `num_tars`, and what `root` holds by its newest manifest.

    Raises:
        Preempted: the job was told to leave before its end.
        WorkError: some tars failed, or no sample was accepted.
    """
    sizes = manifest.buckets if manifest is not None else {}
    held = ", ".join(f"{size.samples} samples in {bucket}" for bucket, size in sizes.items()) or "nothing"
    print(
        f"{ledger.done} tars encoded ({ledger.samples_in} samples in, {ledger.encoded} accepted, "
        f"{ledger.samples_in - ledger.encoded} rejected), {num_tars - ledger.total} had been done before, "
        f"{len(ledger.failed)} failed. {root} {'held' if ledger.left else 'now holds'} {held}"
        f"{' when it was last indexed' if ledger.left else ''}."
    )
    if ledger.rejected:
        reasons = ", ".join(f"{reason} {count}" for reason, count in ledger.rejected.most_common())
        print(f"Rejected: {reasons}. Their keys and details are in the refused.parquet of each part.")
    if ledger.left:
        raise Preempted(
            f"told to leave, {ledger.left} tars before the end. What is committed stays; the same command again "
            f"goes on."
        )
    if ledger.failed:
        raise WorkError(
            f"{len(ledger.failed)} of {num_tars} tars failed ({named(list(ledger.failed.items()))}). The others are "
            f"committed; the same command again tries just these.{ledger.where_failures}"
        )
    if ledger.samples_in and not ledger.encoded:
        reason, count = ledger.rejected.most_common(1)[0]
        raise WorkError(
            f"Nothing was accepted: all {ledger.samples_in} samples of this job were rejected, {count} of them as "
            f"{reason}. Each one's key and reason is in refused.parquet of its part in {root}. After a change of "
            f"`captions`, give a new `output`."
        )
