"""Rebuild a weight average of any width after training, from snapshots of a few averages.

The method is post-hoc EMA (Karras et al., 2024, appendix C).

examples:
  python -m train ema runs/phase2 --std 0.07 --step 400000
  python -m train ema runs/phase2 --std 0.15 --step 400000 --output runs/phase2/ema-0.15
  python -m train export runs/phase2 --weights runs/phase2/posthoc/std-0.070-step-00400000
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from safetensors import safe_open
from torch import Tensor

from shards.base.config import Config, load_for_run
from shards.base.durable import DamagedFile, atomic_folder, sha256_file, write_sealed_json
from shards.base.errors import RequestError, WorkError
from shards.base.store import LocalPath
from train.model.config import WidthInName, average_name
from train.model.ema import posthoc_coefficients
from train.model.tensors import write_tensors
from train.run.checkpoints.checkpoint import (
    SNAPSHOTS,
    WEIGHTS_NAME,
    Checkpoint,
    step_of,
    verify_checkpoint,
)
from train.run.checkpoints.local_copy import parse_folder

RECORD = "average.json"


class RebuildConfig(Config):
    """Rebuild a weight average of a given width from a run's snapshots, for `train export` or to load in diffusers."""

    std: WidthInName
    """Width of the average: its standard deviation in time, relative to the number of steps, with at most three
    decimals. The best values for EDM2 were between 0.04 and 0.15."""
    step: int | None = Field(None, ge=1)
    """Step of the last snapshot to use; null: the newest snapshot."""
    output: LocalPath | None = None
    """Folder to write; default: RUN/posthoc/std-STD-step-STEP."""


def rebuild_average(arguments: list[str]) -> Path:
    """Run `train ema`: parse the command line, write the average and return its folder."""
    run_dir, options = load_for_run(RebuildConfig, arguments, "train ema", __doc__)
    if isinstance(run_dir, str):
        raise RequestError(
            f"train ema reads a local run folder, but {run_dir} is a URL. Copy the run to a local folder first."
        )
    return write_average(run_dir, options)


def write_average(run_dir: Path, options: RebuildConfig) -> Path:
    """Write the average as a folder, which is never incomplete, and return the folder.

    The folder contains config.json, the weights, and a record of the snapshots with their coefficients.

    Raises:
        RequestError: there are no snapshots, or none at the given step.
        DamagedFile: a snapshot is damaged.
        WorkError: a snapshot has non-finite values.
    """
    snapshots = [load_snapshot(folder) for folder in select_snapshots(run_dir, options.step)]
    step = snapshots[-1].state.step
    averages = [(snapshot, name) for snapshot in snapshots for name in average_names(snapshot)]
    steps, stds = [snapshot.state.step for snapshot, _ in averages], [float(name[4:]) for _, name in averages]
    coefficients = posthoc_coefficients(steps, stds, step, options.std)
    folders = [snapshot.folder / name for snapshot, name in averages]
    target = options.output or run_dir / SNAPSHOTS / f"std-{average_name(options.std)[4:]}-step-{step:08d}"
    if target.exists() and not (target / RECORD).is_file():
        raise RequestError(f"{target} exists and was not written by this command. Give a different --output.")
    with atomic_folder(target) as private:
        shutil.copyfile(folders[-1] / "config.json", private / "config.json")
        write_tensors(private / WEIGHTS_NAME, combine(folders, coefficients))
        made_of = [
            {"step": step, "std": std, "coefficient": float(x)}
            for step, std, x in zip(steps, stds, coefficients, strict=True)
        ]
        hashes = {name: sha256_file(private / name) for name in ("config.json", WEIGHTS_NAME)}
        record = {"run": str(run_dir), "step": step, "std": options.std, "made_of": made_of, "files": hashes}
        write_sealed_json(private / RECORD, record)
    return target


def select_snapshots(run_dir: Path, step: int | None) -> list[Path]:
    """Return the snapshots up to `step`, oldest first.

    Raises:
        RequestError: there are no snapshots, or none at that step.
    """
    by_step: dict[int, Path] = {}
    for folder in sorted((run_dir / SNAPSHOTS / "checkpoints").glob("step-*")):
        if parsed := parse_folder(folder.name):  # a folder copied from a URL has its launch's number as a suffix
            by_step[step_of(Path(parsed[0]))] = folder  # if several launches wrote a step, use the last launch's
    if not by_step:
        raise RequestError(
            f"{run_dir}/{SNAPSHOTS} has no snapshots from which to rebuild an average. Set ema.snapshot_every and "
            f"ema.std before training."
        )
    if step is not None and step not in by_step:
        nearest = sorted(sorted(by_step, key=lambda other: abs(other - step))[:3])
        raise RequestError(
            f"{run_dir} has no snapshot at step {step}. Choose one of the nearest snapshots with --step: "
            f"{', '.join(map(str, nearest))}."
        )
    return [folder for number, folder in sorted(by_step.items()) if step is None or number <= step]


def load_snapshot(folder: Path) -> Checkpoint:
    """Return the verified snapshot in `folder`. Raises DamagedFile if it is damaged."""
    try:
        return verify_checkpoint(folder)
    except DamagedFile as error:
        raise DamagedFile(
            f"{error} Restore {folder} from a backup. Without one, remove it: the average is then rebuilt from the "
            f"other snapshots, with a slightly larger error, and ends at the last of them."
        ) from error


def average_names(snapshot: Checkpoint) -> list[str]:
    """Return the folder names of a snapshot's averages, such as `ema-0.050`."""
    return sorted(path.parent.name for path in map(Path, snapshot.content["files"]) if path.name == WEIGHTS_NAME)


def combine(folders: list[Path], coefficients: np.ndarray) -> dict[str, Tensor]:
    """Compute the weighted sum of each tensor over the folders, in float64, and return the sums by name, in float32.

    Tensors that are equal in all folders and integer buffers are copied unchanged.

    Raises:
        WorkError: a result is not finite.
    """
    files = [safe_open(folder / WEIGHTS_NAME, "pt") for folder in folders]
    combined = {}
    for name in files[0].keys():  # noqa: SIM118
        first = files[0].get_tensor(name)
        total, equal = torch.zeros_like(first, dtype=torch.float64), True
        for file, coefficient in zip(files, coefficients.tolist(), strict=True):
            tensor = file.get_tensor(name)
            total += coefficient * tensor.double()
            equal &= tensor.equal(first)
        if not bool(torch.isfinite(total).all()):
            raise WorkError(
                f"The tensor {name} has non-finite values in a snapshot below {folders[0].parents[1]}, because the "
                f"weights overflow float16. Train with ema.snapshot_dtype float32."
            )
        averaged = (first if equal else total).float()
        combined[name] = averaged if first.is_floating_point() else first  # integer buffers
    return combined
