"""Estimate what each model family needs on GPUs and how fast it trains: `python -m bench.families`. It needs no GPU.

Graphs and memory are from traces on fake tensors (train/model/memory.py), FLOPs from torch's counter, and rates from
the planner's model of a step (plan/arithmetic/scaling.py).
"""

import argparse
import sys
from dataclasses import dataclass, replace

from torch._dynamo.utils import counters

from bench.kit.common import section, table
from bench.kit.families import CONFIGS, FAMILIES
from plan.arithmetic.work import Work, count_work
from plan.config import Phase, Plan
from plan.measured import Rate, Rates
from plan.memory import CAPACITIES, checkpointing, encoder_spec, read_network
from plan.report import MIN_IMAGES_PER_GPU, Inputs, phase_row
from shards.base.config import load_config
from train.config import TrainConfig
from train.data.spec import DataSpec
from train.memory import step_settings
from train.model.memory import GIB, StepMemory, StepSettings, is_sharded, step_memory, usable

GPUS = (8, 128)
KINDS = {"A100": 80, "H100": 80, "H200": 141}
"""GPU kind → GB of memory."""
MEASURED_ON = "H200"


@dataclass(frozen=True)
class Measured:
    """The rate of a training step on one H200, without sharding (docs/evidence/gpu.md)."""

    tflops: float
    microbatch_size: int
    images: int
    """Number of images of the step."""


FLUX1, PIXART, PRX = Measured(306, 4, 8), Measured(306, 64, 128), Measured(365, 32, 64)
SANA, SD3, SDXL = Measured(261.8, 32, 64), Measured(357.3, 32, 64), Measured(186, 64, 128)
SD2 = (Measured(343.9, 128, 256), Measured(327.2, 32, 256))
MEASURED: dict[str, tuple[Measured, Measured]] = {
    "flux1": (FLUX1, FLUX1),
    "pixart-sigma": (PIXART, PIXART),
    "prx": (PRX, PRX),
    "sana": (SANA, SANA),
    "sd15": SD2,
    "sd2": SD2,
    "sd3": (SD3, SD3),
    "sdxl": (SDXL, SDXL),
}
"""Measurements of both phases. Where only one phase was measured, it stands for both, and Stable Diffusion 2 for 1.5.
SANA's and SDXL's steps were not compiled, and SDXL's TFLOP/s follow from its 145 images/s."""


@dataclass(frozen=True)
class Traced:
    """Results of tracing a training step. Lists have an item for each number of GPUs in `GPUS`."""

    settings: list[StepSettings]
    memory: list[StepMemory]
    graphs: int
    breaks: int


def trace(config: TrainConfig, data: DataSpec) -> Traced:
    """Trace a step of a training config."""
    network, backbone, shape = read_network(config, data)
    few, many = settings = [step_settings(config, num_gpus) for num_gpus in GPUS]
    counters.clear()
    memory = step_memory(network, backbone, data, shape, few)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    alike = replace(many, images=few.images)
    if not is_sharded(many):
        alike = replace(alike, num_processes=few.num_processes)  # does not matter
    if alike == few:
        other = replace(memory, batch=memory.batch * many.images // few.images)
    else:
        other = step_memory(network, backbone, data, shape, many)
    return Traced(settings, [memory, other], graphs, breaks)


def describe(config: TrainConfig) -> str:
    """Describe how a training config uses memory and GPUs."""
    sharded = f"{config.sharding} in groups of {config.active_group}" if config.sharding != "none" else "DDP"
    return ", ".join([sharded, *checkpointing(config.gradient_checkpointing)])


def needs(family: str, plan: Plan, work: Work) -> tuple[list[list[str]], list[Traced]]:
    """Return a row for each phase of a family with its graphs, FLOPs and memory, and the traces."""
    rows, traces = [], []
    for number, phase in enumerate(plan.phases, 1):
        config = load_config(TrainConfig, CONFIGS / family / f"phase{number}.yaml", [], "train")
        traced = trace(config, encoder_spec(plan))
        traces.append(traced)
        flops = work.train[phase.bucket]
        row = [family, phase.bucket, describe(config), f"{traced.graphs}, {traced.breaks}", f"{flops / 1e12:.2f}"]
        row += [f"{flops * phase.global_batch_size / 1e15:.2f}"]
        for settings, memory in zip(traced.settings, traced.memory, strict=True):
            row.append(f"{memory.total / GIB:.1f} ({settings.microbatch_size})")
        fits = (size for size in CAPACITIES if all(fits_in(memory, size) for memory in traced.memory))
        rows.append([*row, next((f"{size} GB" for size in fits), "none")])
    return rows, traces


def fits_in(memory: StepMemory, size: int) -> bool:
    """Return whether a step fits into a GPU of `size` GB."""
    return memory.total <= usable(int(CAPACITIES[size] * GIB))


def rates(family: str, work: Work, traces: list[Traced]) -> list[list[str]]:
    """Return a row for each phase of a family: images per second and GPU, and the share of the peak, on each number of
    GPUs of each kind."""
    peak = read_plan(family, MEASURED_ON).gpu.peak_tflops
    rows = []
    for number, (measured, traced) in enumerate(zip(MEASURED[family], traces, strict=True)):
        cells = []
        for kind, size in KINDS.items():
            plan = read_plan(family, kind)
            phase, share = plan.phases[number], measured.tflops / peak
            for num_gpus, memory in zip(GPUS, traced.memory, strict=True):
                fits = fits_in(memory, size)
                cells.append(predicted(plan, work, phase, measured, share, num_gpus) if fits else "does not fit")
        rows.append([family, phase.bucket, *cells])
    return rows


def predicted(plan: Plan, work: Work, phase: Phase, measured: Measured, share: float, num_gpus: int) -> str:
    """Predict the rate of a phase from that of one GPU, which reaches `share` of its peak."""
    peak, flops = plan.gpu.peak_tflops * 1e12, work.train[phase.bucket]
    rate = Rate(share * peak / flops, 1, "", measured.images, measured.microbatch_size)
    found = phase_row(Inputs(plan, work, Rates({("train", phase.bucket): [rate]}, [])), phase, num_gpus, online=False)
    per_gpu = found.images_per_second / num_gpus
    limit = "" if found.bottleneck == "compute" else f", {found.bottleneck}"
    bound = "≤ " if phase.global_batch_size < MIN_IMAGES_PER_GPU * num_gpus else ""
    return f"{bound}{per_gpu:.1f} ({per_gpu * flops / peak:.0%}{limit})"


def read_plan(family: str, kind: str) -> Plan:
    """Read a family's plan for GPUs of a kind."""
    return load_config(Plan, CONFIGS / family / "plan.yaml", ["--gpu.kind", kind, "--measured", "[]"], "plan")


NEEDS = """\
Graphs and graph breaks of the compiled network for one latent shape. TFLOP and PFLOP are of the forward and backward
pass, without recomputation. GiB at the peak on each GPU, with the microbatch size in parentheses."""
RATES = f"""\
Images per second on each GPU and, in parentheses, the share of the datasheet's peak. A GPU alone is assumed to reach
the share that was measured on an {MEASURED_ON}; the planner's model adds the traffic between GPUs. ≤: with fewer than
{MIN_IMAGES_PER_GPU} images per GPU, kernels are slower than assumed."""


def main() -> None:
    """Print a Markdown section."""
    parser = argparse.ArgumentParser(prog="bench.families", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"default: all of {', '.join(FAMILIES)}")
    names = parser.parse_args().families or FAMILIES
    if unknown := sorted(set(names) - set(FAMILIES)):
        parser.error(f"There is no family {', '.join(unknown)}. Choose from {', '.join(FAMILIES)}.")
    head = ["family", "bucket", "settings", "graphs, breaks", "TFLOP per image", "PFLOP per step"]
    head += [*(f"GiB on {count} GPUs" for count in GPUS), "fits in"]
    needed, rated = [], []
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        plan = read_plan(name, MEASURED_ON)
        work = count_work(plan.networks, [phase.bucket for phase in plan.phases])
        rows, traces = needs(name, plan, work)
        needed += rows
        rated += rates(name, work, traces)
    columns = ["family", "bucket", *(f"{count} × {kind}" for kind in KINDS for count in GPUS)]
    parts = [NEEDS, table(head, needed), RATES, table(columns, rated)]
    print(section("Model families", "bench.families", "\n\n".join(parts)))


if __name__ == "__main__":
    main()
