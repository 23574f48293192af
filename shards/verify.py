"""`python -m shards verify ROOT`: is every byte of a latents root what was written, and does all of it fit together?"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shards.buckets import Bucket
from shards.encoding import EncodingRecord
from shards.files import DamagedFile, sha256_file
from shards.index import bucket_index
from shards.reading import read_part, text_latents
from shards.receipts import FOLDER, FileRecord, Receipt, load_receipt
from shards.tables import REJECTS_SCHEMA, read_books, write_rows


def verify_root(root: Path) -> Iterator[str]:
    """Yield one line for each thing that is wrong; none if the root is sound.

    Checked: every receipt's own seal; size and SHA-256 of every file it lists; that parts hold no other files; that
    each sample has its bucket's shape and is finite, and the parts as many as receipts say; that each bucket's
    index.json and the rejects are what the receipts and parts give.

    Raises:
        RequestError: `root` is not a latents root.
        DamagedFile: its encoding.json is not what was written, so nothing else can be judged.
    """
    encoding = EncodingRecord.load(root)
    receipts, broken = [], []
    for path in sorted((root / FOLDER).glob("[!.]*.json")):
        try:
            receipt = load_receipt(root, path.stem)
            assert receipt is not None
            receipts.append(receipt)
            if receipt.shard != path.stem:
                broken.append(f"{path} is the receipt of shard {receipt.shard}, under another's name")
        except (DamagedFile, ValueError) as error:
            broken.append(str(error))
    yield from broken
    for receipt in receipts:
        yield from verify_receipt(root, receipt, encoding)
    yield from verify_indexes(root, receipts)


def verify_receipt(root: Path, receipt: Receipt, encoding: EncodingRecord) -> Iterator[str]:
    """What is wrong with one committed shard."""
    if receipt.encoding_id != encoding.id:
        yield f"{root / FOLDER / receipt.shard}.json is of encoding {receipt.encoding_id}; the root's is {encoding.id}"
    for name, record in receipt.shared_files.items():
        yield from verify_file(root / name, record)
    parts_are_sound = True
    for bucket, part in receipt.parts.items():
        folder = root / bucket / receipt.shard
        wrong = [line for name, record in part.files.items() for line in verify_file(folder / name, record)]
        present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        wrong += [f"{folder / name} is in no receipt" for name in sorted(present - set(part.files))]
        yield from wrong
        parts_are_sound = parts_are_sound and not wrong
        if not wrong and part.samples:
            yield from verify_samples(folder, bucket, part.samples, encoding)
    if parts_are_sound:
        yield from verify_books(root, receipt)


def verify_books(root: Path, receipt: Receipt) -> Iterator[str]:
    """The rejects table and the receipt's totals against the parts' own tables."""
    books = read_books({bucket: root / bucket / receipt.shard for bucket in receipt.parts})
    totals = (receipt.encoded, receipt.truncated_captions, receipt.rejected)
    if totals != (books.encoded, books.truncated_captions, books.rejected):
        yield f"{root / FOLDER / receipt.shard}.json does not add up to its parts' tables"
    path = root / "rejects" / f"{receipt.shard}.parquet"
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder) / path.name
        write_rows(expected, REJECTS_SCHEMA, list(books.rejects))
        if not path.is_file() or path.read_bytes() != expected.read_bytes():
            yield f"{path} is not what the parts' tables give"


def verify_file(path: Path, record: FileRecord) -> Iterator[str]:
    """Missing, of another size, or of another content."""
    if not path.is_file():
        yield f"{path} is missing"
    elif path.stat().st_size != record.bytes:
        yield f"{path} has {path.stat().st_size} bytes; its receipt says {record.bytes}"
    elif sha256_file(path) != record.sha256:
        yield f"{path} is damaged: its SHA-256 is not the one in its receipt"


def verify_samples(folder: Path, bucket: str, num_samples: int, encoding: EncodingRecord) -> Iterator[str]:
    """Shapes and finiteness of every sample of a part, and their number."""
    shape = (encoding.num_planes, *Bucket.parse(bucket).latent_hw(encoding.image.downsampling))
    count = 0
    for sample in read_part(folder):
        count += 1
        text = text_latents(sample, encoding)
        tokens_fit = len(text) <= encoding.text.length if encoding.text.trim else len(text) == encoding.text.length
        if sample["image_latents"].shape != shape or not tokens_fit or text.shape[1] != encoding.text.width:
            yield f"{folder}: sample {sample['key']} has shapes {sample['image_latents'].shape} and {text.shape}"
        elif not (np.isfinite(sample["image_latents"]).all() and np.isfinite(text).all()):
            yield f"{folder}: sample {sample['key']} is not finite"
    if count != num_samples:
        yield f"{folder} holds {count} samples; its receipt says {num_samples}"


def verify_indexes(root: Path, receipts: list[Receipt]) -> Iterator[str]:
    """Every bucket's index.json against what the receipts give, byte for byte."""
    for bucket in sorted({bucket for receipt in receipts for bucket in receipt.parts}):
        if len(rules := {receipt.parts[bucket].rule for receipt in receipts if bucket in receipt.parts}) > 1:
            yield f"{root / bucket} was filled by more than one rule: {'; '.join(sorted(rules))}"
        path = root / bucket / "index.json"
        try:
            expected = bucket_index(root, bucket, receipts)
        except DamagedFile as error:
            yield f"{path} cannot be checked: {error}"
            continue
        if not path.is_file() or path.read_bytes() != expected:
            yield f"{path} is not what the receipts give: write it anew with `python -m shards index {root}`"
