"""A latents root as a whole: made once, matched by every later run, read by the trainer."""

import hashlib
from collections.abc import Iterator

import torch
from safetensors.torch import load, save
from torch import Tensor

from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format.buckets import NEAREST, Bucket
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.receipts import FOLDER, committed_shards, load_receipt, load_receipts
from shards.format.text import TextLatents, current_name

UNCOND_NAME = "uncond.safetensors"


def check_root(store: Store, encoding: EncodingRecord) -> None:
    """Refuse a root whose encoding is not `encoding`; an absent root is fine.

    Raises:
        RequestError: the fields that differ, named.
    """
    if store.size(FILE_NAME) is None:
        if any(not name.startswith(".") for name in store.entries()):
            raise RequestError(
                f"{store.where()} is not empty and not a latents root (it has no {FILE_NAME}). Give another `output`."
            )
        return
    differences = EncodingRecord.load(store).differences(encoding)
    if differences:
        raise RequestError(
            f"{store.where()} was written with another encoding: {'; '.join(differences)} (root ≠ this run). Its "
            f"latents and new ones would not mean the same. Give another `output`, or set these fields as the root has "
            f"them."
        )


def check_rules(store: Store, rules: dict[Bucket, str]) -> None:
    """Refuse to add to a root's buckets by another rule than they were filled by: which pictures a bucket holds, and
    which is the nearest of a base, would differ from shard to shard.

    Raises:
        RequestError: a bucket, or two tables of one base, and their rules.
    """
    names = {str(bucket): rule for bucket, rule in rules.items()}
    tables = {rule for rule in rules.values() if rule.startswith(NEAREST)}
    found = {(bucket, part.rule) for receipt in load_receipts(store) for bucket, part in receipt.parts.items()}
    for bucket, rule in sorted(found):
        other = {ours for ours in tables if _base(ours) == _base(rule) and ours != rule}
        ours = names.get(bucket, rule) if not other else other.pop()
        if ours != rule:
            raise RequestError(
                f"{store.where()} fills its bucket {bucket} by the rule `{rule}`, and this run's would be `{ours}`. "
                f"(`covers`: every picture that covers it, as in `buckets`; `nearest`: those whose ratio it is nearest "
                f"in that table of `aspect`.) Give another `output`, or set `buckets` and `aspect` as there."
            )


def _base(rule: str) -> str:
    return rule.split(",")[1] if rule.startswith(NEAREST) else rule


def create_root(store: Store, encoding: EncodingRecord) -> None:
    """Write encoding.json, or check the one that is there. Safe when several jobs do it at once."""
    with store.locked("root") as still_held:
        check_root(store, encoding)
        if store.size(FILE_NAME) is None:
            still_held()
            encoding.save(store)


def has_uncond(store: Store) -> bool:
    """Whether the empty caption's text latents are there."""
    return store.size(UNCOND_NAME) is not None


def write_uncond(store: Store, empty: dict[str, TextLatents], encoding: EncodingRecord) -> None:
    """Store what each text tower makes of the empty caption, once; later calls change nothing."""
    with store.locked("root") as still_held:
        if not has_uncond(store):
            tensors = {encoding.stored_name(name): tensor for name, tensor in _uncond_tensors(empty)}
            still_held()
            store.write(UNCOND_NAME, save(tensors))


def _uncond_tensors(empty: dict[str, TextLatents]) -> Iterator[tuple[str, Tensor]]:
    for name, caption in empty.items():
        yield f"num_tokens.{name}", torch.tensor(caption.num_tokens)
        if caption.states is not None:
            yield f"text_latents.{name}", caption.states.half().contiguous()
        if caption.pooled is not None:
            yield f"pooled.{name}", caption.pooled.half().contiguous()


def load_uncond(store: Store) -> dict[str, TextLatents]:
    """What each text tower makes of the empty caption, as float16.

    Raises:
        RequestError: the root has none, so no shard of it was ever encoded.
        DamagedFile: they are not what a receipt recorded.
    """
    try:
        data = store.read(UNCOND_NAME)
    except FileNotFoundError:
        raise RequestError(
            f"{store.where(UNCOND_NAME)} is missing: no shard of this root has been encoded. "
            f"Run `make precompute` first."
        ) from None
    for shard in committed_shards(store)[:1]:  # any one: all of them recorded it
        receipt = load_receipt(store, shard)
        if receipt is not None and receipt.shared_files[UNCOND_NAME].sha256 != hashlib.sha256(data).hexdigest():
            raise DamagedFile(
                f"{store.where(UNCOND_NAME)} is damaged: its SHA-256 is not that in "
                f"{store.where(f'{FOLDER}/{shard}.json')}. Restore it from a copy."
            )
    tensors = {current_name(name): tensor for name, tensor in load(data).items()}
    names = sorted(name.removeprefix("num_tokens.") for name in tensors if name.startswith("num_tokens."))
    return {
        name: TextLatents(
            tensors.get(f"text_latents.{name}"), int(tensors[f"num_tokens.{name}"]), tensors.get(f"pooled.{name}")
        )
        for name in names
    }
