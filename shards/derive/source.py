"""What there is to derive: by the names of the source's receipts, as there may be a hundred thousand of them."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from shards.base.store import Store
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt, generations, names_in_force, parse_name
from shards.root.committed import Committed, list_commits, load_commits

ORIGIN = "derived_from"
"""Setting of a derived part's receipt: the encoding and the part that it was made of; `derived_from.host`, `.gpu` and
`.gpu_uuid` say who had made that."""
AT_ONCE = 1024
"""Receipts that are held at once."""


@dataclass(frozen=True)
class SourceTar:
    """A tar by its receipts in the source."""

    name: str
    receipts: tuple[str, ...]
    """Their names."""
    buckets: tuple[str, ...]
    """Those of them that are derived."""


@dataclass(frozen=True)
class Contents:
    """What is committed to the source."""

    parts: dict[str, dict[str, str]]
    """Tar → bucket → name of the receipt in force."""
    rules: dict[str, str]
    """Bucket → which pictures it holds."""

    def tars(self, buckets: Container[str]) -> list[SourceTar]:
        """Those that have parts of these buckets, by name."""
        found = []
        for tar in sorted(self.parts):
            names = {bucket: name for bucket, name in sorted(self.parts[tar].items()) if bucket in buckets}
            if names:
                found.append(SourceTar(tar, tuple(sorted({*names.values()})), tuple(names)))
        return found


def list_contents(source: Store) -> Contents:
    """List what is committed to a root.

    A receipt's name has its tar and bucket. The rule is read from the first receipt of each bucket, as all share it.
    """
    names = names_in_force(etags := list_commits(source))
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
    """The target's receipts in force of parts whose source was recalled, and not made anew with the same content."""
    ours, theirs = list_commits(target), list_commits(source)
    recalled = {place for place, (_, stones) in generations(theirs).items() if stones}
    now = {(r.tar, r.bucket): r.folder for r in _of(source, recalled, theirs)}
    id = EncodingRecord.load(source).id
    return [
        receipt
        for receipt in _of(target, recalled, ours)
        if (origin := str(receipt.settings.get(ORIGIN, ""))).startswith(f"{id}/")
        and origin != f"{id}/{now.get((receipt.tar, receipt.bucket))}"
    ]


def _of(store: Store, places: Container[tuple[str, str]], etags: dict[str, str]) -> Iterator[Receipt]:
    """The receipts in force of these tars and buckets."""
    named = ((name, parse_name(name)) for name in names_in_force(etags))
    names = [name for name, parsed in named if parsed and (parsed[1], parsed[0]) in places]
    return (found.receipt for found in _load(store, names, etags))


def _load(store: Store, names: list[str], etags: dict[str, str]) -> Iterable[Committed]:
    for begin in range(0, len(names), AT_ONCE):
        yield from load_commits(store, {name: etags[name] for name in names[begin : begin + AT_ONCE]})
