"""Stage 1 over many tars: which are left, a fleet of workers on them, and the ledger of what came of each."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from ray.util.metrics import Counter, Gauge

from precompute.cluster.failures import FailureLog, named
from precompute.cluster.fleet import Done, Failed, Fleet, FleetConfig, News, UnderWay
from precompute.encode.recipe import Recipe
from precompute.encode.worker import encode_on_worker
from precompute.input.tars import InputTar, Named
from shards.base.errors import Preempted, WorkError
from shards.base.progress import Progress
from shards.base.store import Store
from shards.format.receipts import receipt_name
from shards.root.committed import TarBooks, committed_parts
from shards.root.manifest import Manifest
from shards.root.provenance import source_sha256


def run_job(tars: Sequence[Named], recipe: Recipe, output: Path | str, workers: FleetConfig) -> "Ledger":
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
        for event in Fleet(workers, work, ((tar.name, tar) for tar in tars)):
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


def conclude(ledger: "Ledger", num_tars: int, root: str, manifest: Manifest | None) -> None:
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


class Ledger:
    """What came of each tar so far; it shows it on stderr, and in Ray's metrics."""

    def __init__(self, total: int, failures: FailureLog | None = None):
        self.total, self.failures = total, failures
        self.done = self.samples_in = self.encoded = 0
        self.failed: dict[str, str] = {}
        """Tar → the last attempt's error."""
        self.under_way = UnderWay(0, 0)
        self.started = time.monotonic()
        self.metrics = Metrics()
        self.progress = Progress("precompute", "tars", total)

    def __enter__(self) -> "Ledger":
        self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.progress.__exit__(kind, error, tb)

    @property
    def where_failures(self) -> str:
        """A sentence on where each failed attempt is."""
        return f" Each failed attempt is in {self.failures.where}, with its trace." if self.failures else ""

    @property
    def left(self) -> int:
        """Tars that were neither done nor given up, where the job was told to leave."""
        return self.total - self.done - len(self.failed)

    def record(self, event: Done[TarBooks] | Failed | News | UnderWay) -> None:
        """Enter what the fleet says."""
        match event:
            case Done(result=books):
                self.done += 1
                self.samples_in += books.samples_in
                self.encoded += books.encoded
                self.metrics.tar_done(books)
                self._show()
            case Failed(key=tar, which=which, failure=failure, again=again):
                self.metrics.failed_attempts.inc(1)
                if self.failures:
                    self.failures.record(event)
                if not event.in_pause:
                    self.progress.say(f"tar {tar}: {which}: {failure.text}")
                if not again:
                    self.failed[tar] = failure.line
                    self.metrics.tars.inc(1, {"outcome": "failed"})
                    self._show()
            case News(text=text):
                self.progress.say(text)
            case UnderWay(attempts=attempts, reported=samples):
                self.under_way = event
                self.metrics.running.set(attempts)
                self.metrics.under_way.set(samples)
                if self.progress.is_due:
                    self._show()

    def _show(self) -> None:
        figures = self.figures(max(time.monotonic() - self.started, 1e-9))
        for gauge, name in ((self.metrics.rate, "images_per_second"), (self.metrics.eta, "eta_seconds")):
            if (value := figures[name]) is not None:
                gauge.set(value)
        text = "{images_per_second} img/s  {accepted} accepted  {rejected} rejected".format(**figures)
        self.progress.show(self.done + len(self.failed), text, figures)

    def figures(self, seconds: float) -> dict[str, int | float | None]:
        """All of it after `seconds`. Tars under way count for the share of a mean tar that they have taken in."""
        mean = self.samples_in / self.done if self.done else 0
        under_way, running = self.under_way.reported, self.under_way.attempts
        finished = self.done + len(self.failed) + (min(under_way / mean, running) if mean else 0)
        return {
            "shards_done": self.done,
            "shards_failed": len(self.failed),
            "shards_in_flight": running,
            "shards": self.total,
            "accepted": self.encoded,
            "rejected": self.samples_in - self.encoded,
            "under_way": under_way,
            "images_per_second": round((self.samples_in + under_way) / seconds, 1),
            "eta_seconds": round(seconds / finished * max(0.0, self.total - finished)) if finished else None,
        }


class Metrics:
    """The job's figures for Prometheus, which every node's metrics endpoint serves under `ray_latentmill_…`."""

    def __init__(self) -> None:
        self.images_in = Counter("latentmill_images_in", "Samples of committed tars")
        self.accepted = Counter("latentmill_images_accepted", "Of these, in at least one bucket")
        self.rejected = Counter("latentmill_images_rejected", "Of these, in no bucket", ("reason",))
        self.tars = Counter("latentmill_shards", "Tars that are done with", ("outcome",))
        self.failed_attempts = Counter("latentmill_failed_attempts", "Attempts at tars that failed")
        self.seconds = Counter("latentmill_encoding_seconds", "Wall-clock seconds of workers on committed tars")
        self.running = Gauge("latentmill_shards_in_flight", "Tars handed to Ray")
        self.under_way = Gauge("latentmill_images_under_way", "Samples taken in of tars that are not committed")
        self.rate = Gauge("latentmill_images_per_second", "Samples taken in, over the job's time so far")
        self.eta = Gauge("latentmill_eta_seconds", "Until the job ends, at its rate so far; absent before there is one")

    def tar_done(self, books: TarBooks) -> None:
        """Count what a tar's receipts account for."""
        # Ray refuses to add nothing
        for counter, value in (
            (self.images_in, books.samples_in),
            (self.accepted, books.encoded),
            (self.seconds, max(part.seconds["total"] for part in books.parts.values())),
        ):
            if value:
                counter.inc(value)
        for reason, count in books.rejected.items():
            self.rejected.inc(count, {"reason": reason})
        self.tars.inc(1, {"outcome": "done"})
