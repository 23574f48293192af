"""`python -m bench.outputs.alignment`: what aligning a layer with a cached feature tower (REPA) costs a training step.

The projection head's arithmetic is counted on the meta device at each family's published size, and its features are
read with the batch, or lie in memory, in a run of the demo's U-Net.
"""

import argparse
import math
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator

from bench.kit.common import section, table, timed_in_turn
from bench.kit.families import FAMILIES, read_family
from bench.kit.roots import feature_tower, make_root
from shards.format.buckets import Bucket
from train.config import TrainConfig
from train.data.loader import Loader
from train.model.flops import training_flops
from train.objective.alignment import layer_shape, make_head
from train.objective.config import RepaConfig
from train.prepare import prepare
from train.setup import build_step, make_loader
from train.start import ACCELERATE_PRECISION

BUCKET, TEXT, PARTS = "64x64", (16, 64), 8
WIDTH = 768
"""Of DINOv2-base."""
LAYERS = {
    "UNet2DConditionModel": ("down_blocks.1", 0),
    "PixArtTransformer2DModel": ("transformer_blocks.9", 0),
    "SD3Transformer2DModel": ("transformer_blocks.8", 1),
    "FluxTransformer2DModel": ("transformer_blocks.8", 1),
    "SanaTransformer2DModel": ("transformer_blocks.8", 0),
    "PRXTransformer2DModel": ("blocks.8", 0),
}
"""Class → a layer in its first half, and which of its outputs: the paper aligns the eighth block."""


def main() -> None:
    """Measure, and print a section of docs/evidence/benchmarks.md."""
    parser = argparse.ArgumentParser(prog="bench.outputs.alignment", description=__doc__)
    parser.add_argument("--samples", type=int, default=512, help="of the root that is read")
    parser.add_argument("--rounds", type=int, default=10, help="with and without reading, in turn")
    options = parser.parse_args(sys.argv[1:])
    arithmetic = table(["family", "layer", "tokens", "width", "the head, of a step's FLOPs"], map(share, FAMILIES))
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        read = reading(Path(folder), options.samples, options.rounds)
    print(section("A cached feature tower", "bench.outputs.alignment", f"{arithmetic}\n\n{read}"))


def share(name: str) -> list[object]:
    """Of a family, a row: at its first phase's size, and without text or image towers."""
    family = read_family(name)
    layer, output = LAYERS[type(family.network).__name__]
    config = RepaConfig(layer=layer, output=output)
    shape = layer_shape(family.network, config, family.call)
    tokens, width = (math.prod(shape[2:]), shape[1]) if len(shape) == 4 else shape[1:]
    latent_hw = Bucket.parse(family.bucket).latent_hw(family.encoding.image.downsampling)
    with torch.device("meta"):
        head = make_head(config, {latent_hw: shape}, WIDTH, seed=0)
        flops = training_flops(lambda: head(torch.empty(tokens, width)))
    return [f"{name} ({family.bucket})", layer, tokens, width, f"{flops / training_flops(family.call):.2%}"]


def reading(root: Path, samples: int, rounds: int) -> str:
    """A step with an aligned layer: its features read with the batch, or lying in memory."""
    make_root(root, {BUCKET: [samples // PARTS] * PARTS}, TEXT, features={"dino": feature_tower(WIDTH)})
    config = yaml.safe_load(Path("examples/shapes/configs/phase1.yaml").read_text()) | {
        "run_dir": str(root / "run"),
        "data": {"root": str(root), "bucket": BUCKET, "num_workers": 0, "num_canonical_nodes": 8},
        "repa": {"layer": "mid_block"},
        "log": {"tracker": "none", "every": 10_000},
    }
    train_config = TrainConfig.model_validate(config)
    accelerator = Accelerator(mixed_precision=ACCELERATE_PRECISION[train_config.precision], cpu=True)
    prepared = prepare(train_config, accelerator)
    train_step, _ = build_step(train_config, prepared, accelerator)
    numbers = count()
    size, without = train_config.global_batch_size, prepared.spec.of_towers(list(prepared.spec.texts), [])
    alone = iter(Loader(train_config.data, without, size, 0, 0, torch.arange(size)))
    batches = iter(make_loader(train_config, prepared, rank=0, step=0))
    held = {name: column for name, column in next(batches).columns.items() if name not in without.lengths}

    def from_memory() -> None:
        batch = next(alone)
        batch.columns |= held
        train_step(batch, next(numbers))

    def read() -> None:
        train_step(next(batches), next(numbers))

    pair = timed_in_turn(read, from_memory, rounds, time.process_time)
    others = without.sample_bytes(BUCKET)
    features = prepared.spec.sample_bytes(BUCKET) - others
    return (
        f"**Reading features** ({features:,} bytes a sample, beside {others:,}): a step "
        f"of {size} samples of the demo's U-Net, read in the training process itself, so that nothing hides it, "
        f"runs by processor time at **{pair.ratio:.3f} ×** the rate of the same step whose features lie in memory "
        f"({pair.spread}, {rounds} rounds in turn)."
    )


if __name__ == "__main__":
    main()
