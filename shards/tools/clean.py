"""`python -m shards clean ROOT`: delete orphaned parts, folders of killed attempts, and unfinished uploads.

No other code deletes parts, and no lock shows whether a job is running. Therefore, a part is deleted only if all of its
files are old according to the store's own clock, and nothing is deleted if a job has written to the root recently.
"""

import re
import uuid

from shards.base.errors import RequestError
from shards.base.scratch import has_live_owner
from shards.base.store import STAGING_FOLDER, Store
from shards.base.table import counted
from shards.format.encoding import EncodingRecord
from shards.format.receipts import parse_name
from shards.root.committed import list_commits, read_receipts
from shards.root.manifest import index_ids, published_receipts

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
LEAST_AGE = QUIET = 3600.0
"""Minimum of `--older-than`, and minimum time since a job last wrote to the root, in seconds. Both exceed the time that
any attempt takes from storing its part to its last request."""
PART = re.compile(r"(\d+x\d+/[^/]+|\.attempts/[^/]+)/.+")
WRITTEN_BY_JOBS = re.compile(r"(\d+x\d+/[^/]+|\.attempts|\.unfinished|tars)/.+|commits/.+\.json")
"""Files that only a running job writes, unlike indexes, exclusion lists, tombstones and cards."""


def parse_age(text: str) -> float:
    """Convert an age such as `7d`, `36h` or `90m` to seconds. Raises RequestError if it is malformed or under an
    hour."""
    match = re.fullmatch(r"(\d+)([dhms])", text)
    seconds = int(match[1]) * UNITS[match[2]] if match else -1.0
    if seconds < LEAST_AGE:
        raise RequestError(
            f"--older-than {text} is not an age of at least one hour, such as 7d, 36h or 90m. Newer parts are kept, "
            f"because a running job may be about to commit them."
        )
    return seconds


def clean(store: Store, older_than: float, quiet: float = QUIET) -> list[str]:
    """Delete orphaned parts, folders of attempts, unfinished files and unfinished uploads, and return their names.

    A part is orphaned if neither an active nor a recalled receipt refers to it. A folder is deleted only if all of its
    files are older than `older_than` seconds. Attempts that are running on this machine keep their folders. Raises
    RequestError if a job wrote to the root less than `quiet` seconds ago, if receipts are missing, or if `store` is not
    a latents root.
    """
    EncodingRecord.load(store)
    now, found = clock(store), store.listing()
    written = {name: entry.modified for name, entry in found.items() if WRITTEN_BY_JOBS.fullmatch(name)}
    last = max(written, key=lambda name: written[name], default="")
    if last and (since := now - written[last]) < quiet:
        raise RequestError(
            f"{store.where(last)} was written {max(0.0, since):.0f} s ago, so a running job may have parts that do "
            f"not have receipts yet. Nothing was deleted. Stop the job, and try again in "
            f"{quiet - max(0.0, since):.0f} s."
        )
    old: dict[str, list[str]] = {}
    young = {folder_of(name) for name, entry in found.items() if now - entry.modified <= older_than}
    for name in found:
        if (folder := folder_of(name)) and folder not in young:
            old.setdefault(folder, []).append(name)
    named = named_parts(store)  # read after the listing, so that receipts created since then count
    top = ".attempts/"  # folders of attempts that are running on this machine are kept
    alive = {f for f in old if f.startswith(top) and has_live_owner(store.attempts() / f.removeprefix(top))}
    orphans = sorted(old.keys() - named - alive)
    check_receipts(store)
    for folder in orphans:
        store.remove(old[folder])
    return orphans + [f"{name} (unfinished upload)" for name in store.abort_uploads(now - older_than)]


def folder_of(name: str) -> str:
    """Return the folder of the part or attempt that a file belongs to, the name of an unfinished file itself, or an
    empty string for any other file, which is never deleted."""
    match = PART.fullmatch(name)
    return match[1] if match else name if name.startswith(f"{STAGING_FOLDER}/") else ""


def named_parts(store: Store) -> set[str]:
    """Return the folders of all parts that have a receipt, whether active or recalled."""
    names = [name for name in list_commits(store) if (parsed := parse_name(name)) and not parsed[3]]
    return {receipt.folder for receipt in read_receipts(store, sorted(names))}


def check_receipts(store: Store) -> None:
    """Raise RequestError if a published part has no receipt, because a part whose receipt was lost is not an orphan."""
    if lost := sorted(published_receipts(store, index_ids(store)) - list_commits(store).keys()):
        raise RequestError(
            f"{store.where()} has lost the receipts of {counted(len(lost), 'published part')}, such as {lost[0]}. "
            f"Nothing was deleted, because parts without a receipt look like orphans. Restore the receipts from a "
            f"backup, or rerun the job that wrote these parts."
        )


def clock(store: Store) -> float:
    """Return the current time by the store's clock, which also sets the modification times of its files."""
    name = uuid.uuid4().hex
    store.create(f"{STAGING_FOLDER}/{name}", b"what time is it")
    now = store.listing(STAGING_FOLDER)[name].modified
    store.remove([f"{STAGING_FOLDER}/{name}"])
    return now
