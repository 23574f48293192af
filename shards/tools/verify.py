"""`python -m shards verify ROOT`: check every byte of a latents root, and the consistency of its files."""

import errno
import hashlib
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from shards.base.durable import DamagedFile, parse_sealed_json
from shards.base.errors import RequestError
from shards.base.store import LocalStore, Store, read_each
from shards.base.table import counted
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import FileRecord, Receipt, active_receipts, parse_name, parse_receipt
from shards.format.tables import OTHER_BUCKET, read_tables
from shards.format.text import CAPTION_WEIGHTS
from shards.format.towers import TextTower
from shards.root.commit import content_hash
from shards.root.committed import TarReceipts, list_commits
from shards.root.exclusions import exclusion_ids, load_exclusion
from shards.root.index import bucket_index
from shards.root.manifest import FOLDER as MANIFESTS
from shards.root.manifest import (
    NUMBER,
    BucketIndex,
    check_rows,
    index_ids,
    index_name,
    parse_manifest,
    read_index,
    segment_error,
)
from shards.root.publish import read_rows
from shards.root.reading import captions, features, read_part, text_latents
from shards.root.segments import FOLDER as SEGMENTS
from shards.root.segments import content_id, load_segment, merge, names_outside, receipts_of
from shards.root.shared import RULES
from shards.root.writing import license_counts

Result = TypeVar("Result")
PART_COLUMNS = ("tar", "generation", "digest")
"""Columns of a segment that identify its parts and determine the id of an index."""


def verify_root(store: Store, note: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """Check a root, and yield one line per problem. An intact root yields none.

    `note` is called with a line for each problem of a recalled part. Such problems are not yielded, because a recalled
    part is not replaced: if its tar is encoded again with different content, the damaged files stay.

    Checks:
    - the checksum of every receipt and sealed record
    - the size and SHA-256 of every file that a receipt lists, whether the receipt is active or recalled, and whether it
      can be read
    - that parts contain no unlisted files
    - the shape and finiteness of every sample, and the number of samples per part
    - that sample tables match the receipts' counts and bitmaps
    - that every part in an index has a receipt
    - that every bucket's newest index, and its index.json, match the receipts

    Raises:
        RequestError: `store` is not a latents root.
        DamagedFile: encoding.json is damaged, so nothing else can be checked.
    """
    encoding, listed = EncodingRecord.load(store), list_commits(store)
    in_force, all_readable = set(active_receipts(listed)), True
    rules: dict[str, set[str]] = {}
    tars = {name: parsed[1] for name in listed if (parsed := parse_name(name)) and not parsed[3]}
    names = sorted(tars, key=lambda name: (tars[name], name))
    for tar, files in groupby(read_each(store, names), key=lambda file: tars[file[0]]):
        parts: dict[str, Receipt] = {}
        for name, data in files:
            try:
                receipt = parse_receipt(data, store.where(name))
            except (DamagedFile, RequestError) as error:
                yield str(error)
                all_readable = False
                continue
            if name != receipt.name:
                yield f"{store.where(name)} contains the receipt {receipt.name}, so it was renamed or copied"
            problems = verify_receipt(store, name, receipt, encoding)
            if name not in in_force:
                for line in problems:
                    note(f"{line} (recalled; only runs pinned to an older index read it)")
            else:
                yield from problems
                parts[receipt.bucket] = receipt
                rules.setdefault(receipt.bucket, set()).add(receipt.rule)
        if parts:
            yield from verify_tar(store, TarReceipts(tar, parts))
    records = [name for name in listed if name not in tars]
    records += [f"{folder}/{name}" for folder in ("tars", "inputs", RULES) for name in store.files(folder)]
    for name, data in read_each(store, sorted(records)):
        yield from errors_of(parse_sealed_json, data, store.where(name))
    for bucket, found in sorted(rules.items()):
        if len(found) > 1:
            yield f"{store.where(bucket)} was filled by more than one rule: {'; '.join(sorted(found))}"
    current, lost = yield from verify_published(store, tars)
    for id in exclusion_ids(store):
        yield from errors_of(load_exclusion, store, id)
    if all_readable:
        complete = [name for name in in_force if name.split("/")[1] not in lost]
        yield from verify_indexes(store, encoding, complete, current)


def verify_published(store: Store, receipts: Container[str]) -> Generator[str, None, tuple[dict[str, str], set[str]]]:
    """Check every manifest, index and segment, and that every part in an index has a receipt.

    Return a dict from bucket to the id of its newest index, and the buckets that lack receipts.
    """
    current: dict[str, str] = {}
    for name in filter(NUMBER.fullmatch, store.files(MANIFESTS)):
        try:
            current = {bucket: size.id for bucket, size in parse_manifest(store, f"{MANIFESTS}/{name}").buckets.items()}
        except (DamagedFile, RequestError) as error:
            yield str(error)
    indexes: dict[str, BucketIndex] = {}
    for id in index_ids(store):  # before the segments are listed, because a running job writes segments first
        if index := (yield from errors_of(read_index, store, "", id)):
            indexes[id] = index
    segments: dict[str, SegmentParts] = {}
    for name in store.files(SEGMENTS):
        if name.endswith(".arrow"):
            sha256 = name.removesuffix(".arrow")
            if segment := (yield from errors_of(load_parts, store, sha256)):
                segments[sha256] = segment
    intact = set()
    for id, index in indexes.items():
        problems = list(errors_of(check_index, store, id, index, segments))
        yield from problems
        intact |= set() if problems else {(index.bucket, sha256) for sha256 in index.segments}
    published = {name for bucket, sha256 in intact for name in receipts_of(segments[sha256].rows, bucket)}
    missing = (name for name in published if name not in receipts)
    lost = {name for name in missing if store.size(name) is None}  # a job may have published more since the listing
    for name in sorted(lost):
        yield (
            f"{store.where(name)} is missing, although its part was published: restore it from a backup, or rerun "
            f"the job that wrote the part"
        )
    return current, {name.split("/")[1] for name in lost}


@dataclass(frozen=True)
class SegmentParts:
    """The part of a segment's contents with which the indexes that list it are checked."""

    rows: pa.Table
    """Columns PART_COLUMNS."""
    outside: list[str]
    """Names outside the bucket's folder."""


def load_parts(store: Store, sha256: str) -> SegmentParts:
    """Load and check a segment."""
    rows = load_segment(store, sha256)
    # a copy, because the selected columns alone would keep the whole segment in memory
    return SegmentParts(rows.select(PART_COLUMNS).take(np.arange(len(rows))), names_outside(rows))


def check_index(store: Store, id: str, index: BucketIndex, segments: Mapping[str, SegmentParts]) -> None:
    """Check an index against the intact segments, and raise the same errors as `load_rows`."""
    for sha256 in index.segments:
        if sha256 not in segments:
            raise segment_error(store, id, f"is missing or damaged ({sha256}.arrow)")
    used = [segments[sha256] for sha256 in index.segments]
    rows = merge([segment.rows for segment in used], PART_COLUMNS)
    check_rows(store, id, rows, [name for segment in used for name in segment.outside])


def errors_of(check: Callable[..., Result], *arguments: object) -> Generator[str, None, Result | None]:
    """Yield the message of the error, if any, that a check raises for damaged, inconsistent or unreadable data. Return
    the result of the check, or None after an error."""
    try:
        return check(*arguments)
    except (DamagedFile, RequestError) as error:
        yield str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        yield f"{error.filename} cannot be read ({error.strerror}). Check the disk, or the mount."
    return None


def verify_receipt(store: Store, name: str, receipt: Receipt, encoding: EncodingRecord) -> Iterator[str]:
    """Check one receipt against the root, and its part's files and samples against the receipt. Yield one line per
    problem."""
    if receipt.encoding_id != encoding.id:
        yield f"{store.where(name)} has encoding id {receipt.encoding_id}, but the root has {encoding.id}"
    if receipt.part != f"{receipt.tar}.{content_hash(receipt.files)}":
        yield f"{store.where(name)} refers to part {receipt.part}, whose name does not match its content hash"
    for shared, record in receipt.shared_files.items():
        yield from verify_file(store, shared, record, store.where(shared))
    with store.local(receipt.folder) as folder:
        where, here = store.where(receipt.folder), LocalStore(folder)
        problems = [
            line
            for file, record in receipt.files.items()
            for line in verify_file(here, file, record, f"{where}/{file}")
        ]
        problems += [
            f"{where}/{file} is not listed in any receipt" for file in here.files() if file not in receipt.files
        ]
        yield from problems
        if not problems and receipt.samples:
            yield from verify_samples(folder, where, receipt.bucket, receipt.samples, encoding)


def verify_tar(store: Store, receipts: TarReceipts) -> Iterator[str]:
    """Check the counts and bitmaps of a tar's receipts against its parts' sample tables."""
    try:
        tables = {bucket: read_tables(store, part.folder, part.files) for bucket, part in receipts.parts.items()}
    except (DamagedFile, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EIO:
            raise
        return  # reported by `verify_receipt`
    keys = sorted({key for stored, refused in tables.values() for key in stored["key"] + refused["key"]})
    if len(keys) != receipts.samples_in and not any(OTHER_BUCKET in part.refused for part in receipts.parts.values()):
        in_tar = counted(receipts.samples_in, "sample")
        yield f"the receipts of tar {receipts.tar} count {in_tar}, but the tables of its parts list {len(keys):,}"
    for bucket, part in receipts.parts.items():
        stored, refused = tables[bucket]
        refused_counts = {reason: count for reason, count in part.refused.items() if reason != OTHER_BUCKET}
        if refused_counts != Counter(refused["reason"]):
            yield f"{store.where(part.name)} counts refused samples differently than its {bucket} part's table"
        if len(keys) == receipts.samples_in and not _matches_tables(part, keys, stored, refused):
            yield f"{store.where(part.name)} lists different samples or counts than its part's tables"


def _matches_tables(
    part: Receipt, keys: list[str], stored: dict[str, list[Any]], refused: dict[str, list[Any]]
) -> bool:
    """Return whether a receipt's bitmaps, and its counts of captions and licences, match its part's tables."""
    rows = [part.stored_samples, *map(part.rejected_samples, part.rejects)]
    found = [{key for key, bit in zip(keys, bits, strict=True) if bit} for bits in rows]
    pairs = list(zip(refused["key"], refused["reason"], strict=True))
    listed = [{key for key, why in pairs if why == reason} for reason in part.rejects]
    counts = {name: sum(stored["captions" if name == "stored" else name]) for name in part.captions}
    licenses = license_counts(stored.get("license", []))
    return found == [set(stored["key"]), *listed] and (counts, licenses) == (part.captions, part.licenses)


def verify_file(store: Store, name: str, record: FileRecord, where: str) -> Iterator[str]:
    """Check that a file exists and has the recorded size and SHA-256."""
    size = store.size(name)
    if size is None:
        yield f"{where} is missing"
    elif size != record.bytes:
        yield f"{where} is {counted(size, 'byte')} long, but its receipt records {counted(record.bytes, 'byte')}"
    else:
        yield from errors_of(check_sha256, store, name, record.sha256, where)


def check_sha256(store: Store, name: str, sha256: str, where: str) -> None:
    """Raise DamagedFile if a file has a different SHA-256."""
    if store.sha256(name) != sha256:
        raise DamagedFile(f"{where} is damaged: its SHA-256 does not match its receipt")


def verify_samples(folder: Path, where: str, bucket: str, num_samples: int, encoding: EncodingRecord) -> Iterator[str]:
    """Check that every sample of a part has the right shape and finite values, and check the number of samples."""
    shape = (encoding.image.num_planes, *Bucket.parse(bucket).latent_hw(encoding.image.downsampling))
    count = 0
    for sample in read_part(folder):
        count += 1
        texts = text_latents(sample, encoding)
        fits = [text_fits(array, encoding.texts[name]) for text in texts for name, array in text.items()]
        arrays = [sample["image_latents"], *(array for text in texts for array in text.values())]
        numbers = [array for name, array in sample.items() if name.startswith("pooled.")]
        if sample["image_latents"].shape != shape or not all(fits):
            shapes = " and ".join(str(array.shape) for array in arrays)
            yield f"{where}: sample {sample['key']} has shapes {shapes}, which do not match encoding.json"
        elif len({len(captions(sample, encoding)), len(texts), len(sample.get(CAPTION_WEIGHTS, texts))}) > 1:
            yield f"{where}: sample {sample['key']} has different numbers of captions and text latents"
        elif not all(np.isfinite(array).all() for array in (*arrays, *numbers, *features(sample, encoding).values())):
            yield f"{where}: sample {sample['key']} has non-finite values"
    if count != num_samples:
        yield f"{where} has {counted(count, 'sample')}, but its receipt records {num_samples:,}"


def text_fits(states: np.ndarray, tower: TextTower) -> bool:
    """Return whether the shape of one caption's hidden states, (tokens, width), is one that `tower` allows."""
    tokens, width = states.shape
    return width == tower.width and (1 <= tokens <= tower.length if tower.trim else tokens == tower.length)


def verify_indexes(
    store: Store, encoding: EncodingRecord, receipts: Iterable[str], current: Mapping[str, str]
) -> Iterator[str]:
    """Check that every bucket's newest index lists the parts of the bucket's active receipts, and that its index.json
    is byte-identical to an index.json built from them. `current`: bucket → id of the newest index."""
    names_by_bucket: dict[str, dict[str, str]] = {}
    for receipt in receipts:
        names_by_bucket.setdefault(receipt.split("/")[1], {})[receipt] = ""
    for bucket, names in sorted(names_by_bucket.items()):
        rows, name = merge(list(read_rows(store, names))), f"{bucket}/index.json"
        digest = hashlib.sha256()
        for piece in bucket_index(encoding, bucket, rows):
            digest.update(piece)
        if store.size(name) is None or store.sha256(name) != digest.hexdigest():
            yield (
                f"{store.where(name)} does not match the receipts: rebuild it with `python -m shards index "
                f"{store.where()}`"
            )
        id = content_id(rows)
        if current.get(bucket) != id or store.size(index_name(id)) is None:
            yield (
                f"{store.where()} has no index of bucket {bucket} that matches the receipts: rebuild it with `python "
                f"-m shards index {store.where()}`"
            )
