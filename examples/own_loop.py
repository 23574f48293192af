"""Train on a latents root with a custom loop, using `LatentDataset` (based on streaming) instead of the trainer.

Example: python -m examples.own_loop runs/demo/latents 64x64
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.utils.data import DataLoader

from shards.base.errors import RequestError, console
from shards.dataset import LatentDataset
from shards.format.encoding import EncodingRecord
from shards.open import open_store

UNET = Path(__file__).parent / "shapes" / "unet.json"
BATCH = 32


def collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the samples' latents, (N, C, h, w), and the text latents of their first captions, (N, tokens, width)."""
    return (
        torch.stack([sample["image_latents"] for sample in samples]),
        torch.stack([sample["text.text"][0] for sample in samples]),
    )


def read_index(root: str, bucket: str) -> dict[str, Any]:
    """Read the bucket's index.json. If it is missing, raise a clear error, because streaming would print a traceback.

    Raises:
        RequestError: the root or the bucket does not exist.
    """
    store = open_store(root)
    EncodingRecord.load(store)
    if store.size(f"{bucket}/index.json") is None:
        buckets = sorted({name.split("/")[0] for name in store.files("") if name.endswith("/index.json")})
        raise RequestError(f"{root} has no indexed bucket {bucket}. Indexed buckets: {', '.join(buckets) or 'none'}.")
    index: dict[str, Any] = json.loads(store.read(f"{bucket}/index.json"))
    return index


def train(root: str, bucket: str, steps: int, unet_config: Path = UNET) -> list[float]:
    """Train a small U-Net to predict the noise, and return the loss of each step.

    Raises:
        RequestError: the root or the bucket does not exist, or the bucket has fewer samples than a batch.
    """
    torch.manual_seed(0)
    index = read_index(root, bucket)
    count = sum(shard["samples"] for shard in index["shards"])
    if count < BATCH:
        raise RequestError(
            f"One batch needs {BATCH} samples, but the bucket {bucket} in {root} has only {count}, so no step is "
            f"possible. Encode more images, or lower BATCH in {Path(__file__).name}."
        )
    dataset = LatentDataset(root, bucket, batch_size=BATCH, shuffle=True)
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]] = DataLoader(
        dataset, BATCH, collate_fn=collate, drop_last=True
    )
    unet = UNet2DConditionModel.from_config(json.loads(unet_config.read_text()))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=5e-4)
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    losses: list[float] = []
    while len(losses) < steps:
        for latents, text in batches:
            noise, timesteps = torch.randn_like(latents), torch.randint(0, 1000, (len(latents),))
            noisy = scheduler.add_noise(latents, noise, timesteps)
            loss = F.mse_loss(unet(noisy, timesteps, text).sample, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) % 50 == 0:
                print(f"step {len(losses)}: loss {sum(losses[-50:]) / 50:.4f}", flush=True)
            if len(losses) == steps:
                break
    return losses


def run(arguments: list[str]) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(prog="examples.own_loop", description=__doc__)
    parser.add_argument("root", help="folder or URL of a latents root")
    parser.add_argument("bucket", help="bucket, such as 64x64")
    parser.add_argument("--steps", type=int, default=300, help="number of optimizer steps; default: 300")
    options = parser.parse_args(arguments)
    train(options.root, options.bucket, options.steps)


main = console(run)

if __name__ == "__main__":
    main()
