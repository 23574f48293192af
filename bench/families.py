"""What each model family needs on a GPU and how fast it should train, computed without a GPU:
`python -m bench.families`.

Graphs and memory are from traces on fake tensors (train/model/memory.py), FLOPs from torch's counter, and rates from
the planner's model of a step (plan/arithmetic/scaling.py).
"""

import argparse
import sys
from dataclasses import dataclass, replace

from torch._dynamo.utils import counters

from bench.kit.common import section, table
from bench.kit.families import CONFIGS, FAMILIES
from plan.arithmetic.work import count_work
from plan.config import Plan
from plan.measured import Rates
from plan.memory import CAPACITIES, checkpointing, encoder_spec, read_network
from plan.report import Inputs, phase_row
from shards.base.config import load_config
from train.config import TrainConfig
from train.data.spec import DataSpec
from train.memory import step_settings
from train.model.memory import GIB, StepMemory, step_memory, usable

GPUS = (8, 128)
KINDS = ("A100", "H100", "H200")
PEAK = 989e12
"""Dense bfloat16 FLOP/s of an H200, from its datasheet."""
MEASURED: dict[str, tuple[float, float]] = {
    "flux1": (306, 306),
    "pixart-sigma": (306, 306),
    "prx": (365, 365),
    "sana": (261.8, 261.8),
    "sd15": (343.9, 327.2),
    "sd2": (343.9, 327.2),
    "sd3": (357.3, 357.3),
    "sdxl": (186, 186),
}
"""TFLOP/s of a training step in each phase on one H200 (docs/evidence/gpu.md). Where a phase was not measured, the
other phase's rate stands for it, and for Stable Diffusion 1.5, that of Stable Diffusion 2. SANA's and SDXL's are of
steps that were not compiled."""


@dataclass(frozen=True)
class Traced:
    """What a trace of a training step shows."""

    graphs: int
    breaks: int
    memory: list[StepMemory]
    """On each number of GPUs in `GPUS`."""


def trace(config: TrainConfig, data: DataSpec) -> Traced:
    """Trace a step of a training config."""
    network, backbone, shape = read_network(config, data)
    few, many = (step_settings(config, num_gpus) for num_gpus in GPUS)
    counters.clear()
    memory = step_memory(network, backbone, data, shape, few)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    if replace(many, images=few.images) == few:
        other = replace(memory, batch=memory.batch * many.images // few.images)
    else:
        other = step_memory(network, backbone, data, shape, many)
    return Traced(graphs, breaks, [memory, other])


def needs(family: str) -> list[list[str]]:
    """Return a row for each phase of a family: its graphs, FLOPs and memory."""
    plan = read_plan(family, KINDS[-1], 0)
    work, rows = count_work(plan.networks, [phase.bucket for phase in plan.phases]), []
    for number, phase in enumerate(plan.phases, 1):
        config = load_config(TrainConfig, CONFIGS / family / f"phase{number}.yaml", [], "train")
        traced = trace(config, encoder_spec(plan))
        most = max(memory.total for memory in traced.memory)
        fits = [str(size) for size, gib in CAPACITIES.items() if most <= usable(int(gib * GIB))]
        flops = work.train[phase.bucket]
        row = [family, phase.bucket, describe(config), f"{traced.graphs}, {traced.breaks}", f"{flops / 1e12:.2f}"]
        row += [f"{flops * phase.global_batch_size / 1e15:.2f}"]
        row += [f"{memory.total / GIB:.1f}" for memory in traced.memory]
        rows.append([*row, f"{fits[0]} GB" if fits else "none"])
    return rows


def rates(family: str) -> list[list[str]]:
    """Return a row for each phase of a family: images per second and GPU, and the share of the peak, on each number of
    GPUs of each kind."""
    rows = []
    for number in range(2):
        row = [family]
        for kind in KINDS:
            plan = read_plan(family, kind, number)
            phase = plan.phases[number]
            inputs = Inputs(plan, count_work(plan.networks, [phase.bucket]), Rates({}, []))
            row += [phase.bucket] if kind == KINDS[0] else []
            for num_gpus in GPUS:
                found = phase_row(inputs, phase, num_gpus, online=False)
                per_gpu = found.images_per_second / num_gpus
                share = per_gpu * inputs.work.train[phase.bucket] / (plan.gpu.peak_tflops * 1e12)
                limit = "" if found.bottleneck == "compute" else f", {found.bottleneck}"
                row.append(f"{per_gpu:.1f} ({share:.0%}{limit})")
        rows.append(row)
    return rows


def read_plan(family: str, kind: str, phase: int) -> Plan:
    """Read a family's plan for GPUs of a kind that reach the share of their peak measured for a phase."""
    share = MEASURED[family][phase] * 1e12 / PEAK
    words = ["--gpu.kind", kind, "--gpu.train_utilisation", f"{share:.4f}", "--measured", "[]"]
    return load_config(Plan, CONFIGS / family / "plan.yaml", words, "plan")


def describe(config: TrainConfig) -> str:
    """Describe how a training config uses memory and GPUs."""
    sharded = f"{config.sharding} over {config.active_group}" if config.sharding != "none" else "DDP"
    words = [f"{config.microbatch_size}", sharded, *checkpointing(config.gradient_checkpointing)]
    return ", ".join(words)


def main() -> None:
    """Print a Markdown section."""
    parser = argparse.ArgumentParser(prog="bench.families", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"default: all of {', '.join(FAMILIES)}")
    names = parser.parse_args().families or FAMILIES
    if unknown := sorted(set(names) - set(FAMILIES)):
        parser.error(f"There is no family {', '.join(unknown)}. Choose from {', '.join(FAMILIES)}.")
    head = ["family", "bucket", "microbatch", "graphs, breaks", "TFLOP per image", "PFLOP per step"]
    head += [*(f"GiB on {count} GPUs" for count in GPUS), "fits in"]
    rows = []
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        rows += needs(name)
    rated = ["family", "bucket", *(f"{count} × {kind}" for kind in KINDS for count in GPUS)]
    parts = [table(head, rows), table(rated, [row for name in names for row in rates(name)])]
    print(section("Model families", "bench.families", "\n\n".join(parts)))


if __name__ == "__main__":
    main()
