"""Helpers for latents roots: the command line that creates a root, and its content."""

import json
from collections.abc import Mapping
from pathlib import Path

from streaming import StreamingDataset

from shards.base.store import LocalStore, Store
from shards.format.tables import TOO_SMALL, Columns, read_tables
from shards.open import open_store
from shards.root.committed import TarReceipts, iter_tars, load_receipts

ONE_BUCKET, BOTH_BUCKETS = '["64x64"]', '["64x64", "128x128"]'
"""Values of `--buckets`. Where buckets do not matter, one suffices, and takes much less time."""
TIMED = ("started", "seconds", "attempts", "sha256", "token")
"""Fields in which two receipts of one tar may differ, and the seal over them."""


def precompute_arguments(models: Path, tars: Path, root: Path, *more: str, buckets: str = BOTH_BUCKETS) -> list[str]:
    """Return stage 1's command line for the CPU, stored without rounding like `precompute_config`."""
    fields = {
        "config": Path(__file__).parents[1] / "configs" / "precompute.yaml",
        "input": tars,
        "output": root,
        "vae": models / "vae",
        "texts.text.model": models / "text_encoder",
        "texts.text.tokenizer": models / "tokenizer",
        "buckets": buckets,
        "precision": "float32",
        "image.storage": "float16",
        "text.storage": "float16",
        "workers.num_gpus": 0,
        "workers.num_cpus": 1,
        "workers.decode_threads": 2,
    }
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))] + list(more)


def tree(root: Path | str) -> dict[str, bytes]:
    """Return name → bytes of the files of a root, which may be at a URL, without hidden files and index/, which depends
    on when receipts were created."""
    store = open_store(root)
    return {name: store.read(name) for name in store.files() if not name.startswith((".", "index/"))}


def comparable(root: Path | str, *ignored: str) -> dict[str, object]:
    """Return name → content of the files of a root, like `tree`. A receipt's content is reduced to the fields on which
    two runs must agree, without those in `ignored`."""
    files: dict[str, object] = dict(tree(root))
    for name in [name for name in files if name.startswith(("commits/", "tars/"))]:
        receipt = json.loads(files[name])  # type: ignore[arg-type]
        files[name] = {key: value for key, value in receipt.items() if key not in (*TIMED, *ignored)}
    return files


def part_of(root: Path, bucket: str, tar: str) -> Path:
    """Return the folder of a tar's part, as named by its receipt."""
    return root / receipts_of_tar(root, tar).parts[bucket].folder


def parts(root: Path) -> dict[str, str]:
    """Return part folder (named by content hash) → bitmap of its samples."""
    return {receipt.folder: receipt.stored for receipt in load_receipts(LocalStore(root))}


def load_tars(store: Store) -> list[TarReceipts]:
    """Load the active receipts of all tars, ordered by tar name."""
    return list(iter_tars(store))


def receipts_of_tar(root: Path, tar: str) -> TarReceipts:
    return next(books for books in iter_tars(LocalStore(root)) if books.tar == tar)


def list_rejects(tables: Mapping[str, tuple[Columns, Columns]]) -> list[tuple[str, str, str, str, str]]:
    """Return (key, url, bucket, reason, detail) sorted by key, from the tables of a tar's parts by bucket. `bucket` is
    empty if no bucket has the sample; otherwise it is the bucket that refused it for a reason other than its
    size."""
    stored = {key for samples, _ in tables.values() for key in samples["key"]}
    refused: dict[str, list[tuple[str, str, str, str, str]]] = {}
    for bucket in sorted(tables):
        for key, url, reason, detail in zip(*tables[bucket][1].values(), strict=True):
            refused.setdefault(key, []).append((key, url, bucket, reason, detail))
    rejects = []
    for key in sorted(refused):
        telling = [row for row in refused[key] if row[3] != TOO_SMALL]
        if key in stored:
            rejects += telling
        else:
            key, url, _, reason, detail = (telling or refused[key])[0]
            rejects.append((key, url, "", reason, detail))
    return rejects


def rejects(root: Path, tar: str) -> list[dict[str, str]]:
    """Return key, url, bucket (empty: none), reason and detail of a tar's refused samples, from the tables of its
    parts."""
    parts = receipts_of_tar(root, tar).parts.items()
    listed = list_rejects({name: read_tables(LocalStore(root), part.folder, part.files) for name, part in parts})
    return [dict(zip(("key", "url", "bucket", "reason", "detail"), row, strict=True)) for row in listed]


def rows(root: Path, bucket: str) -> list[dict]:
    """Read every sample of a bucket in order with streaming's own reader."""
    dataset = StreamingDataset(local=str(root / bucket), batch_size=1, shuffle=False)
    return [dataset[i] for i in range(len(dataset))]
