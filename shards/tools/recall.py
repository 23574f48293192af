"""`python -m shards by-node ROOT` and `recall ROOT`: which machine made what, and how what it made is taken back."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shards.base.errors import RequestError
from shards.base.store import Store
from shards.derive.source import ORIGIN
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt
from shards.root.committed import by_tar, load_receipts, rejected_once
from shards.root.shared import refuse_version1

UNKNOWN = "unknown"
"""Who made a part of version 1."""


def nodes(store: Store) -> list[dict[str, Any]]:
    """Of every machine and GPU: parts in force, samples stored, samples rejected by reason, samples a second.

    A sample that one of its parts rejects and another stores counts as a reject here, unlike in `stats`. Several parts
    of a tar that reject a sample for the same reason count it once.

    A part's share of its attempt's time is that of its samples; a rate is over an attempt's whole time.

    Raises:
        RequestError: not a latents root.
    """
    EncodingRecord.load(store)
    groups: dict[tuple[str, str, str], list[Receipt]] = {}
    for receipt in load_receipts(store):
        made = receipt.made_by
        who = (made.host, made.gpu, made.gpu_uuid or "") if made else (UNKNOWN, UNKNOWN, "")
        groups.setdefault(who, []).append(receipt)
    return [_node(*who, groups[who]) for who in sorted(groups)]


def _node(host: str, gpu: str, uuid: str, receipts: list[Receipt]) -> dict[str, Any]:
    seconds = {receipt.token: receipt.seconds["total"] for receipt in receipts}  # of one attempt, for each bucket
    stages: Counter[str] = Counter()
    for receipt in {receipt.token: receipt for receipt in receipts}.values():
        stages.update(receipt.seconds)
    taken_in = {receipt.tar: receipt.samples_in for receipt in receipts}
    rejects = Counter[str]()
    for books in by_tar(receipts):
        rejects.update(rejected_once(books.parts.values()))
    return {
        "host": host,
        "gpu": gpu,
        "gpu_uuid": uuid,
        "sources": sorted({receipt.made_by.source_sha256[:12] for receipt in receipts if receipt.made_by}),
        "parts": len(receipts),
        "samples_in": sum(taken_in.values()),
        "samples": sum(receipt.samples for receipt in receipts),
        "rejects": dict(rejects.most_common()),
        "samples_per_second": round(sum(taken_in.values()) / max(sum(seconds.values()), 1e-9), 2),
        "seconds": {stage: round(value, 1) for stage, value in sorted(stages.items())},
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
    """Host, GPU and its UUID of who made a part, and of who made what it was derived from; None where not known."""
    made = receipt.made_by
    host, gpu, gpu_uuid = (receipt.settings.get(f"{ORIGIN}.{name}") for name in ("host", "gpu", "gpu_uuid"))
    return [(made.host, made.gpu, made.gpu_uuid) if made else (None, None, None), (host, gpu, gpu_uuid)]


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(f"{text!r} is no time: give a day or a moment, such as 2026-11-22T10:00, in UTC.") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def suspects(store: Store, suspicion: Suspicion) -> list[Receipt]:
    """The receipts in force that it applies to.

    Raises:
        RequestError: not a latents root, or one of version 1.
    """
    EncodingRecord.load(store)
    refuse_version1(store)
    return [receipt for receipt in load_receipts(store) if suspicion.hits(receipt)]
