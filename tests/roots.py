"""A latents root: the command line that makes it, and all that is in it."""

from pathlib import Path

from streaming import StreamingDataset


def precompute_arguments(models: Path, tars: Path, root: Path, *more: str) -> list[str]:
    """Stage 1's command line on the CPU."""
    fields = {
        "config": Path(__file__).parents[1] / "configs" / "precompute.yaml",
        "input": tars,
        "output": root,
        "vae": models / "vae",
        "text_encoder": models / "text_encoder",
        "tokenizer": models / "tokenizer",
        "buckets": '["64x64", "128x128"]',
        "precision": "float32",
        "workers.num_gpus": 0,
        "workers.num_cpus": 1,
        "workers.decode_threads": 2,
    }
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))] + list(more)


def tree(root: Path) -> dict[str, bytes]:
    """Name → bytes of every file of a root, hidden ones left out."""
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(".")}


def rows(root: Path, bucket: str) -> list[dict]:
    """Every sample of a bucket, in order, by streaming's own reader."""
    dataset = StreamingDataset(local=str(root / bucket), batch_size=1, shuffle=False)
    return [dataset[i] for i in range(len(dataset))]
