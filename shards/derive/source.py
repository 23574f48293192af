"""Lists the parts of the source root, from receipt names alone, because a root can have over 100,000 receipts."""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shards.base.store import Store
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt, active_parts, generations
from shards.root.committed import list_commits, read_receipts

ORIGIN = "derived_from"
"""Receipt setting of a derived part: the encoding id and folder of its source part. `derived_from.host`, `.gpu` and
`.gpu_uuid` record where the source part was encoded."""


@dataclass(frozen=True)
class SourceTar:
    """A source tar to derive."""

    name: str
    receipts: tuple[str, ...]
    """Names of its receipts in the source root."""
    buckets: tuple[str, ...]
    """Buckets to derive."""


def source_tars(parts: Mapping[tuple[str, str], str], buckets: Container[str]) -> list[SourceTar]:
    """Return the tars with parts in these buckets, ordered by name, from the result of `active_parts`."""
    found: dict[str, dict[str, str]] = {}
    for (tar, bucket), name in parts.items():
        if bucket in buckets:
            found.setdefault(tar, {})[bucket] = name
    return [SourceTar(tar, tuple(names.values()), tuple(names)) for tar, names in found.items()]


def rules_of(source: Store, parts: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Return the rule of each bucket, read from one receipt, because all receipts of a bucket have the same rule."""
    one_per_bucket = {bucket: name for (_, bucket), name in parts.items()}
    return {receipt.bucket: receipt.rule for receipt in read_receipts(source, list(one_per_bucket.values()))}


def superseded(source: Store, target: Store) -> list[Receipt]:
    """Return the target's active receipts whose source part was recalled.

    Parts whose source was re-encoded with identical content are not returned.
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
