"""Lists the parts of the source root, from receipt names alone, because a root can have over 100,000 receipts."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from shards.base.store import Store
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt, active_receipts, generations, parse_name
from shards.root.committed import Committed, list_commits, load_commits

ORIGIN = "derived_from"
"""Receipt setting of a derived part: the encoding id and folder of its source part. `derived_from.host`, `.gpu` and
`.gpu_uuid` record where the source part was encoded."""
AT_ONCE = 1024
"""Number of receipts loaded into memory at once."""


@dataclass(frozen=True)
class SourceTar:
    """A source tar to derive."""

    name: str
    receipts: tuple[str, ...]
    """Names of its receipts in the source root."""
    buckets: tuple[str, ...]
    """Buckets to derive."""


@dataclass(frozen=True)
class Contents:
    """The committed parts of the source root."""

    parts: dict[str, dict[str, str]]
    """Tar → bucket → name of the active receipt."""
    rules: dict[str, str]
    """Bucket → rule that selects its images."""

    def tars(self, buckets: Container[str]) -> list[SourceTar]:
        """Return the tars with parts in these buckets, ordered by name."""
        found = []
        for tar in sorted(self.parts):
            names = {bucket: name for bucket, name in sorted(self.parts[tar].items()) if bucket in buckets}
            if names:
                found.append(SourceTar(tar, tuple(sorted({*names.values()})), tuple(names)))
        return found


def list_contents(source: Store) -> Contents:
    """List the committed parts of a root.

    Tars and buckets come from the receipts' names. The rule of a bucket comes from its first receipt, because all
    receipts of a bucket have the same rule.
    """
    names = active_receipts(etags := list_commits(source))
    found = Contents({}, {})
    first: dict[str, str] = {}
    for name in names:
        parsed = parse_name(name)
        assert parsed is not None
        bucket, tar, *_ = parsed
        found.parts.setdefault(tar, {})[bucket] = name
        first.setdefault(bucket, name)
    found.rules.update((receipt.bucket, receipt.rule) for _, _, receipt in _load(source, [*first.values()], etags))
    return found


def superseded(source: Store, target: Store) -> list[Receipt]:
    """Return the target's active receipts whose source part was recalled.

    Parts whose source was re-encoded with identical content are not returned.
    """
    target_etags, source_etags = list_commits(target), list_commits(source)
    recalled = {part for part, (_, tombstones) in generations(source_etags).items() if tombstones}
    current = {(r.tar, r.bucket): r.folder for r in _load_parts(source, recalled, source_etags)}
    id = EncodingRecord.load(source).id
    return [
        receipt
        for receipt in _load_parts(target, recalled, target_etags)
        if (origin := str(receipt.settings.get(ORIGIN, ""))).startswith(f"{id}/")
        and origin != f"{id}/{current.get((receipt.tar, receipt.bucket))}"
    ]


def _load_parts(store: Store, parts: Container[tuple[str, str]], etags: dict[str, str]) -> Iterator[Receipt]:
    """Yield the active receipts of these (tar, bucket) pairs."""
    parsed_names = ((name, parse_name(name)) for name in active_receipts(etags))
    names = [name for name, parsed in parsed_names if parsed and (parsed[1], parsed[0]) in parts]
    return (found.receipt for found in _load(store, names, etags))


def _load(store: Store, names: list[str], etags: dict[str, str]) -> Iterable[Committed]:
    for begin in range(0, len(names), AT_ONCE):
        yield from load_commits(store, {name: etags[name] for name in names[begin : begin + AT_ONCE]})
