"""Training steps of the model families: the product's own loader, network and step, from its configs.

The latents are random. The loader reads them from a root in a temporary folder, so a rate includes the wait for data.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters

from bench.gpu_check import float8
from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup
from bench.kit.common import synchronize
from bench.kit.families import CONFIGS, read_family
from bench.kit.roots import make_root
from bench.train_step import release, seconds_of_steps
from shards.base.config import load_config
from train.config import TrainConfig
from train.metrics import peak_memory
from train.model.config import Checkpointing
from train.model.fit import dry_call
from train.model.flops import training_flops
from train.model.network import compile_network
from train.model.recompute import recomputed_shares
from train.prepare import prepare
from train.setup import build_step, make_loader

SHORTENED = {"flux1": {"num_layers": 4, "num_single_layers": 8}}
"""Fields of a backbone that does not fit on one GPU. Its rate is that of fewer blocks; its share of the matrix rate is
about that of all blocks."""
SMALL: dict[str, dict[str, Any]] = {
    "sd2": {"block_out_channels": [32, 32, 32, 32], "attention_head_dim": 2, "layers_per_block": 1},
    "sdxl": {
        "block_out_channels": [32, 32, 32],
        "attention_head_dim": 2,
        "layers_per_block": 1,
        "transformer_layers_per_block": 1,
    },
    "sd3": {"num_layers": 2, "num_attention_heads": 2, "caption_projection_dim": 128},
    "flux1": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1},
    "pixart-sigma": {"num_layers": 1, "num_attention_heads": 2, "cross_attention_dim": 144},
    "sana": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 32,
        "cross_attention_dim": 64,
    },
    "prx": {"depth": 1, "hidden_size": 128, "num_heads": 2},
}
"""Fields of each backbone in a rehearsal."""
MICROBATCHES = 2
"""Number of microbatches in a step."""
RECOMPUTED: dict[str, Checkpointing] = {"half recomputed": 0.5, "all recomputed": True}
"""Way to compile a network block by block → its `gradient_checkpointing`."""


@dataclass(frozen=True)
class FamilyPhase:
    """A phase of a family's training."""

    family: str
    phase: int
    how: tuple[str, ...] = ("eager", "blocks")
    """Ways to compile the network: `eager` (not at all), `blocks` (block by block) or `whole` (as one graph), each with
    the shipped gradient checkpointing, or block by block with that of `RECOMPUTED` or with `float8`."""

    def run(self, setup: Setup, found: Findings) -> None:
        """Time the family's step in each way. A way that fails or runs out of memory is listed as such."""
        for number, how in enumerate(self.how):
            cells: dict[str, Any] = {"family": self.family, "phase": self.phase, "compiled": how}
            if number and not found.has_time:
                found.row("families", **cells, note="skipped for lack of time")
                continue
            if how == "float8" and (problem := "a rehearsal" if setup.small else float8.missing(setup)):
                found.row("families", **cells, note=f"skipped: {problem}")
                continue
            with found.tried("families", **cells), tempfile.TemporaryDirectory() as folder:
                release(setup.device)
                found.row("families", **cells, **self.measure(setup, Path(folder), how))

    def measure(self, setup: Setup, folder: Path, how: str) -> dict[str, Any]:
        """Train on random latents in `folder`, and return a row of measurements."""
        config = self.config(setup, folder)
        share = RECOMPUTED.get(how, config.gradient_checkpointing)
        of_blocks, of_activations = recomputed_shares(share, compiled=how != "eager")
        config = config.model_copy(update={"gradient_checkpointing": of_blocks, "float8": how == "float8"})
        accelerator = setup.accelerator(config.precision)
        counters.clear()
        start = time.perf_counter()
        prepared = prepare(config, accelerator)
        step, _ = build_step(config, prepared, accelerator)
        if how != "eager":
            compile_network(step.network, 1, by_block=how != "whole", recomputed=of_activations)
        made = time.perf_counter() - start
        batches = iter(make_loader(config, prepared, accelerator, 0))
        waited: list[float] = []

        def numbered() -> Iterator[None]:
            for number in range(1 << 30):
                asked = time.perf_counter()
                batch = next(batches)
                waited.append(time.perf_counter() - asked)
                step(batch, number)
                yield

        steps = numbered()
        try:
            begun = time.perf_counter()
            next(steps)  # compiles
            synchronize(setup.device)
            first = time.perf_counter() - begun
            with setup.quiet():
                del waited[:]
                begun = time.perf_counter()
                seconds = seconds_of_steps(lambda: next(steps), setup.device, 0.1 if setup.small else 4)
                share = sum(waited) / (time.perf_counter() - begun)
        finally:
            batches.close()
        per_second = config.global_batch_size / seconds
        latent_hw = prepared.spec.streams[0].latent_hw
        tflops = per_second * training_flops(dry_call(step.network, prepared.backbone, prepared.spec, latent_hw)[1])
        accelerator.free_memory()
        return {
            "bucket": config.data.streams[0].bucket,
            "microbatch": config.microbatch_size,
            "per_second": round(per_second, 2),
            "tflops": round(tflops / 1e12, 1),
            "memory_gib": round(peak_memory(setup.device) / 2**30, 1),
            "wait for data": f"{share:.1%}",
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "parameters": sum(parameter.numel() for parameter in step.network.parameters()),
            "note": f"built in {made:.0f} s, first step {first:.0f} s",
        }

    def config(self, setup: Setup, folder: Path) -> TrainConfig:
        """Write a backbone and a root of random latents, and return the phase's config for one process on them."""
        path = CONFIGS / self.family / f"phase{self.phase}.yaml"
        shipped = load_config(TrainConfig, path, [], "train")
        fields = json.loads(shipped.network.read_text())
        fields |= SMALL[self.family] if setup.small else SHORTENED.get(self.family, {})
        (folder / "backbone.json").write_text(json.dumps(fields))
        family = read_family(self.family)
        bucket = "128x128" if setup.small else shipped.data.streams[0].bucket
        microbatch = 2 if setup.small else shipped.microbatch_size
        batch = MICROBATCHES * microbatch
        root = make_root(folder / "root", {bucket: [batch]}, encoding=family.encoding, num_tokens=family.num_tokens)
        overrides: dict[str, Any] = {
            "run_dir": str(folder / "run"),
            "max_steps": 1 << 30,
            "global_batch_size": batch,
            "microbatch_size": microbatch,
            "backbone.config": str(folder / "backbone.json"),
            "data.streams": json.dumps([{"root": str(root), "bucket": bucket}]),
            "data.num_canonical_nodes": 1,
            "data.num_workers": 2 if setup.small else 4,
            "sharding": "none",
            "compile": "false",
            "precision": "bfloat16",
            "device": setup.device.type,
            "init_from": "null",
            "log.tracker": "none",
        }
        words = [word for name, value in overrides.items() for word in (f"--{name}", str(value))]
        return load_config(TrainConfig, path, words, "train")
