"""Writes the table of docs/how-to/families.md from the configs and the plan: `python docs/families.py` (a minute)."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "families.md"
ORDER = ("sd2", "sd15", "sdxl", "pixart-sigma", "sd3", "flux1", "sana", "prx")
GPUS = 64
HEAD = (
    "| FAMILY | network | parameters | towers | phases | bytes per sample | cost |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def row(name: str) -> str:
    """One family's line."""
    from plan.config import Plan
    from plan.report import make_report
    from shards.base.config import load_config
    from train.config import TrainConfig
    from train.model.unet import class_name, read_unet_config

    folder = ROOT / "configs" / name
    plan = load_config(Plan, folder / "plan.yaml", ["--gpus", str(GPUS)], "plan")
    config = load_config(TrainConfig, folder / "phase1.yaml", [], "train")
    report = make_report(plan)
    cost = next(row.cost for row in report.rows if row.gpus == GPUS)
    phases = " + ".join(f"{phase.steps / 1000:,.0f}k × {phase.global_batch_size:,}" for phase in plan.phases)
    sizes = ", ".join(f"{bucket.sample_bytes:,.0f} ({bucket.bucket.split('x')[0]})" for bucket in report.buckets)
    towers = ", ".join(config.backbone.text_towers or ["text"])
    network = class_name(read_unet_config(ROOT / config.network)).removesuffix("Model")
    # 12 bytes a parameter
    parameters = report.checkpoint_gb[0] / 12
    return f"| {name} | {network} | {parameters:.3f} B | {towers} | {phases} | {sizes} | ${cost:,.0f} |"


def main() -> None:
    """Put the table in place of the one that is there."""
    before, after = PAGE.read_text().split(f"{HEAD[0]}\n")
    rest = after.splitlines(keepends=True)
    end = next(i for i, line in enumerate(rest) if not line.startswith("|"))
    table = "\n".join([*HEAD, *map(row, ORDER)])
    PAGE.write_text(f"{before}{table}\n{''.join(rest[end:])}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
