"""Short training runs of the small families."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from tests.families.small import Small, stir
from train.config import TrainConfig
from train.prepare import prepare
from train.setup import build_trainer
from train.start import acquire
from train.trainer import Trainer

GUIDANCE = 2.5
"""Value of the guidance input in training, unlike any pipeline's default."""


def small_run(small: Small, run_dir: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a run of six steps with a moving average."""
    return small.train_fields(small.folder / run_dir, seed=3, checkpoint={"every": 3}, **changes)


def started(config: TrainConfig) -> Trainer:
    """Build the trainer of a new run with stirred weights, or of a run to resume."""
    accelerator = Accelerator(cpu=True)
    prepared = prepare(config, accelerator)
    if prepared.checkpoint is None:
        stir(prepared.network)
    return build_trainer(config, prepared, accelerator, acquire(config, prepared))


def begun(made: Small, run_dir: str, **network: Any) -> tuple[TrainConfig, Trainer]:
    """Make a run with one checkpoint of its initial weights; `network` overrides fields of the backbone JSON."""
    fields = small_run(made, run_dir, data={"shuffle": False, "num_canonical_nodes": 1})
    path = made.folder / f"{run_dir}.json"
    path.write_text(json.dumps(json.loads(Path(fields["backbone"]["config"]).read_text()) | network))
    fields["backbone"]["config"] = str(path)
    for item in fields["backbone"].get("inputs", {}).values():
        if item["kind"] == "guidance":
            item["scale"] = GUIDANCE
    config = TrainConfig.model_validate(fields)
    trainer = started(config)
    trainer.save(is_last=True)
    return config, trainer
