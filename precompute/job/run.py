"""Stage 1 over many tars: which are left, a fleet of workers on them, and the ledger of what came of each."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from precompute.cluster.failures import FailureLog, named
from precompute.cluster.fleet import Fleet, FleetConfig
from precompute.encode.recipe import Recipe
from precompute.encode.worker import encode_on_worker
from precompute.input.tars import InputTar, Named
from precompute.job.ledger import Ledger
from shards.base.errors import Preempted, WorkError
from shards.base.store import Store
from shards.format.receipts import receipt_name
from shards.root.committed import committed_parts
from shards.root.manifest import Manifest
from shards.root.provenance import source_sha256


def run_job(tars: Sequence[Named], recipe: Recipe, output: Path | str, workers: FleetConfig) -> Ledger:
    """Encode `tars` into the root at `output`, on Ray, which was started, until each is done or has failed.

    On SIGTERM, SIGUSR1 or SIGINT it abandons the attempts that are under way, and returns.

    Raises:
        WorkError: no node of the cluster could take a worker for `workers.wait_for_resources` seconds; or storage,
            credentials, models or the cluster were out of order for `workers.outage_probes` attempts.
    """
    device = "cuda" if workers.num_gpus else "cpu"
    work = partial(
        encode_on_worker,
        recipe=recipe,
        output=output,
        device=device,
        num_cpus=workers.num_cpus,
        source=source_sha256(),
    )
    with FailureLog(output) as failures, Ledger(len(tars), failures) as ledger:
        for event in Fleet(workers, work, ((tar.name, tar) for tar in tars), recipe.worker.tars_at_once):
            ledger.record(event)
    return ledger


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
    """Say on stderr what a job is about to do: its workers take a while to start."""
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
        WorkError: some tars failed.
    """
    sizes = manifest.buckets if manifest is not None else {}
    held = ", ".join(f"{size.samples} samples in {bucket}" for bucket, size in sizes.items()) or "nothing"
    print(
        f"{ledger.done} tars encoded ({ledger.samples_in} samples in, {ledger.encoded} accepted, "
        f"{ledger.samples_in - ledger.encoded} rejected), {num_tars - ledger.total} had been done before, "
        f"{len(ledger.failed)} failed. {root} {'held' if ledger.left else 'now holds'} {held}"
        f"{' when it was last indexed' if ledger.left else ''}."
    )
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
