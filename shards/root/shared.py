"""Files that belong to the root as a whole: encoding.json, bucket rules, and the empty caption's text latents.

The first job creates them, and every later job must match them. torch is imported inside the functions that need it, so
that reading a config or a root does not require this slow import.
"""

import hashlib
import os
import uuid
from contextlib import suppress
from pathlib import PurePath

from shards.base.durable import DamagedFile, parse_sealed_json, sealed_json
from shards.base.errors import Outage, RequestError
from shards.base.store import STAGING_FOLDER, LocalStore, Store
from shards.format.buckets import NEAREST, Bucket
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.receipts import active_receipts
from shards.format.text import TextLatents
from shards.root.committed import list_commits, read_receipts

UNCOND_NAME = "uncond.safetensors"
RULES = "rules"


def check_writable(store: Store) -> None:
    """Raise RequestError if a root is a local folder in which this user cannot create files, or a file."""
    if not isinstance(store, LocalStore):
        return
    place = store.root.absolute()
    while not os.path.exists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "not writable by this user" if place.is_dir() else "not a folder"
        raise RequestError(
            f"{store.where()} cannot be created or extended: {place} is {reason}. Choose a folder that this "
            f"user can write to."
        )


def check_root(store: Store, encoding: EncodingRecord) -> None:
    """Check that a root has this encoding, or does not exist yet. Raises RequestError if its encoding differs (the
    message names the fields), or if the folder is not a latents root."""
    # listed before looking for encoding.json, because another job may create the root in between
    existing = [name for name in store.entries() if not name.startswith(".")]
    if store.size(FILE_NAME) is None:
        if existing:
            raise RequestError(
                f"{store.where()} is neither empty nor a latents root (it has no {FILE_NAME}). Set `output` to a "
                f"different location."
            )
        return
    theirs = EncodingRecord.load(store)
    differences = theirs.differences(encoding)
    if differences:
        vae = ""
        if any(difference.startswith("image.weights.") for difference in differences):
            here, there = encoding.image.weights.name, theirs.image.weights.name
            vae = f" `vae` is a different model: the root was encoded with {there}, and this run uses {here}."
        raise RequestError(
            f"{store.where()} was written with a different encoding: {'; '.join(differences)} (root ≠ this run).{vae} "
            f"New latents would be incompatible with those in the root. Set `output` to a different location, or set "
            f"these fields to the root's values."
        )


def check_rules(store: Store, rules: dict[Bucket, str]) -> None:
    """Check that the root's buckets were filled by these rules, so that images are assigned to buckets in the same way
    in all tars. Raises RequestError if a bucket, or an aspect table with the same base, has a different rule."""
    ours = rule_files(rules)
    for name, data in store.read_many(list(ours)).items():
        theirs = parse_sealed_json(data, store.where(name))["rule"]
        if theirs != ours[name]:
            kind = "the buckets of" if "base" in name else "bucket"
            raise RequestError(
                f"{store.where()} fills {kind} {PurePath(name).stem} by the rule `{theirs}`, but this run would use "
                f"`{ours[name]}`. `covers`, the rule of the buckets in `buckets`, selects every image that is at least "
                f"as wide and as tall as the bucket. `nearest`, the rule of `aspect`, selects the images whose aspect "
                f"ratio is closest to that of this bucket in its table. Set `output` to a different location, or use "
                f"the `buckets` and `aspect` settings that this root was created with."
            )


def rule_files(rules: dict[Bucket, str]) -> dict[str, str]:
    """Return a dict from path in the root to rule. There is one file per bucket, and one per aspect table, named after
    the table's base."""
    tables = {rule for rule in rules.values() if rule.startswith(NEAREST)}
    by_base = {rule.removeprefix(NEAREST).split(",")[0].replace(" ", "-"): rule for rule in tables}
    return {f"{RULES}/{name}.json": rule for name, rule in [*by_base.items(), *rules.items()]}


def create_root(store: Store, encoding: EncodingRecord) -> None:
    """Write encoding.json, or check the existing one; several jobs may call this concurrently. Raises RequestError if
    the existing encoding differs, or if the store does not support create-if-absent."""
    check_root(store, encoding)
    check_create_if_absent(store)
    store.create(FILE_NAME, encoding.sealed())
    check_root(store, encoding)


def record_rules(store: Store, rules: dict[Bucket, str]) -> None:
    """Write the rules of these buckets, or check the existing ones. Raises RequestError if an existing rule differs."""
    for name, rule in rule_files(rules).items():
        store.create(name, sealed_json({"rule": rule}))
    check_rules(store, rules)


def check_create_if_absent(
    store: Store, risk: str = "concurrent attempts at the same tar could overwrite each other"
) -> None:
    """Raise RequestError if the store ignores create-if-absent, which commits and leases need.

    Args:
        risk: what could happen otherwise, for the message.
    """
    name, first, second = f"{STAGING_FOLDER}/{uuid.uuid4().hex}", b"first", b"second"
    store.create(name, first)
    again = store.create(name, second)
    kept = store.read(name)
    with suppress(Outage):  # these credentials may not be allowed to delete
        store.remove([name])
    if again or kept != first:
        raise RequestError(
            f"{store.where()} is on a store that ignores conditional writes (`If-None-Match: *`): a second create "
            f"request overwrote the first object, so {risk}. Use a store that supports conditional writes, or a newer "
            f"version of this store."
        )


def has_uncond(store: Store) -> bool:
    """Return whether the root has the empty caption's text latents."""
    return store.size(UNCOND_NAME) is not None


def write_uncond(store: Store, empty: dict[str, TextLatents]) -> None:
    """Store the text latents of the empty caption, one entry per text tower, unless the root already has them.

    Existing latents are kept. Even if a different GPU model computed them, they differ from `empty` only by rounding.
    """
    import torch
    from safetensors.torch import save

    tensors = {}
    for name, caption in empty.items():
        tensors[f"num_tokens.{name}"] = torch.tensor(caption.num_tokens)
        for kind, tensor in (("text_latents", caption.states), ("pooled", caption.pooled)):
            if tensor is not None:
                tensors[f"{kind}.{name}"] = tensor.half().contiguous()
    store.create(UNCOND_NAME, save(tensors))


def load_uncond(store: Store) -> dict[str, TextLatents]:
    """Load the empty caption's float16 text latents, keyed by text tower. Raises RequestError if no unit has ever been
    encoded into this root, and DamagedFile if the file does not match the SHA-256 that the receipts record."""
    from safetensors.torch import load

    try:
        data = store.read(UNCOND_NAME)
    except FileNotFoundError:
        raise RequestError(
            f"{store.where(UNCOND_NAME)} is missing: no shard has been encoded into this root. "
            f"Run `make precompute SHARD=all` first."
        ) from None
    names = active_receipts(list_commits(store))[:1]  # every receipt records the file's hash
    for receipt in read_receipts(store, names):
        if receipt.shared_files[UNCOND_NAME].sha256 != hashlib.sha256(data).hexdigest():
            raise DamagedFile(
                f"{store.where(UNCOND_NAME)} is damaged: its SHA-256 does not match {store.where(receipt.name)}. "
                f"Restore it from a backup."
            )
    tensors = load(data)
    names = sorted(name.removeprefix("num_tokens.") for name in tensors if name.startswith("num_tokens."))
    return {
        name: TextLatents(
            tensors.get(f"text_latents.{name}"), int(tensors[f"num_tokens.{name}"]), tensors.get(f"pooled.{name}")
        )
        for name in names
    }
