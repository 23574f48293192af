"""A latents root as a whole: made once, matched by every later run, read by the trainer."""

from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from shards.buckets import NEAREST, Bucket
from shards.encoding import FILE_NAME, EncodingRecord
from shards.errors import RequestError
from shards.files import DamagedFile, locked, sha256_file, write_atomically
from shards.receipts import FOLDER, load_receipt, load_receipts

UNCOND_NAME = "uncond.safetensors"


def check_root(root: Path, encoding: EncodingRecord) -> None:
    """Refuse a root whose encoding is not `encoding`; an absent root is fine.

    Raises:
        RequestError: the fields that differ, named.
    """
    if not (root / FILE_NAME).exists():
        if root.exists() and any(path for path in root.iterdir() if not path.name.startswith(".")):
            raise RequestError(
                f"{root} is not empty and not a latents root (it has no {FILE_NAME}). Give another `output`."
            )
        return
    differences = EncodingRecord.load(root).differences(encoding)
    if differences:
        raise RequestError(
            f"{root} was written with another encoding: {'; '.join(differences)} (root ≠ this run). Its latents and "
            f"new ones would not mean the same. Give another `output`, or set these fields as the root has them."
        )


def check_rules(root: Path, rules: dict[Bucket, str]) -> None:
    """Refuse to add to a root's buckets by another rule than they were filled by: which pictures a bucket holds, and
    which is the nearest of a base, would differ from shard to shard.

    Raises:
        RequestError: a bucket, or two tables of one base, and their rules.
    """
    names = {str(bucket): rule for bucket, rule in rules.items()}
    tables = {rule for rule in rules.values() if rule.startswith(NEAREST)}
    found = {(bucket, part.rule) for receipt in load_receipts(root) for bucket, part in receipt.parts.items()}
    for bucket, rule in sorted(found):
        other = {ours for ours in tables if _base(ours) == _base(rule) and ours != rule}
        ours = names.get(bucket, rule) if not other else other.pop()
        if ours != rule:
            raise RequestError(
                f"{root} fills its bucket {bucket} by the rule `{rule}`, and this run's would be `{ours}`. (`covers`: "
                f"every picture that covers it, as in `buckets`; `nearest`: those whose ratio it is nearest in that "
                f"table of `aspect`.) Give another `output`, or set `buckets` and `aspect` as the root has them."
            )


def _base(rule: str) -> str:
    return rule.split(",")[1] if rule.startswith(NEAREST) else rule


def create_root(root: Path, encoding: EncodingRecord) -> None:
    """Write encoding.json, or check the one that is there. Safe when several jobs do it at once."""
    with locked(root / ".locks" / "root.lock"):
        check_root(root, encoding)
        if not (root / FILE_NAME).exists():
            encoding.save(root)


def write_uncond(root: Path, text_latents: Tensor, num_tokens: int) -> None:
    """Store the empty caption's text latents, (tokens, width), once; later calls change nothing."""
    with locked(root / ".locks" / "root.lock"):
        if not (root / UNCOND_NAME).exists():
            tensors = {"text_latents": text_latents.half().contiguous(), "num_tokens": torch.tensor(num_tokens)}
            write_atomically(root / UNCOND_NAME, save(tensors))


def load_uncond(root: Path) -> tuple[Tensor, int]:
    """The empty caption's text latents, (tokens, width) float16, and how many of the tokens are real.

    Raises:
        RequestError: the root has none, so no shard of it was ever encoded.
    """
    path = root / UNCOND_NAME
    if not path.is_file():
        raise RequestError(f"{path} is missing: no shard of this root has been encoded. Run `make precompute` first.")
    for path_of_receipt in islice((root / FOLDER).glob("[!.]*.json"), 1):  # any one: all of them recorded it
        receipt = load_receipt(root, path_of_receipt.stem)
        if receipt is not None and receipt.shared_files[UNCOND_NAME].sha256 != sha256_file(path):
            raise DamagedFile(
                f"{path} is damaged: its SHA-256 is not that in {path_of_receipt}. Restore it from a copy."
            )
    tensors = load_file(path)
    return tensors["text_latents"], int(tensors["num_tokens"])
