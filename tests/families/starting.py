"""Short training runs of the small families."""

from typing import Any

from accelerate import Accelerator

from tests.families.small import Small, stir
from train.assemble import assemble
from train.config import TrainConfig
from train.loop import Run
from train.prepare import prepare, take_run
from train.run.launches import Launch


def small_run(small: Small, run_dir: str, **changes: Any) -> dict[str, Any]:
    """Six steps, with a moving average."""
    return small.train_fields(small.folder / run_dir, seed=3, checkpoint={"every": 3}, **changes)


def started(config: TrainConfig) -> Run:
    """A run of stirred weights, or one that goes on."""
    accelerator = Accelerator(cpu=True)
    prepared = prepare(config, accelerator)
    if prepared.checkpoint is None:
        stir(prepared.unet)
    return assemble(config, prepared, accelerator, Launch(take_run(config, prepared)))
