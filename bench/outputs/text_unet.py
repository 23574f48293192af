"""The change in a small U-Net's validation loss with each storage, on the demo's picture world: the second tables of
`text_storage` and `image_storage`. Stage 1 and the trainer are the product's own.
"""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from bench.kit.common import table
from examples.shapes.captions import write_caption
from examples.shapes.models import MODELS
from examples.shapes.scenes import draw_scene, sample_scene
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode.tar import encode_tar
from precompute.encode.towers import Towers
from precompute.encode.worker import load_networks
from precompute.input.tars import list_tars
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.index import write_indexes
from shards.root.shared import create_root
from train.config import TrainConfig, ValidationConfig
from train.data.streams import open_data
from train.model.inputs import Conditioning
from train.objective.latents import StoredLatents
from train.objective.loss import DiffusionLoss
from train.objective.validation import open_validation
from train.prepare import prepare
from train.setup import build_step, make_loader

UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 64,
    "attention_head_dim": 4,
    "norm_num_groups": 16,
}
BATCH_SIZE = 32
VALIDATION_SAMPLES = 128


def write_tar(folder: Path, count: int, seed: int) -> None:
    """FOLDER/00000.tar: pictures of random scenes, 64 px, and their captions."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for i in range(count):
            scene, file = sample_scene(rng), io.BytesIO()
            draw_scene(scene, 64, 64, rng).save(file, "PNG")
            for suffix, data in (("png", file.getvalue()), ("txt", write_caption(scene, rng).encode())):
                member = tarfile.TarInfo(f"{i:09d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def encode_root(tars: Path, root: Path, storage: dict[str, Any]) -> None:
    """Stage 1 in this process, with the demo's models.

    Args:
        storage: fields of the config; what they do not say is stored without rounding.
    """
    fields = {
        "input": str(tars),
        "output": root,
        "buckets": ["64x64"],
        "vae": str(MODELS / "vae"),
        "texts": {
            "text": {
                "model": str(MODELS / "text_encoder"),
                "tokenizer": str(MODELS / "tokenizer"),
                "class_name": "CLIPTextModel",
            }
        },
        "precision": "float32",
        "workers": {"num_gpus": 0, "num_cpus": 1, "decode_threads": 1},
    }
    exact = {name: {"storage": "float16"} | storage.get(name, {}) for name in ("image", "text")}
    config = PrecomputeConfig.model_validate(fields | storage | exact)
    encoding, store = describe_encoding(config), open_store(root)
    create_root(store, encoding)
    towers = Towers(*load_networks(encoding, "cpu"), config.workers.batch_size)
    for tar in list_tars(config.input):
        encode_tar(tar, make_recipe(config, encoding), store, towers)
    write_indexes(store)


def train_config(folder: Path, root: Path, steps: int, seed: int) -> TrainConfig:
    """The demo's first phase, with a smaller U-Net."""
    (folder / "unet.json").write_text(json.dumps(UNET))
    fields: dict[str, Any] = {
        "run_dir": folder / f"run-{root.name}-{seed}",
        "seed": seed,
        "max_steps": steps,
        "global_batch_size": BATCH_SIZE,
        "microbatch_size": BATCH_SIZE,
        "backbone": {"config": folder / "unet.json"},
        "data": {"streams": [{"root": root, "bucket": "64x64"}], "num_workers": 0, "num_canonical_nodes": 8},
        "objective": {"prediction": "v_prediction"},
        "optimizer": {"lr": 2e-3, "betas": (0.9, 0.99)},
        "schedule": {"kind": "cosine", "warmup_steps": 20},
        "precision": "float32",
        "log": {"tracker": "none"},
    }
    return TrainConfig.model_validate(fields)


def trained_unet(config: TrainConfig, accelerator: Accelerator) -> torch.nn.Module:
    """A whole run of the trainer, without logs and checkpoints."""
    prepared = prepare(config, accelerator)
    train_step, _ = build_step(config, prepared, accelerator)
    for step, batch in zip(range(config.max_steps), make_loader(config, prepared, rank=0, step=0), strict=False):
        train_step(batch, step)
    network: torch.nn.Module = train_step.network
    return network


class WithoutCaptions(StoredLatents):
    """Every sample sees the empty caption."""

    def conditioning(self, batch: Any, dropped: Tensor) -> Conditioning:
        """As the trainer's, with all captions dropped."""
        return super().conditioning(batch, torch.ones_like(dropped))


def validation_loss(
    unet: torch.nn.Module, train_root: Path, root: Path, kind: type[StoredLatents], accelerator: Accelerator
) -> float:
    """Loss on the held-out `root`, which is stored as `train_root` is."""
    config = train_config(root.parent, train_root, 1, 0)
    spec, cpu = open_data(config.data, BATCH_SIZE), torch.device("cpu")
    loss = DiffusionLoss(config.objective, spec, cpu)
    loss.latents = kind(spec, cpu, loss.backbone)
    held_out = ValidationConfig(root=root, bucket="64x64", samples=VALIDATION_SAMPLES, batch_size=64)
    validation = open_validation(held_out, EncodingRecord.load(open_store(root)), seed=0)
    return float(validation(unet, loss, accelerator)["val_loss"])


def unet_table(
    folder: Path, storages: dict[str, dict[str, Any]], num_samples: int, steps: int, seeds: int, captions: bool = False
) -> str:
    """Validation loss by storage: under the U-Net trained on the first, and under one trained on that storage.

    Args:
        storages: name → fields of stage 1's config; the first is what the others are held against.
        captions: also without any.
    """
    first = next(iter(storages))
    accelerator = Accelerator(cpu=True)
    write_tar(folder / "tars", num_samples, seed=2)
    write_tar(folder / "held-out-tars", VALIDATION_SAMPLES, seed=3)
    roots = {}
    for name, storage in storages.items():
        roots[name] = folder / name, folder / f"held out {name}"
        for tars, root in zip(("tars", "held-out-tars"), roots[name], strict=True):
            encode_root(folder / tars, root, storage)
    under_exact: dict[str, list[float]] = {name: [] for name in (*roots, *["no captions"] * captions)}
    under_own: dict[str, list[float]] = {name: [] for name in roots}
    for seed in range(seeds):
        for name, (root, held_out) in roots.items():
            unet = trained_unet(train_config(folder, root, steps, seed), accelerator)
            under_own[name].append(validation_loss(unet, root, held_out, StoredLatents, accelerator))
            if name == first:
                for other, pair in roots.items():
                    under_exact[other].append(validation_loss(unet, *pair, StoredLatents, accelerator))
                if captions:
                    none = validation_loss(unet, root, held_out, WithoutCaptions, accelerator)
                    under_exact["no captions"].append(none)
            print(f"seed {seed}, {name}: {under_own[name][-1]:.5f}", flush=True)
    exact = np.array(under_own[first])
    rows = [
        [name, change(under_exact[name], exact), change(under_own[name], exact) if name in under_own else "—"]
        for name in under_exact
    ]
    return (
        f"{first}'s validation loss: {exact.mean():.5f}; over {seeds} seeds, its standard deviation is "
        f"{exact.std(ddof=1):.5f}.\n\n" + table(("storage", f"U-Net trained on {first}", "U-Net trained on it"), rows)
    )


def change(losses: list[float], exact: np.ndarray) -> str:
    """The change from the first with the same seed: mean over the seeds, and its range."""
    by_seed = np.array(losses) / exact - 1
    return f"{by_seed.mean():+.2%} ({by_seed.min():+.2%} to {by_seed.max():+.2%})"
