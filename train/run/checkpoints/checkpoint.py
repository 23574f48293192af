"""Checkpoints: each is published atomically, and is used only if the SHA-256 of every file matches.

checkpoints/step-00001000/unet/         config.json, diffusion_pytorch_model.safetensors   (loads in diffusers)
                         /ema/          the same files, once the EMA has started; ema-0.050/, … for post-hoc averages
                         /optimizer.safetensors, and repa.safetensors with the projection head if a layer is aligned
                         /lines/        only for runs at a URL: metrics.jsonl and samples.jsonl up to this step
                         /state.json    tag, step, fingerprint, and the SHA-256 of every file and of its own content

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
"""File in the run folder that contains the run's ID in its tracker."""
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
        """The settings and data that determine the loss curve."""
        return dict(self.content["fingerprint"])

    @property
    def state(self) -> TrainState:
        """The state of the run after the checkpoint's step."""
        from train.run.state import TrainState

        return TrainState.from_json(self.content["state"])

    @property
    def tag(self) -> str:
        """Name of the phase, or the name of the run folder if the phase has none."""
        return str(self.content["tag"])

    def weights(self, which: str) -> Path:
        """Return the folder that contains the requested weights.

        Args:
            which: `raw`; `ema`, the moving average; `auto`, the moving average if there is one and otherwise the raw
                weights; or a folder with other weights, which is returned as it is.

        Raises:
            RequestError: the checkpoint has no moving average, or the folder has no weights.
        """
        from train.model.tensors import file_of

        if which not in ("auto", "raw", "ema"):
            if not file_of(Path(which) / WEIGHTS_NAME).is_file():
                raise RequestError(
                    f"`weights` is {which}, but it must be auto, raw, ema or a folder with {WEIGHTS_NAME}. `python -m "
                    f"train ema RUN --std 0.05` writes such a folder."
                )
            return Path(which)
        has_ema = (self.folder / "ema").is_dir()
        if which == "ema" and not has_ema:
            raise RequestError(f"The checkpoint {self.folder} has no moving average. Choose raw or auto weights.")
        return self.folder / ("ema" if has_ema and which != "raw" else "unet")


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint for `step`."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Parse the step from a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """List the checkpoint folders, oldest first. Folders with other names, such as interrupted copies, are ignored."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted((f for f in folders if re.fullmatch(r"step-\d{8,}", f.name) and f.is_dir()), key=step_of)


def drop_later(run_dir: Path, step: int, own: Path) -> None:
    """Remove the checkpoints after `step`, which the run will write again, perhaps with a different learning rate.

    Args:
        own: the launch's staging folder.
    """
    for folder in list_checkpoints(run_dir):
        if step_of(folder) > step:
            remove(folder, own)


def checkpoint_identities(run_dir: Path) -> dict[str, str]:
    """Return a dict from the name of each of the run's checkpoints to its identity.

    The identity changes if another launch replaces the checkpoint.
    """
    stats = [(folder.name, folder.stat()) for folder in list_checkpoints(run_dir)]
    return {name: f"{stat.st_ino}-{stat.st_mtime_ns}" for name, stat in stats}


def verify_checkpoint(folder: Path) -> Checkpoint:
    """Verify every file of the checkpoint in `folder`, and return the checkpoint.

    Raises:
        DamagedFile: a file is missing or does not match its SHA-256.
        RequestError: the checkpoint was written by an incompatible version of this program.
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
    """Return the newest intact checkpoint, and print a line about each damaged one that is skipped.

    Returns:
        The checkpoint, or None if the run has no checkpoints.

    Raises:
        RequestError: all checkpoints are damaged or have the names used at URLs. Starting from scratch
            would silently discard the run.
    """
    refuse_names_of_urls(run_dir)
    folders = {folder.name: folder for folder in list_checkpoints(run_dir)}
    remedy = f"remove {run_dir}/checkpoints to train from scratch"
    return newest_intact(list(folders), lambda name: verify_checkpoint(folders[name]), run_dir, remedy)


def refuse_names_of_urls(run_dir: Path) -> None:
    """Refuse a run folder whose only checkpoints have the names used at URLs.

    Raises:
        RequestError: the folder was copied from a URL.
    """
    if not list_checkpoints(run_dir) and (copies := sorted((run_dir / "checkpoints").glob("step-????????.????/"))):
        raise RequestError(
            f"{run_dir} was copied from a URL, where checkpoint names end with the number of a launch, as in "
            f"{copies[-1].name}. A run folder needs names without it, and training would otherwise start from scratch. "
            f"Rename each checkpoint (`mv {copies[-1]} {copies[-1].with_suffix('')}`). If a step has several, rename "
            f"the one with the highest number and remove the others."
        )


def newest_intact(
    names: list[str], obtain: Callable[[str], Checkpoint], run: Path | str, remedy: str
) -> Checkpoint | None:
    """Return the newest intact checkpoint among `names`. Damaged ones are handled as in `newest_checkpoint`.

    Args:
        names: names of the checkpoints, oldest first.
        obtain: verifies the named checkpoint and returns it.
        run: the run's folder or URL, for the error.
        remedy: what the user can do if all are damaged, other than restoring one from a backup.
    """
    for name in reversed(names):
        try:
            return obtain(name)
        except DamagedFile as error:
            print(f"checkpoint {name} is damaged and will be skipped: {error}", flush=True)
    if names:
        raise RequestError(
            f"Every checkpoint in {run} is damaged ({', '.join(names)}). Restore one from a backup, or {remedy}."
        )
    return None


def restore(
    checkpoint: Checkpoint,
    unet: Any,
    optimizer: Optimizer,
    averages: dict[str, Ema],
    head: nn.Module | None = None,
) -> TrainState:
    """Load the optimizer's state and the moving averages from a checkpoint in place, and return the run's state."""
    from train.model.sharding import shard_like
    from train.model.tensors import load_tensors

    unflatten(trained(unet, head), optimizer, load_tensors(checkpoint.folder / OPTIMIZER_NAME))
    state = checkpoint.state
    for folder, ema in averages.items():
        # an average saved before `start_step` was made with a different setting, so it is restarted
        if ema.has_begun(state.step) and (checkpoint.folder / folder).is_dir():
            average = ema.begin(unet.named_parameters())
            saved = load_tensors(checkpoint.folder / folder / WEIGHTS_NAME)
            for name, value in average.items():
                value.copy_(shard_like(saved[name].to(value.device), value))
    return state


def load_weights(unet: Any, folder: Path) -> None:
    """Load the weights in `folder` into `unet`.

    Raises:
        RequestError: the weights belong to a different architecture.
    """
    from train.model.network import load_matching

    load_matching(unet, folder / WEIGHTS_NAME, json.loads((folder / "config.json").read_text()))


def load_head(head: nn.Module, folder: Path) -> None:
    """Load the projection head of the checkpoint in `folder` if it exists and its shapes match."""
    from train.model.tensors import load_tensors

    if not (folder / HEAD_NAME).is_file():
        return
    saved = load_tensors(folder / HEAD_NAME)
    fits = {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in head.state_dict().items()
    }
    if fits:
        head.load_state_dict(saved)


def trained(unet: Any, head: nn.Module | None) -> dict[str, nn.Parameter]:
    """Return a dict from each trained parameter's name in the optimizer's file to the parameter."""
    beside = {} if head is None else {f"{HEAD}.{name}": value for name, value in head.named_parameters()}
    return dict(unet.named_parameters()) | beside


def flatten(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return a dict from `kind/name` to the optimizer's state tensor. AdamW's kinds: step, exp_avg and exp_avg_sq."""
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
        if tensor.shape == parameter.shape:  # convert it to the parameter's memory format
            tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
        optimizer.state[parameter][kind] = tensor
