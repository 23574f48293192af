"""`python -m shards upgrade ROOT`: a root of version 1 gets receipts of version 2, one for each part; the parts stay.

It may be killed at any step, and be run again: until its last, which says that it is through, the receipts of version 1
are those that count.
"""

from shards.base.durable import sealed_json
from shards.base.errors import WorkError
from shards.base.store import Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import UPGRADED, Receipt, is_version1, parse_receipt
from shards.root.commit import record_tar
from shards.root.committed import list_commits, load_commits
from shards.root.shared import agree_on_rules, probe


def upgrade(store: Store) -> int:
    """Write a receipt of version 2 for every part of version 1; returns how many there are.

    Raises:
        RequestError: it is not a latents root, or its store does not create on condition.
        DamagedFile: a receipt or a table of a part is not what was written.
        WorkError: there is a receipt of version 2 already, of another part.
    """
    EncodingRecord.load(store)
    probe(store)
    etags = list_commits(store)
    rules, count = dict[Bucket, str](), 0
    for name in sorted(filter(is_version1, etags)):
        for _, _, receipt in load_commits(store, {name: etags[name]}):
            record_tar(store, receipt.tar, receipt.input, receipt.samples_in)
            _create(store, receipt)
            rules[Bucket.parse(receipt.bucket)] = receipt.rule
            count += 1
    agree_on_rules(store, rules)
    store.create(UPGRADED, sealed_json({"version": 2, "receipts": count}))
    return count


def _create(store: Store, receipt: Receipt) -> None:
    if store.create(receipt.name, receipt.sealed()):
        return
    found = parse_receipt(store.read(receipt.name), store.where(receipt.name))
    if found.files != receipt.files:
        raise WorkError(
            f"{store.where(receipt.name)} is there already, and names another part than the receipt of version 1 does "
            f"({receipt.folder}). Restore the one that is right from a copy."
        )
