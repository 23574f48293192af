"""A latents root as a whole: made once, matched by every later run, read by the trainer.

torch is imported inside the functions that need it: reading a config or a root must not cost its import.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from shards.base.durable import DamagedFile, parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.store import STAGING_FOLDER, Store
from shards.format.buckets import NEAREST, Bucket
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.receipts import active_receipts
from shards.format.text import TextLatents
from shards.root.committed import list_commits, load_commits

if TYPE_CHECKING:
    from torch import Tensor

UNCOND_NAME = "uncond.safetensors"


RULES = "rules"


def check_root(store: Store, encoding: EncodingRecord) -> None:
    """Refuse a root whose encoding is not `encoding`; an absent root is fine.

    Raises:
        RequestError: the fields that differ, named.
    """
    lie_there = [name for name in store.entries() if not name.startswith(".")]  # first: another job may make the root
    if store.size(FILE_NAME) is None:
        if lie_there:
            raise RequestError(
                f"{store.where()} is not empty and not a latents root (it has no {FILE_NAME}). Give another `output`."
            )
        return
    theirs = EncodingRecord.load(store)
    differences = theirs.differences(encoding)
    if differences:
        vae = ""
        if any(difference.startswith("image.weights.") for difference in differences):
            here, there = encoding.image.weights.name, theirs.image.weights.name
            vae = f" `vae` is a different model: the root was made with {there}, and this run has {here}."
        raise RequestError(
            f"{store.where()} was written with another encoding: {'; '.join(differences)} (root ≠ this run).{vae} Its "
            f"latents and new ones would not mean the same. Give another `output`, or set these fields as the root has "
            f"them."
        )


def check_rules(store: Store, rules: dict[Bucket, str]) -> None:
    """Refuse to add to a root's buckets by another rule than they were filled by: which pictures a bucket holds, and
    which is the nearest of a base, would differ from tar to tar.

    Raises:
        RequestError: a bucket, or two tables of one base, and their rules.
    """
    ours = rule_files(rules)
    for name, data in store.read_many(list(ours)).items():
        theirs = parse_sealed_json(data, store.where(name))["rule"]
        if theirs != ours[name]:
            kind = "the buckets of" if "base" in name else "its bucket"
            raise RequestError(
                f"{store.where()} fills {kind} {PurePath(name).stem} by the rule `{theirs}`, and this run's would "
                f"be `{ours[name]}`. (`covers`: every picture that covers it, as in `buckets`; `nearest`: those whose "
                f"ratio it is nearest in that table of `aspect`.) Give another `output`, or set `buckets` and `aspect` "
                f"as there."
            )


def rule_files(rules: dict[Bucket, str]) -> dict[str, str]:
    """Name in the root → rule: one for each bucket, and one for each table, by its base."""
    tables = {rule for rule in rules.values() if rule.startswith(NEAREST)}
    by_base = {rule.removeprefix(NEAREST).split(",")[0].replace(" ", "-"): rule for rule in tables}
    return {f"{RULES}/{name}.json": rule for name, rule in [*by_base.items(), *rules.items()]}


def create_root(store: Store, encoding: EncodingRecord) -> None:
    """Write encoding.json, or check the one that is there. Safe when several jobs do it at once.

    Raises:
        RequestError: the one that is there differs, or the store does not create on condition.
    """
    check_root(store, encoding)
    probe(store)
    store.create(FILE_NAME, encoding.sealed())
    check_root(store, encoding)


def agree_on_rules(store: Store, rules: dict[Bucket, str]) -> None:
    """Write the rules of these buckets, or check those that are there.

    Raises:
        RequestError: those that are there differ.
    """
    for name, rule in rule_files(rules).items():
        store.create(name, sealed_json({"rule": rule}))
    check_rules(store, rules)


def probe(store: Store) -> None:
    """See that of two who create a name one is told so: all of the commit rests on it.

    Raises:
        RequestError: the store writes over what is there.
    """
    name, first, second = f"{STAGING_FOLDER}/{uuid.uuid4().hex}", b"first", b"second"
    store.create(name, first)
    again = store.create(name, second)
    kept = store.read(name)
    store.remove([name])
    if again or kept != first:
        raise RequestError(
            f"{store.where()} is on a store that ignores the condition under which an object is created "
            f"(`If-None-Match: *`): a second request replaced the first one's object. Two attempts at one tar could "
            f"not be kept apart. Use a store, or a version of it, that knows conditional writes."
        )


def has_uncond(store: Store) -> bool:
    """Whether the empty caption's text latents are there."""
    return store.size(UNCOND_NAME) is not None


def write_uncond(store: Store, empty: dict[str, TextLatents]) -> None:
    """Store what each text tower makes of the empty caption, if there is none; others' is as good.

    (It may differ by rounding where another kind of GPU made it.)
    """
    from safetensors.torch import save

    store.create(UNCOND_NAME, save(dict(_uncond_tensors(empty))))


def _uncond_tensors(empty: dict[str, TextLatents]) -> Iterator[tuple[str, Tensor]]:
    import torch

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
    from safetensors.torch import load

    try:
        data = store.read(UNCOND_NAME)
    except FileNotFoundError:
        raise RequestError(
            f"{store.where(UNCOND_NAME)} is missing: no shard of this root has been encoded. "
            f"Run `make precompute` first."
        ) from None
    names = active_receipts(etags := list_commits(store))[:1]  # any one: all of them recorded it
    for name, _, receipt in load_commits(store, {name: etags[name] for name in names})[:1]:
        if receipt.shared_files[UNCOND_NAME].sha256 != hashlib.sha256(data).hexdigest():
            raise DamagedFile(
                f"{store.where(UNCOND_NAME)} is damaged: its SHA-256 is not that in {store.where(name)}. Restore it "
                f"from a copy."
            )
    tensors = load(data)
    names = sorted(name.removeprefix("num_tokens.") for name in tensors if name.startswith("num_tokens."))
    return {
        name: TextLatents(
            tensors.get(f"text_latents.{name}"), int(tensors[f"num_tokens.{name}"]), tensors.get(f"pooled.{name}")
        )
        for name in names
    }
