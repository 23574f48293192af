"""Checkpoints: each is published atomically, and used only if the SHA-256 of every file matches.

checkpoints/step-00001000/unet/         config.json, diffusion_pytorch_model.safetensors   (loads in diffusers)
                         /ema/          the same, from the first step of the EMA on; ema-0.050/, … for post-hoc averages
                         /optimizer.safetensors, and repa.safetensors with the projection head if a layer is aligned
                         /lines/        for runs at a URL: metrics.jsonl and samples.jsonl, up to this step
                         /state.json    tag, step, fingerprint, SHA-256 of every file and of itself

If weights are sharded, each process writes a share, x-00001-of-00004.safetensors, and x.safetensors.index.json maps
tensors to shares.

torch is imported inside the functions that need it, because commands that only read a config or a root must start fast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.base.durable import DamagedFile, check_version, read_sealed_json, sha256_file
from shards.base.errors import RequestError
from train.run.lease.folder import remove

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.model.ema import Ema
    from train.run.state import TrainState

STATE_NAME = "state.json"
TRACKER_ID = "tracker.json"
"""File in the run folder with the run's id in its tracker."""
VERSION = 1
LINES = "lines"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
HEAD = "repa"
HEAD_NAME = f"{HEAD}.safetensors"
SNAPSHOTS = "posthoc"
"""Folder in the run folder for snapshots of post-hoc averages, with the same layout: checkpoints/step-…/ema-0.050/."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    content: dict[str, Any]
    """Content of state.json."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The values that determine the loss curve."""
        return dict(self.content["fingerprint"])

    @property
    def state(self) -> TrainState:
        """The state of the run after the step."""
        from train.run.state import TrainState

        return TrainState.from_json(self.content["state"])

    @property
    def tag(self) -> str:
        """Name of the phase, or of the run folder if the phase has no name."""
        return str(self.content["tag"])

    def weights(self, which: str) -> Path:
        """Return the folder of the `raw` or `ema` weights, or of `auto`: the moving average if there is one.

        Args:
            which: raw, ema, auto, or a folder with other weights.

        Raises:
            RequestError: the checkpoint has no moving average, or the folder has no weights.
        """
        from train.model.tensors import file_of

        if which not in ("auto", "raw", "ema"):
            if not file_of(Path(which) / WEIGHTS_NAME).is_file():
                raise RequestError(
                    f"weights {which} is neither auto, raw, ema nor a folder with {WEIGHTS_NAME}. `python -m train ema "
                    f"RUN --std 0.05` writes such a folder."
                )
            return Path(which)
        has_ema = (self.folder / "ema").is_dir()
        if which == "ema" and not has_ema:
            raise RequestError(f"{self.folder} has no moving average. Choose raw or auto weights.")
        return self.folder / ("ema" if has_ema and which != "raw" else "unet")


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Parse the step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """List the checkpoint folders, oldest first. Folders with other names, such as interrupted copies, are ignored."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted((f for f in folders if re.fullmatch(r"step-\d{8,}", f.name) and f.is_dir()), key=step_of)


def drop_later(run_dir: Path, step: int, own: Path) -> None:
    """Remove the checkpoints of later steps, which the run will write again, perhaps with a different learning rate.

    `own`: the launch's staging folder.
    """
    for folder in list_checkpoints(run_dir):
        if step_of(folder) > step:
            remove(folder, own)


def checkpoint_identities(run_dir: Path) -> dict[str, str]:
    """Return a dict from name to identity for the run's checkpoints.

    An identity changes if another launch replaces the checkpoint.
    """
    stats = [(folder.name, folder.stat()) for folder in list_checkpoints(run_dir)]
    return {name: f"{stat.st_ino}-{stat.st_mtime_ns}" for name, stat in stats}


def verify_checkpoint(folder: Path) -> Checkpoint:
    """Verify every file of the checkpoint in `folder`, and return it.

    Raises:
        DamagedFile: a file is missing or differs.
        RequestError: a different version of this program wrote it.
    """
    try:
        content = read_sealed_json(folder / STATE_NAME)
        check_version(content.get("version"), VERSION, str(folder))
        for name, sha256 in (content["files"] | content.get("lines", {})).items():
            if sha256_file(folder / name) != sha256:
                raise DamagedFile(f"{folder / name} does not match its SHA-256 in {STATE_NAME}.")
    except FileNotFoundError as error:
        raise DamagedFile(f"{error.filename} is missing.") from None
    return Checkpoint(folder, content)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint, and print a line about each damaged one. None: the run has none.

    Raises:
        RequestError: all checkpoints are damaged. Starting from scratch would lose the run without notice.
    """
    folders = {folder.name: folder for folder in list_checkpoints(run_dir)}
    remedy = f"remove {run_dir}/checkpoints to train from scratch"
    return newest_intact(list(folders), lambda name: verify_checkpoint(folders[name]), run_dir, remedy)


def newest_intact(
    names: list[str], obtain: Callable[[str], Checkpoint], run: Path | str, remedy: str
) -> Checkpoint | None:
    """Return the newest of the named checkpoints that is intact, as `newest_checkpoint` does.

    Args:
        names: oldest first.
        obtain: returns the named checkpoint, verified.
        remedy: alternative to restoring a checkpoint if all are damaged.
    """
    for name in reversed(names):
        try:
            return obtain(name)
        except DamagedFile as error:
            print(f"checkpoint {name} is damaged and skipped: {error}", flush=True)
    if names:
        raise RequestError(
            f"Every checkpoint of {run} is damaged ({', '.join(names)}). Restore one from a backup, or {remedy}."
        )
    return None


def restore(
    checkpoint: Checkpoint,
    unet: Any,
    optimizer: Optimizer,
    averages: dict[str, Ema],
    head: nn.Module | None = None,
) -> TrainState:
    """Load the optimizer's state and the moving averages in place, and return the state of the run."""
    from train.model.sharding import shard_like
    from train.model.tensors import load_tensors

    unflatten(trained(unet, head), optimizer, load_tensors(checkpoint.folder / OPTIMIZER_NAME))
    state = checkpoint.state
    for folder, ema in averages.items():
        # an average from before `start_step` belongs to an earlier setting, so it is restarted
        if ema.has_begun(state.step) and (checkpoint.folder / folder).is_dir():
            average = ema.begin(unet.named_parameters())
            saved = load_tensors(checkpoint.folder / folder / WEIGHTS_NAME)
            for name, value in average.items():
                value.copy_(shard_like(saved[name].to(value.device), value))
    return state


def load_weights(unet: Any, folder: Path) -> None:
    """Load the weights in `folder` into `unet`.

    Raises:
        RequestError: they belong to a different architecture.
    """
    from train.model.network import load_matching

    load_matching(unet, folder / WEIGHTS_NAME, json.loads((folder / "config.json").read_text()))


def load_head(head: nn.Module, folder: Path) -> bool:
    """Load the projection head of the checkpoint in `folder` if its shapes match, and return whether it was loaded."""
    from train.model.tensors import load_tensors

    if not (folder / HEAD_NAME).is_file():
        return False
    saved = load_tensors(folder / HEAD_NAME)
    fits = {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in head.state_dict().items()
    }
    if fits:
        head.load_state_dict(saved)
    return fits


def trained(unet: Any, head: nn.Module | None) -> dict[str, nn.Parameter]:
    """Return the trained parameters by their names in the optimizer's file."""
    beside = {} if head is None else {f"{HEAD}.{name}": value for name, value in head.named_parameters()}
    return dict(unet.named_parameters()) | beside


def flatten(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state tensors by `kind/name`; AdamW's kinds are step, exp_avg and exp_avg_sq."""
    tensors = {}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{kind}/{name}"] = value
    return tensors


def unflatten(parameters: dict[str, nn.Parameter], optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the tensors that `flatten` returned into the optimizer."""
    import torch

    from train.model.sharding import shard_like

    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        parameter = parameters[name]
        # torch's optimizers count steps on the CPU unless they are fused
        device = "cpu" if kind == "step" and not optimizer.defaults.get("fused") else parameter.device
        tensor = shard_like(value.to(device), parameter)
        if tensor.shape == parameter.shape:  # in the parameter's memory format
            tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
        optimizer.state[parameter][kind] = tensor
