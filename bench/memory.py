"""Compare estimates of GPU memory with measured peaks: `python -m bench.memory`. It needs no GPU.

The peaks are from docs/evidence/gpu-h200.txt. Steps had two microbatches and no moving averages. `--recomputed` prints
estimates for different shares of recomputed activations instead.
"""

import argparse
import json
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.gpu_check.families import SHORTENED
from bench.kit.common import section, table
from bench.kit.families import CONFIGS, read_family
from shards.base.config import load_config
from shards.format.buckets import Bucket
from train.config import TrainConfig
from train.model.config import AdamWConfig
from train.model.memory import GIB, StepMemory, StepSettings, step_memory
from train.model.network import class_of

MICROBATCHES = 2
SHARES = (False, 0.1, 0.25, 0.5, 0.75, True)
"""Settings of `gradient_checkpointing` to compare."""


@dataclass(frozen=True)
class Measured:
    """The peak memory of a step on an H200."""

    family: str
    phase: int
    microbatch_size: int
    gib: float
    compile: bool = False
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Family, phase, and the settings of `others`."""
        return ", ".join([self.family, f"phase {self.phase}", *(key.replace("_", " ") for key in self.others)])

    def estimate(self) -> StepMemory:
        """Estimate the memory of the step."""
        config = load_config(TrainConfig, CONFIGS / self.family / f"phase{self.phase}.yaml", [], "train")
        encoding = read_family(self.family).encoding
        fields = json.loads(config.network.read_text()) | SHORTENED.get(self.family, {})
        with torch.device("meta"):
            network = class_of(fields, config.network).from_config(fields)
        shape = Bucket.parse(config.data.streams[0].bucket).latent_hw(encoding.image.downsampling)
        settings = StepSettings(
            precision="bfloat16",
            microbatch_size=self.microbatch_size,
            images=MICROBATCHES * self.microbatch_size,
            optimizer_bytes=AdamWConfig.state_bytes,
            num_averages=0,
            compile=self.compile,
            **self.others,
        )
        backbone = config.backbone.resolved(encoding.texts)
        return step_memory(network, backbone, encoding, shape, settings)


LOW, CHECKPOINTED = {"low_precision_norms": True}, {"gradient_checkpointing": True}
MEASURED = (
    Measured("pixart-sigma", 1, 64, 42.4),
    Measured("pixart-sigma", 1, 64, 36.4, compile=True),
    Measured("prx", 1, 32, 42.2),
    Measured("prx", 1, 32, 31.9, compile=True),
    Measured("sana", 1, 32, 61.5),
    Measured("sd3", 1, 32, 58.2, compile=True),
    Measured("sdxl", 1, 16, 52.6),
    Measured("sdxl", 1, 16, 51.1, others=LOW),
    Measured("sdxl", 1, 64, 74.2, others=LOW),
    Measured("flux1", 2, 4, 44.7, others=CHECKPOINTED),
    Measured("flux1", 2, 4, 39.9, compile=True, others=CHECKPOINTED),
    Measured("sd2", 2, 32, 38.44, compile=True, others=LOW),
    Measured("sd2", 1, 128, 38.77, compile=True, others=LOW),
)


def compare_with_measured() -> str:
    """Return a Markdown table of estimated and measured peaks."""
    rows = []
    for each in MEASURED:
        estimate = each.estimate().total / GIB
        how = "compiled" if each.compile else "eager"
        ratio = f"{estimate / each.gib:.3f}"
        rows.append([each.name, each.microbatch_size, how, f"{each.gib:.1f}", f"{estimate:.1f}", ratio])
    return table(["step", "microbatch", "", "measured, GiB", "estimated, GiB", "ratio"], rows)


def compare_shares() -> str:
    """Return a Markdown table of the compiled steps: for each share, the peak in GiB and, in parentheses, the FLOPs
    relative to no recomputation."""
    rows = []
    for each in (step for step in MEASURED if step.compile):
        others = {name: value for name, value in each.others.items() if name != "gradient_checkpointing"}
        cells, flops = [], 0
        for share in SHARES:
            memory = replace(each, others=others | {"gradient_checkpointing": share}).estimate()
            flops = flops or memory.flops
            cells.append(f"{memory.total / GIB:.1f} ({memory.flops / flops:.2f} ×)")
        rows.append([replace(each, others=others).name, each.microbatch_size, *cells])
    return table(["step", "microbatch", *(str(share).lower() for share in SHARES)], rows)


def main() -> None:
    """Print a Markdown section."""
    parser = argparse.ArgumentParser(prog="bench.memory", description=__doc__)
    parser.add_argument("--recomputed", action="store_true", help="compare shares of recomputed activations")
    if parser.parse_args().recomputed:
        print(section("Recomputed activations", "bench.memory", compare_shares()))
    else:
        print(section("Memory of a training step", "bench.memory", compare_with_measured()))


if __name__ == "__main__":
    main()
