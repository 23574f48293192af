"""A latents root: the command line that makes it, and all that is in it."""

from collections.abc import Mapping
from pathlib import Path

from streaming import StreamingDataset

from shards.base.store import LocalStore
from shards.format.tables import TOO_SMALL, Columns, read_tables
from shards.root.committed import TarReceipts, load_tars


def precompute_arguments(models: Path, tars: Path, root: Path, *more: str) -> list[str]:
    """Stage 1's command line on the CPU; as `precompute_config`, stored without rounding."""
    fields = {
        "config": Path(__file__).parents[1] / "configs" / "precompute.yaml",
        "input": tars,
        "output": root,
        "vae": models / "vae",
        "texts.text.model": models / "text_encoder",
        "texts.text.tokenizer": models / "tokenizer",
        "buckets": '["64x64", "128x128"]',
        "precision": "float32",
        "image.storage": "float16",
        "text.storage": "float16",
        "workers.num_gpus": 0,
        "workers.num_cpus": 1,
        "workers.decode_threads": 2,
    }
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))] + list(more)


def tree(root: Path) -> dict[str, bytes]:
    """Name → bytes of every file of a root; hidden ones are left out, and index/, which knows when receipts came."""
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith((".", "index/"))}


def part_of(root: Path, bucket: str, tar: str) -> Path:
    """The folder of a tar's part, as its receipt names it."""
    return root / receipts_of_tar(root, tar).parts[bucket].folder


def receipts_of_tar(root: Path, tar: str) -> TarReceipts:
    return next(books for books in load_tars(LocalStore(root)) if books.tar == tar)


def list_rejects(tables: Mapping[str, tuple[Columns, Columns]]) -> list[tuple[str, str, str, str, str]]:
    """(key, url, bucket, reason, detail) by key, of the tables of a tar's parts, by bucket. `bucket` is empty where the
    sample is in none; otherwise it names the one that refused it for another reason than its size."""
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
    """key, url, bucket (empty: in none), reason and detail of what a tar lost, by the tables of its parts."""
    parts = receipts_of_tar(root, tar).parts.items()
    listed = list_rejects({name: read_tables(LocalStore(root), part.folder, part.files) for name, part in parts})
    return [dict(zip(("key", "url", "bucket", "reason", "detail"), row, strict=True)) for row in listed]


def rows(root: Path, bucket: str) -> list[dict]:
    """Every sample of a bucket, in order, by streaming's own reader."""
    dataset = StreamingDataset(local=str(root / bucket), batch_size=1, shuffle=False)
    return [dataset[i] for i in range(len(dataset))]
