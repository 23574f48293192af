"""`python -m shards by-node ROOT` and `recall ROOT`: which machine made what, and how what it made is taken back."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from shards.base.errors import RequestError
from shards.base.store import Store
from shards.derive.source import ORIGIN
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt, receipt_name
from shards.root.committed import iter_books, iter_receipts, rejected_once


def nodes(store: Store) -> list[dict[str, Any]]:
    """Of every machine and GPU: parts in force, samples stored, samples rejected by reason, samples a second.

    A sample that one of its parts rejects and another stores counts as a reject here, unlike in `stats`. Several parts
    of a tar that reject a sample for the same reason count it once.

    A part's share of its attempt's time is that of its samples; a rate is over an attempt's whole time.

    Raises:
        RequestError: not a latents root.
    """
    EncodingRecord.load(store)
    found: dict[tuple[str, str, str], NodeTotals] = {}
    for books in iter_books(store):
        made_by: dict[tuple[str, str, str], list[Receipt]] = {}
        for part in books.parts.values():
            made = part.made_by
            made_by.setdefault((made.host, made.gpu, made.gpu_uuid or ""), []).append(part)
        for who, parts in made_by.items():
            found.setdefault(who, NodeTotals()).add(parts)
    return [found[who].described(*who) for who in sorted(found)]


@dataclass
class NodeTotals:
    """Totals of the parts that one machine and GPU made, summed tar by tar."""

    parts: int = 0
    samples_in: int = 0
    samples: int = 0
    total_seconds: float = 0.0
    rejects: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    """Stage → seconds."""
    sources: set[str] = field(default_factory=set)

    def add(self, parts: list[Receipt]) -> None:
        """Add the parts that it made from one tar."""
        self.parts += len(parts)
        self.samples_in += parts[0].samples_in
        self.samples += sum(part.samples for part in parts)
        self.rejects.update(rejected_once(parts))
        self.sources |= {part.made_by.source_sha256[:12] for part in parts}
        for seconds in {part.token: part.seconds for part in parts}.values():  # an attempt has the same in each bucket
            self.total_seconds += seconds["total"]
            self.seconds.update(seconds)

    def described(self, host: str, gpu: str, uuid: str) -> dict[str, Any]:
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
class Suspicion:
    """Whose parts are recalled: those to which all that is given applies."""

    node: str | None
    gpu: str | None
    """A GPU's UUID, or its name."""
    since: str | None
    """When the attempt began, or later: 2026-11-22 or 2026-11-22T10:00, in UTC."""

    def __post_init__(self) -> None:
        """Refuse what would recall everything, and what is no time."""
        if not (self.node or self.gpu or self.since):
            raise RequestError("Say what is recalled: --node, --gpu or --since; `python -m shards by-node` lists them.")
        if self.since:
            _time(self.since)

    def _fits(self, host: object, gpu: object, gpu_uuid: object) -> bool:
        return (not self.node or self.node == host) and (not self.gpu or self.gpu in (gpu, gpu_uuid))

    def hits(self, receipt: Receipt) -> bool:
        return any(self._fits(*who) for who in makers(receipt)) and (
            not self.since or _time(receipt.started) >= _time(self.since)
        )


def makers(receipt: Receipt) -> list[tuple[object, object, object]]:
    """List host, GPU and GPU UUID of what made a part, and of what made its origin (None if it was not derived)."""
    made = receipt.made_by
    host, gpu, gpu_uuid = (receipt.settings.get(f"{ORIGIN}.{name}") for name in ("host", "gpu", "gpu_uuid"))
    return [(made.host, made.gpu, made.gpu_uuid), (host, gpu, gpu_uuid)]


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(f"{text!r} is no time: give a day or a moment, such as 2026-11-22T10:00, in UTC.") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


class Suspect(NamedTuple):
    """A receipt to be recalled, without what a recall does not need: there may be 158,000."""

    tar: str
    bucket: str
    generation: int
    token: str
    part: str
    samples: int

    @property
    def name(self) -> str:
        """The receipt's, relative to the root."""
        return receipt_name(self.bucket, self.tar, self.generation)

    @property
    def folder(self) -> str:
        """The part's, relative to the root."""
        return f"{self.bucket}/{self.part}"


def suspects(store: Store, suspicion: Suspicion) -> list[Suspect]:
    """The receipts in force that it applies to.

    Raises:
        RequestError: not a latents root.
    """
    EncodingRecord.load(store)
    return [
        Suspect(*(getattr(receipt, name) for name in Suspect._fields))
        for receipt in iter_receipts(store)
        if suspicion.hits(receipt)
    ]
