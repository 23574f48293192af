"""`python -m shards by-node ROOT` and `recall ROOT`: find the parts that a host or GPU encoded, and select them for
recall."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from shards.base.errors import RequestError
from shards.base.store import Store
from shards.base.table import format_table
from shards.format.encoding import EncodingRecord
from shards.format.receipts import ORIGIN, Receipt
from shards.root.committed import iter_receipts, iter_tars


def node_totals(store: Store) -> list[dict[str, Any]]:
    """Return totals per host and GPU: active parts, samples stored and rejected, and samples per second.

    Unlike in `stats`, a sample counts as rejected if any part rejects it, even if another bucket stores it. Rates use
    the total time of each attempt. Raises RequestError if `store` is not a latents root.
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
    rejects: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    """Stage → seconds."""
    sources: set[str] = field(default_factory=set)
    """First 12 digits of each source code hash."""

    def add(self, parts: list[Receipt]) -> None:
        """Add the parts of one tar."""
        self.parts += len(parts)
        self.samples_in += parts[0].samples_in
        self.samples += sum(part.samples for part in parts)
        # a sample that several buckets reject for the same reason counts once
        for reason in dict.fromkeys(reason for part in parts for reason in part.rejects):
            rows = [part.rejected_samples(reason) for part in parts if reason in part.rejects]
            self.rejects[reason] += int(np.logical_or.reduce(rows).sum())
        self.sources |= {part.made_by.source_sha256[:12] for part in parts}
        # every part records its attempt's times, so count the times once per attempt
        for seconds in {part.token: part.seconds for part in parts}.values():
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
            "samples_per_second": round(self.samples_in / max(self.seconds["total"], 1e-9), 2),
            "seconds": {stage: round(value, 1) for stage, value in sorted(self.seconds.items())},
        }


def nodes_table(found: list[dict[str, Any]]) -> str:
    """Format the result of `node_totals` as a table."""
    rows = [["host", "gpu", "parts", "samples", "in/s", "rejects, sources"]]
    for node in found:
        gpu = f"{node['gpu']} {node['gpu_uuid'][:12]}".strip()
        rejects = ", ".join(f"{reason} {count:,}" for reason, count in node["rejects"].items()) or "none"
        numbers = [f"{node['parts']:,}", f"{node['samples']:,}", f"{node['samples_per_second']:,.1f}"]
        rows.append([node["host"], gpu, *numbers, f"{rejects}; {' '.join(node['sources'])}"])
    return format_table(rows, "<<>>><")


@dataclass(frozen=True)
class RecallFilter:
    """Filter for the parts to recall. A part must match every criterion that is not None."""

    node: str | None
    gpu: str | None
    """GPU UUID or GPU name."""
    since: str | None
    """Earliest start of the attempt in UTC, such as 2026-11-22 or 2026-11-22T10:00."""
    part: str | None = None
    """Folder of a single part, such as 512x512/00042.1f6b5c1a, or a path of the folder or of a file in it."""

    def __post_init__(self) -> None:
        """Reject an empty filter, which would recall everything, an empty criterion, and an invalid time."""
        options = {"--node": self.node, "--gpu": self.gpu, "--since": self.since, "--part": self.part}
        for option, value in options.items():
            if value == "":
                raise RequestError(
                    f"{option} is empty, perhaps because a shell variable is not set. Nothing was recalled. Pass a "
                    f"value, or leave the option out."
                )
        if not any(options.values()):
            raise RequestError(
                "recall needs --node, --gpu, --since or --part, because without any of them, it would recall every "
                "part. `python -m shards by-node ROOT` lists hosts and GPUs."
            )
        if self.since:
            _time(self.since)

    def matches(self, receipt: Receipt) -> bool:
        """Return whether the part, or the part that it was derived from, matches every criterion."""
        if self.part and f"/{receipt.folder}/" not in f"/{self.part}/":
            return False
        made, origin = dict(receipt.made_by), receipt.settings
        makers = [made, {name: origin.get(f"{ORIGIN}.{name}") for name in ("host", "gpu", "gpu_uuid")}]
        return any(
            (not self.node or self.node == maker["host"])
            and (not self.gpu or self.gpu in (maker["gpu"], maker["gpu_uuid"]))
            for maker in makers
        ) and (not self.since or _time(receipt.started) >= _time(self.since))


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(
            f"--since {text!r} is not a valid date or time. Use a UTC time such as 2026-11-22T10:00."
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def recall_candidates(store: Store, recall_filter: RecallFilter) -> Iterator[Receipt]:
    """Yield the active receipts that match a filter. Raises RequestError if `store` is not a latents root."""
    EncodingRecord.load(store)
    yield from filter(recall_filter.matches, iter_receipts(store))
