"""`python -m shards verify ROOT`: is every byte of a latents root what was written, and does all of it fit together?"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shards.base.durable import DamagedFile
from shards.base.store import LocalStore, Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import FOLDER, FileRecord, Part, Receipt, committed_shards, load_receipt
from shards.format.tables import OTHER_BUCKET, REJECTS_SCHEMA, read_books, write_rows
from shards.format.towers import TextTower
from shards.root.index import bucket_index
from shards.root.reading import captions, features, read_part, text_latents


def verify_root(store: Store) -> Iterator[str]:
    """Yield one line for each thing that is wrong; none if the root is sound.

    Checked: every receipt's own seal; size and SHA-256 of every file it lists; that parts hold no other files; that
    each sample has its bucket's shape and is finite, and the parts as many as receipts say; that each bucket's
    index.json and the rejects are what the receipts and parts give.

    Raises:
        RequestError: it is not a latents root.
        DamagedFile: its encoding.json is not what was written, so nothing else can be judged.
    """
    encoding, receipts = EncodingRecord.load(store), []
    for shard in committed_shards(store):
        try:
            receipt = load_receipt(store, shard)
        except (DamagedFile, ValueError) as error:
            yield str(error)
            continue
        assert receipt is not None
        receipts.append(receipt)
        if receipt.shard != shard:
            yield f"{_receipt(store, shard)} is the receipt of shard {receipt.shard}, under another's name"
    for receipt in receipts:
        yield from verify_receipt(store, receipt, encoding)
    yield from verify_indexes(store, receipts)


def verify_receipt(store: Store, receipt: Receipt, encoding: EncodingRecord) -> Iterator[str]:
    """What is wrong with one committed shard."""
    if receipt.encoding_id != encoding.id:
        yield f"{_receipt(store, receipt.shard)} is of encoding {receipt.encoding_id}; the root's is {encoding.id}"
    for shared, record in receipt.shared_files.items():
        yield from verify_file(store, shared, record, store.where(shared))
    with ExitStack() as stack:
        parts, sound = {}, True
        for bucket, part in receipt.parts.items():
            parts[bucket] = stack.enter_context(store.local(f"{bucket}/{receipt.shard}"))
            wrong = list(verify_part(parts[bucket], store.where(f"{bucket}/{receipt.shard}"), bucket, part, encoding))
            yield from wrong
            sound = sound and not wrong
        if sound:
            yield from verify_books(store, receipt, parts)


def _receipt(store: Store, shard: str) -> str:
    return store.where(f"{FOLDER}/{shard}.json")


def verify_part(folder: Path, where: str, bucket: str, part: Part, encoding: EncodingRecord) -> Iterator[str]:
    """The files and the samples of a part that lies in `folder`, itself or a copy of `where`."""
    here = LocalStore(folder)
    wrong = [line for n, record in part.files.items() for line in verify_file(here, n, record, f"{where}/{n}")]
    wrong += [f"{where}/{name} is in no receipt" for name in here.files() if name not in part.files]
    yield from wrong
    if not wrong and part.samples:
        yield from verify_samples(folder, where, bucket, part.samples, encoding)


def verify_books(store: Store, receipt: Receipt, parts: dict[str, Path]) -> Iterator[str]:
    """The rejects table and the receipt's totals against the parts' own tables."""
    books = read_books(parts)
    if (receipt.encoded, receipt.captions, receipt.rejected) != (books.encoded, books.captions, books.rejected):
        yield f"{_receipt(store, receipt.shard)} does not add up to its parts' tables"
    for bucket, listed in books.refused.items():
        told = {reason: n for reason, n in receipt.parts[bucket].refused.items() if reason != OTHER_BUCKET}
        if told != listed:
            yield f"{_receipt(store, receipt.shard)} counts other refusals of {bucket} than its part"
    name = f"rejects/{receipt.shard}.parquet"
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder) / "rejects.parquet"
        write_rows(expected, REJECTS_SCHEMA, list(books.rejects))
        if store.read_many([name]).get(name) != expected.read_bytes():
            yield f"{store.where(name)} is not what the parts' tables give"


def verify_file(store: Store, name: str, record: FileRecord, where: str) -> Iterator[str]:
    """Missing, of another size, or of another content."""
    size = store.size(name)
    if size is None:
        yield f"{where} is missing"
    elif size != record.bytes:
        yield f"{where} has {size} bytes; its receipt says {record.bytes}"
    elif store.sha256(name) != record.sha256:
        yield f"{where} is damaged: its SHA-256 is not the one in its receipt"


def verify_samples(folder: Path, where: str, bucket: str, num_samples: int, encoding: EncodingRecord) -> Iterator[str]:
    """Shapes and finiteness of every sample of a part, and their number."""
    shape = (encoding.image.num_planes, *Bucket.parse(bucket).latent_hw(encoding.image.downsampling))
    count = 0
    for sample in read_part(folder):
        count += 1
        texts = text_latents(sample, encoding)
        fits = [text_fits(array, encoding.texts[name]) for text in texts for name, array in text.items()]
        arrays = [sample["image_latents"], *(array for text in texts for array in text.values())]
        numbers = [array for name, array in sample.items() if name.startswith("pooled.")]
        if sample["image_latents"].shape != shape or not all(fits):
            yield f"{where}: sample {sample['key']} has shapes {' and '.join(str(array.shape) for array in arrays)}"
        elif len(captions(sample, encoding)) != len(texts):
            yield f"{where}: sample {sample['key']} has not as many captions as text latents"
        elif not all(np.isfinite(array).all() for array in (*arrays, *numbers, *features(sample, encoding).values())):
            yield f"{where}: sample {sample['key']} is not finite"
    if count != num_samples:
        yield f"{where} holds {count} samples; its receipt says {num_samples}"


def text_fits(states: np.ndarray, tower: TextTower) -> bool:
    """Whether one caption's states have a shape that `tower` allows."""
    tokens, width = states.shape
    return width == tower.width and (1 <= tokens <= tower.length if tower.trim else tokens == tower.length)


def verify_indexes(store: Store, receipts: list[Receipt]) -> Iterator[str]:
    """Every bucket's index.json against what the receipts give, byte for byte."""
    for bucket in sorted({bucket for receipt in receipts for bucket in receipt.parts}):
        if len(rules := {receipt.parts[bucket].rule for receipt in receipts if bucket in receipt.parts}) > 1:
            yield f"{store.where(bucket)} was filled by more than one rule: {'; '.join(sorted(rules))}"
        name = f"{bucket}/index.json"
        try:
            expected = bucket_index(store, bucket, receipts)
        except DamagedFile as error:
            yield f"{store.where(name)} cannot be checked: {error}"
            continue
        if store.read_many([name]).get(name) != expected:
            yield (
                f"{store.where(name)} is not what the receipts give: write it anew with `python -m shards index "
                f"{store.where()}`"
            )
