"""`python -m shards by-node ROOT` and `recall ROOT`: find the parts that a host or GPU encoded, and select them for
recall."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from shards.base.errors import RequestError
from shards.base.store import Store
from shards.derive.source import ORIGIN
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt, receipt_name
from shards.root.committed import iter_receipts, iter_tars, rejected_once


def node_totals(store: Store) -> list[dict[str, Any]]:
    """Return totals per host and GPU: active parts, samples stored and rejected, and samples per second.

    Unlike in `stats`, a sample counts as rejected if any part rejects it, even if another bucket stores it. A sample
    that several parts of a tar reject for the same reason counts once. Rates use the total time of each attempt.

    Raises:
        RequestError: `store` is not a latents root.
    """
    EncodingRecord.load(store)
    found: dict[tuple[str, str, str], NodeTotals] = {}
    for tar_receipts in iter_tars(store):
        made_by: dict[tuple[str, str, str], list[Receipt]] = {}
        for part in tar_receipts.parts.values():
            made = part.made_by
            made_by.setdefault((made.host, made.gpu, made.gpu_uuid or ""), []).append(part)
        for who, parts in made_by.items():
            found.setdefault(who, NodeTotals()).add(parts)
    return [found[who].described(*who) for who in sorted(found)]


@dataclass
class NodeTotals:
    """Totals for one host and GPU, accumulated tar by tar."""

    parts: int = 0
    samples_in: int = 0
    samples: int = 0
    total_seconds: float = 0.0
    rejects: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    """Stage → seconds."""
    sources: set[str] = field(default_factory=set)
    """Source code hashes (first 12 digits)."""

    def add(self, parts: list[Receipt]) -> None:
        """Add the parts of one tar."""
        self.parts += len(parts)
        self.samples_in += parts[0].samples_in
        self.samples += sum(part.samples for part in parts)
        self.rejects.update(rejected_once(parts))
        self.sources |= {part.made_by.source_sha256[:12] for part in parts}
        # every part records its attempt's times, so count the times once per attempt
        for seconds in {part.token: part.seconds for part in parts}.values():
            self.total_seconds += seconds["total"]
            self.seconds.update(seconds)

    def described(self, host: str, gpu: str, uuid: str) -> dict[str, Any]:
        """Return the totals as a JSON-serialisable dict."""
        return {
            "host": host,
            "gpu": gpu,
            "gpu_uuid": uuid,
            "sources": sorted(self.sources),
            "parts": self.parts,
            "samples_in": self.samples_in,
            "samples": self.samples,
            "rejects": dict(self.rejects.most_common()),
            "samples_per_second": round(self.samples_in / max(self.total_seconds, 1e-9), 2),
            "seconds": {stage: round(value, 1) for stage, value in sorted(self.seconds.items())},
        }


def nodes_table(found: list[dict[str, Any]]) -> str:
    """Format the result of `node_totals` as a table."""
    lines = [f"{'host':20} {'gpu':28} {'parts':>8} {'samples':>12} {'in/s':>8}  rejects, sources"]
    for node in found:
        gpu = f"{node['gpu']} {node['gpu_uuid'][:12]}".strip()
        rejects = ", ".join(f"{reason} {count:,}" for reason, count in node["rejects"].items()) or "none"
        lines.append(
            f"{node['host']:20} {gpu:28} {node['parts']:>8,} {node['samples']:>12,} "
            f"{node['samples_per_second']:>8,.1f}  {rejects}; {' '.join(node['sources'])}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class RecallFilter:
    """Filter for the parts to recall: those that match every given criterion."""

    node: str | None
    gpu: str | None
    """GPU UUID or GPU name."""
    since: str | None
    """Earliest start of the attempt in UTC, such as 2026-11-22 or 2026-11-22T10:00."""

    def __post_init__(self) -> None:
        """Reject an empty filter, which would recall everything, and an invalid time."""
        if not (self.node or self.gpu or self.since):
            raise RequestError(
                "recall needs --node, --gpu or --since; without any of them it would recall every part. `python -m "
                "shards by-node` lists hosts and GPUs."
            )
        if self.since:
            _time(self.since)

    def _fits(self, host: object, gpu: object, gpu_uuid: object) -> bool:
        return (not self.node or self.node == host) and (not self.gpu or self.gpu in (gpu, gpu_uuid))

    def matches(self, receipt: Receipt) -> bool:
        """Return whether the part, or the part that it was derived from, matches every criterion."""
        return any(self._fits(*who) for who in makers(receipt)) and (
            not self.since or _time(receipt.started) >= _time(self.since)
        )


def makers(receipt: Receipt) -> list[tuple[object, object, object]]:
    """Return (host, GPU, GPU UUID) for a part and for the part it was derived from (all None if it was not derived)."""
    made = receipt.made_by
    host, gpu, gpu_uuid = (receipt.settings.get(f"{ORIGIN}.{name}") for name in ("host", "gpu", "gpu_uuid"))
    return [(made.host, made.gpu, made.gpu_uuid), (host, gpu, gpu_uuid)]


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(
            f"--since {text!r} is not a valid date or time. Use a UTC time such as 2026-11-22T10:00."
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


class RecallCandidate(NamedTuple):
    """The fields of a receipt that `recall` needs. A root can have 158,000 receipts, so other fields are dropped."""

    tar: str
    bucket: str
    generation: int
    token: str
    part: str
    samples: int

    @property
    def name(self) -> str:
        """Path of the receipt relative to the root."""
        return receipt_name(self.bucket, self.tar, self.generation)

    @property
    def folder(self) -> str:
        """Path of the part's folder relative to the root."""
        return f"{self.bucket}/{self.part}"


def recall_candidates(store: Store, recall_filter: RecallFilter) -> list[RecallCandidate]:
    """Return the active receipts that match a filter.

    Raises:
        RequestError: `store` is not a latents root.
    """
    EncodingRecord.load(store)
    return [
        RecallCandidate(*(getattr(receipt, name) for name in RecallCandidate._fields))
        for receipt in iter_receipts(store)
        if recall_filter.matches(receipt)
    ]
