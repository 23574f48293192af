"""What the defaults do to the loss: `python -m bench.outputs.defaults`, for docs/evidence/curves.md.

A small U-Net is trained with nothing of what configs/ turns on (float32 as torch runs it, storage without rounding),
with each of these alone, and with all; each is validated in float32 on pictures that are stored as its own.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from bench.kit.common import machine, table
from bench.outputs.text_unet import (
    VALIDATION_SAMPLES,
    change,
    encode_root,
    train_config,
    trained_unet,
    validation_loss,
    write_tar,
)
from train.objective.latents import StoredLatents
from train.start import ACCELERATE_PRECISION

EXACT: dict[str, Any] = {}
ROUNDED = {"image": {"storage": "int8"}, "text": {"storage": "float8"}}
OFF = {"precision": "float32"}
ON = {"precision": "bfloat16", "compile": True, "channels_last": True}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing of it": (EXACT, OFF),
    "image.storage int8, text.storage float8": (ROUNDED, OFF),
    "precision bfloat16": (EXACT, OFF | {"precision": "bfloat16"}),
    "compile": (EXACT, OFF | {"compile": True}),
    "channels_last": (EXACT, OFF | {"channels_last": True}),
    "all of it": (ROUNDED, ON),
}
"""Name → what stage 1 stores, and fields of the training config."""


def losses_of(folder: Path, samples: int, steps: int, seeds: int) -> dict[str, list[float]]:
    """Way → validation loss of each seed."""
    write_tar(folder / "tars", samples, seed=2)
    write_tar(folder / "held-out-tars", VALIDATION_SAMPLES, seed=3)
    roots = {}
    for name, storage in ("exact", EXACT), ("rounded", ROUNDED):
        roots[name] = folder / name, folder / f"held out {name}"
        for tars, root in zip(("tars", "held-out-tars"), roots[name], strict=True):
            encode_root(folder / tars, root, storage)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        for number, (way, (storage, fields)) in enumerate(WAYS.items()):
            root, held_out = roots["rounded" if storage else "exact"]
            config = train_config(folder, root, steps, seed).model_copy(
                update=fields | {"run_dir": folder / f"run-{seed}-{number}"}
            )
            AcceleratorState._reset_state(reset_partial_state=True)  # which keeps the precision of the first
            accelerator = Accelerator(cpu=True, mixed_precision=ACCELERATE_PRECISION[config.precision])
            unet = trained_unet(config, accelerator)
            unet._compiled_call_impl = None  # validated as it is
            torch.compiler.reset()
            AcceleratorState._reset_state(reset_partial_state=True)
            found[way].append(validation_loss(unet, root, held_out, StoredLatents, Accelerator(cpu=True)))
            print(f"seed {seed}, {way}: {found[way][-1]:.5f}", flush=True)
    return found


def main() -> None:
    """Train them all; Markdown."""
    parser = argparse.ArgumentParser(prog="bench.outputs.defaults", description=__doc__)
    parser.add_argument("--samples", type=int, default=1024, help="pictures that the U-Net is trained on")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine() + "\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = losses_of(Path(folder), options.samples, options.steps, options.seeds)
    off = np.array(found["nothing of it"])
    rows = [[way, change(losses, off)] for way, losses in found.items()]
    print(
        f"\nValidation loss with nothing of it: {off.mean():.5f}; over {len(off)} seeds, its standard deviation is ",
        end="",
    )
    print(f"{off.std(ddof=1):.5f}, {off.std(ddof=1) / off.mean():.1%}.\n\n" + table(["on", "change of the loss"], rows))


if __name__ == "__main__":
    main()
