"""`python -m shards clean ROOT`: removes parts that no receipt names, which attempts that never committed left behind,
and uploads that never ended.

Nothing else ever removes a part, and no lock says that nobody is at work: so none is removed before it has lain there
for long, by the store's own clock, and nothing at all while something was written of late.
"""

import re
import uuid

from shards.base.errors import RequestError
from shards.base.store import UNFINISHED, Store
from shards.format.encoding import EncodingRecord
from shards.format.receipts import is_version1, parse_name
from shards.root.committed import list_commits, load_commits

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
LEAST_AGE = QUIET = 3600.0
"""Seconds. From an attempt that puts its part into place to the last request of its that arrives it takes less."""
PART = re.compile(r"(\d+x\d+/[^/]+)/.+")


def parse_age(text: str) -> float:
    """`7d`, `36h`, `90m` → seconds.

    Raises:
        RequestError: it is none of these, or less than an hour.
    """
    match = re.fullmatch(r"(\d+)([dhms])", text)
    seconds = int(match[1]) * UNITS[match[2]] if match else -1.0
    if seconds < LEAST_AGE:
        raise RequestError(
            f"--older-than {text}: give an age such as 7d, 36h or 90m, and at least one hour: a younger part's receipt "
            f"may be on its way."
        )
    return seconds


def clean(store: Store, older_than: float, quiet: float = QUIET) -> list[str]:
    """Remove every part that no receipt names, in force or recalled, and whose files are all older than `older_than`
    seconds; and unfinished files and uploads of that age.

    Returns:
        The folders and files that went.

    Raises:
        RequestError: something in the root was written less than `quiet` seconds ago, or it is not a latents root.
    """
    EncodingRecord.load(store)
    now, found = clock(store), store.listing()
    if (since := now - max(entry.modified for entry in found.values())) < quiet:
        raise RequestError(
            f"Something was written to {store.where()} {max(0.0, since):.0f} s ago: a job may be at work, and its "
            f"parts have no receipts yet. End it, and clean when nothing was written for {quiet:.0f} s."
        )
    old: dict[str, list[str]] = {}
    young = {folder_of(name) for name, entry in found.items() if now - entry.modified <= older_than}
    for name in found:
        if (folder := folder_of(name)) and folder not in young:
            old.setdefault(folder, []).append(name)
    named = named_parts(store)  # after the listing: a receipt that came meanwhile counts
    gone = sorted(folder for folder in old if folder not in named)
    for folder in gone:
        store.remove(old[folder])
    return gone + [f"{name} (an upload that never ended)" for name in store.abort_uploads(now - older_than)]


def folder_of(name: str) -> str:
    """The part that a file belongs to, or the file itself where it was never finished; empty for all others."""
    match = PART.fullmatch(name)
    return match[1] if match else name if name.startswith(f"{UNFINISHED}/") else ""


def named_parts(store: Store) -> set[str]:
    """The folders of all parts that a receipt names, in force, recalled, or of version 1."""
    etags = list_commits(store)
    receipts = {n: e for n, e in etags.items() if is_version1(n) or ((parsed := parse_name(n)) and not parsed[3])}
    return {committed.receipt.folder for committed in load_commits(store, receipts)}


def clock(store: Store) -> float:
    """Now, by the store's own clock, which its files' times are of."""
    name = uuid.uuid4().hex
    store.create(f"{UNFINISHED}/{name}", b"what time is it")
    now = store.listing(UNFINISHED)[name].modified
    store.remove([f"{UNFINISHED}/{name}"])
    return now
