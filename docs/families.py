"""Generate the tables in docs/how-to/families.md and docs/how-to/towers.md from the configs: `make docs`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to"
ORDER = ("sd2", "sd15", "sdxl", "pixart-sigma", "sd3", "flux1", "sana", "prx")
GPUS = 64
HEAD = (
    "| FAMILY | network | parameters | towers | phases | bytes per sample | cost |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)

MEMORY_HEAD = (
    "| FAMILY | together | one by one | together, int8 | one by one, int8 |",
    "| --- | --- | --- | --- | --- |",
)


def row(name: str) -> str:
    """Return a family's row for the table in families.md."""
    from plan.config import Plan
    from plan.report import make_report
    from shards.base.config import load_config
    from shards.base.durable import read_json
    from train.config import TrainConfig
    from train.model.network import class_name

    folder = ROOT / "configs" / name
    plan = load_config(Plan, folder / "plan.yaml", ["--gpus", str(GPUS)], "plan")
    config = load_config(TrainConfig, folder / "phase1.yaml", [], "train")
    report = make_report(plan)
    cost = next(row.cost for row in report.rows if row.gpus == GPUS)
    phases = " + ".join(f"{phase.steps / 1000:,.0f}k × {phase.global_batch_size:,}" for phase in plan.phases)
    sizes = ", ".join(f"{bucket.sample_bytes:,.0f} ({bucket.bucket.split('x')[0]})" for bucket in report.buckets)
    towers = ", ".join(config.backbone.text_towers or ["text"])
    network = class_name(read_json(ROOT / config.network)).removesuffix("Model")
    # phase 1 keeps no EMA, so its checkpoints take 12 bytes per parameter
    parameters = report.checkpoint_gb[0] / 12
    return f"| {name} | {network} | {parameters:.3f} B | {towers} | {phases} | {sizes} | ${cost:,.0f} |"


def memory_row(name: str) -> str:
    """Return a family's row for the table in towers.md: GB of device memory that encoder weights take in each mode."""
    import torch

    from plan.arithmetic.work import build_image_tower, build_text_tower
    from plan.config import Plan
    from precompute.encode.networks import lowered
    from shards.base.config import load_config

    networks = load_config(Plan, ROOT / "configs" / name / "plan.yaml", [], "plan").networks
    with torch.device("meta"):
        vae = build_image_tower(networks.vae)[0]
        towers = [build_text_tower(name, text)[0] for name, text in networks.texts.items()]

    def num_bytes(model: torch.nn.Module, linear: int = 0) -> int:
        """Return the size of `model` in bytes, with `linear` bytes per weight in linear layers (0: the actual size)."""
        weights = {module.weight for module in model.modules() if isinstance(module, torch.nn.Linear) and linear}
        tensors = {*model.parameters(), *model.buffers()}
        return sum(tensor.numel() * linear if tensor in weights else tensor.nbytes for tensor in tensors)

    int8 = [num_bytes(tower, linear=1) for tower in towers]
    low = [num_bytes(lowered(model, "bfloat16")) for model in (vae, *towers)]
    numbers = (sum(low), max(low), low[0] + sum(int8), max(low[0], *int8))
    return f"| {name} | {' | '.join(f'{number / 1e9:.1f}' for number in numbers)} |"


def replace_table(page: str, head: tuple[str, str], rows: list[str]) -> None:
    """Replace the table of `page` that starts with the line `head[0]`."""
    path = HOW_TO / page
    before, after = path.read_text().split(f"{head[0]}\n")
    rest = after.splitlines(keepends=True)
    end = next((i for i, line in enumerate(rest) if not line.startswith("|")), len(rest))
    path.write_text("\n".join([f"{before}{head[0]}", head[1], *rows, "".join(rest[end:])]))


HEADS = {"families.md": HEAD, "towers.md": MEMORY_HEAD}
ROWS = {"families.md": row, "towers.md": memory_row}
"""Page → function that returns a family's row for the table on that page."""


def main() -> None:
    """Update the tables of both pages."""
    for page, make_row in ROWS.items():
        replace_table(page, HEADS[page], list(map(make_row, ORDER)))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
