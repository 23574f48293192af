"""Short training runs of the small families."""

from typing import Any

from accelerate import Accelerator

from tests.families.small import Small, stir
from train.config import TrainConfig
from train.prepare import prepare
from train.setup import build_trainer
from train.start import acquire
from train.trainer import Trainer


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
