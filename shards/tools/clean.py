"""`python -m shards clean ROOT`: removes parts without a receipt, private folders of killed attempts, and unfinished
uploads.

Nothing else ever removes a part, and no lock says whether a job is running. So a part is removed only when all of its
files are old by the store's own clock, and nothing is removed if a job wrote to the root recently.
"""

import re
import uuid

from shards.base.errors import RequestError
from shards.base.scratch import has_live_owner
from shards.base.store import STAGING_FOLDER, Store
from shards.format.encoding import EncodingRecord
from shards.format.receipts import parse_name
from shards.root.committed import list_commits, read_receipts

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
LEAST_AGE = QUIET = 3600.0
"""Seconds. From an attempt that puts its part into place to the last request of its that arrives it takes less."""
PART = re.compile(r"(\d+x\d+/[^/]+|\.attempts/[^/]+)/.+")
WRITTEN_BY_JOBS = re.compile(r"(\d+x\d+/[^/]+|\.attempts|\.unfinished|tars)/.+|commits/.+\.json")
"""Files that only a running job writes. Finished commands write others: an index, exclusions, tombstones, a card."""


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
    """Remove parts that no receipt names, in force or recalled, private folders of attempts, unfinished files and
    unfinished uploads; each only if all of its files are older than `older_than` seconds. An attempt that is alive on
    this machine keeps its folder.

    Returns:
        The folders and files that went.

    Raises:
        RequestError: a job wrote to the root less than `quiet` seconds ago, or it is not a latents root.
    """
    EncodingRecord.load(store)
    now, found = clock(store), store.listing()
    written = {name: entry.modified for name, entry in found.items() if WRITTEN_BY_JOBS.fullmatch(name)}
    last = max(written, key=lambda name: written[name], default="")
    if last and (since := now - written[last]) < quiet:
        raise RequestError(
            f"{store.where(last)} was written {max(0.0, since):.0f} s ago: a job may be running, and its newest parts "
            f"have no receipts yet. Stop the job, and clean when it has written nothing for {quiet:.0f} s."
        )
    old: dict[str, list[str]] = {}
    young = {folder_of(name) for name, entry in found.items() if now - entry.modified <= older_than}
    for name in found:
        if (folder := folder_of(name)) and folder not in young:
            old.setdefault(folder, []).append(name)
    named = named_parts(store)  # after the listing: a receipt that came meanwhile counts
    gone = sorted(folder for folder in old if folder not in named and not _is_alive(store, folder))
    for folder in gone:
        store.remove(old[folder])
    return gone + [f"{name} (an upload that never ended)" for name in store.abort_uploads(now - older_than)]


def folder_of(name: str) -> str:
    """The folder of the part or attempt that a file is in, or the file itself if unfinished; empty for all others."""
    match = PART.fullmatch(name)
    return match[1] if match else name if name.startswith(f"{STAGING_FOLDER}/") else ""


def _is_alive(store: Store, folder: str) -> bool:
    """Whether it is the private folder of an attempt that is running on this machine."""
    return folder.startswith(".attempts/") and has_live_owner(store.attempts() / folder.removeprefix(".attempts/"))


def named_parts(store: Store) -> set[str]:
    """The folders of all parts that a receipt names, in force or recalled."""
    names = [name for name in list_commits(store) if (parsed := parse_name(name)) and not parsed[3]]
    return {receipt.folder for receipt in read_receipts(store, sorted(names))}


def clock(store: Store) -> float:
    """Now, by the store's own clock, which its files' times are of."""
    name = uuid.uuid4().hex
    store.create(f"{STAGING_FOLDER}/{name}", b"what time is it")
    now = store.listing(STAGING_FOLDER)[name].modified
    store.remove([f"{STAGING_FOLDER}/{name}"])
    return now
