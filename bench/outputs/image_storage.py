"""What each image storage costs and keeps: `python -m bench.outputs.image_storage`, for docs/evidence/image-storage.md.

The error of means is held against the posterior's own standard deviation, by which a training draw moves them anyway:
of the demo's trained VAE on its own pictures. The change in validation loss is that of a small U-Net.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kit.common import machine, table
from bench.outputs.text_unet import encode_root, unet_table, write_tar
from shards.base.store import LocalStore
from shards.root.committed import load_receipts
from shards.root.reading import image_latents, read_part

STORAGES: dict[str, dict[str, Any]] = {
    "float16": {},
    "int8": {"image": {"storage": "int8"}},
    "float16, mean": {"posterior": "mean"},
    "int8, mean": {"posterior": "mean", "image": {"storage": "int8"}},
    "int8, mean, float8": {"posterior": "mean", "image": {"storage": "int8"}, "text": {"storage": "float8"}},
    "int8, float8, trim": {"image": {"storage": "int8"}, "text": {"storage": "float8", "trim": True}},
    "int8, mean, float8, trim": {
        "posterior": "mean",
        "image": {"storage": "int8"},
        "text": {"storage": "float8", "trim": True},
    },
}


def moments_of(root: Path) -> np.ndarray:
    """(N, planes, h, w) float32 of a root of one bucket."""
    receipts = load_receipts(LocalStore(root))
    return np.stack([image_latents(sample) for receipt in receipts for sample in read_part(root / receipt.folder)])


def error_table(folder: Path, num_samples: int) -> str:
    """int8 against float16: means over the posterior's deviation, and variances over themselves."""
    write_tar(folder / "pictures", num_samples, seed=4)
    for name in ("float16", "int8"):
        encode_root(folder / "pictures", folder / f"error {name}", STORAGES[name])
    exact, rounded = (moments_of(folder / f"error {name}") for name in ("float16", "int8"))
    (mean, log_variance), (mean8, log_variance8) = (np.split(m, 2, axis=1) for m in (exact, rounded))
    deviation = np.exp(0.5 * np.clip(log_variance, -30, 20))
    errors = {
        "mean, over the posterior's standard deviation": np.abs(mean8 - mean) / deviation,
        "mean, over the deviation of all means": np.abs(mean8 - mean) / mean.std(),
        "variance, over itself": np.abs(np.exp(log_variance8 - log_variance) - 1),
    }
    rows = [
        [what, *(f"{v:.1e}" for v in (np.sqrt((e**2).mean()), np.quantile(e, 0.99), e.max()))]
        for what, e in errors.items()
    ]
    return (
        f"The posterior's standard deviation is {np.median(deviation):.3g} in the median, that of all means "
        f"{mean.std():.3g}.\n\n" + table(["error of int8", "RMS", "p99", "max"], rows)
    )


def main() -> None:
    """Both measurements, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1024, help="pictures that the U-Net is trained on")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine() + "\n", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        print(error_table(Path(temporary), options.samples) + "\n", flush=True)
        print(unet_table(Path(temporary), STORAGES, options.samples, options.steps, options.seeds))


if __name__ == "__main__":
    main()
