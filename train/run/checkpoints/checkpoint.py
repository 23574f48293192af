"""Checkpoints: a folder appears whole or not at all, and is used only if every byte of it is what was written.

checkpoints/step-00001000/unet/         config.json, diffusion_pytorch_model.safetensors   (loads in diffusers)
                         /ema/          the same, from the EMA's first step on; ema-0.050/, … the post-hoc averages
                         /optimizer.safetensors, and repa.safetensors, the projection head where there is one
                         /lines/        of a run at an address: metrics.jsonl and samples.jsonl, up to this step
                         /state.json    tag, step, fingerprint, SHA-256 of every file; sealed with its own

Of a run whose weights are split, each process writes a share: x-00001-of-00004.safetensors; x.safetensors.index.json
says which tensor is in which.

torch is imported inside the functions that need it: reading a config or a root must not cost its import.
"""

from __future__ import annotations

import json
import re
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
"""File of the run folder with the id of the run in its tracker."""
VERSION = 1
LINES = "lines"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
HEAD = "repa"
HEAD_NAME = f"{HEAD}.safetensors"
SNAPSHOTS = "posthoc"
"""Folder of a run, laid out as a run's own: checkpoints/step-…/ema-0.050/, of post-hoc averages alone."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, every file of which was found to be as written."""

    folder: Path
    content: dict[str, Any]
    """Of its state.json."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What its curve is a function of."""
        return dict(self.content["fingerprint"])

    @property
    def state(self) -> TrainState:
        """Where the run stood."""
        from train.run.state import TrainState

        return TrainState.from_json(self.content["state"])

    @property
    def tag(self) -> str:
        """The name of its phase, or of its run folder where the phase has none."""
        return str(self.content["tag"])

    def weights(self, which: str) -> Path:
        """The folder of its weights: `raw`, `ema`, or `auto`, the moving average where there is one; or one of others.

        Raises:
            RequestError: it holds no moving average, and that was asked for; or there are no weights in that folder.
        """
        from train.model.tensors import file_of

        if which not in ("auto", "raw", "ema"):
            if not file_of(Path(which) / WEIGHTS_NAME).is_file():
                raise RequestError(
                    f"weights {which} is neither auto, raw, ema nor a folder with {WEIGHTS_NAME}, as `python -m train "
                    f"ema RUN --std 0.05` writes one."
                )
            return Path(which)
        has_ema = (self.folder / "ema").is_dir()
        if which == "ema" and not has_ema:
            raise RequestError(f"{self.folder} holds no moving average. Ask for raw or auto weights.")
        return self.folder / ("ema" if has_ema and which != "raw" else "unet")


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders, oldest first; whole ones as far as names tell. What else lies there is left alone."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted((f for f in folders if re.fullmatch(r"step-\d{8,}", f.name) and f.is_dir()), key=step_of)


def drop_later(run_dir: Path, step: int, own: Path) -> None:
    """Remove what an interrupted run wrote of steps after `step`: it comes again, maybe at another learning rate.

    `own`: the launch's own folder.
    """
    for folder in list_checkpoints(run_dir):
        if step_of(folder) > step:
            remove(folder, own)


def checkpoint_identities(run_dir: Path) -> dict[str, str]:
    """Return name → identity of the run's checkpoints. It changes if another launch writes or replaces a checkpoint."""
    stats = [(folder.name, folder.stat()) for folder in list_checkpoints(run_dir)]
    return {name: f"{stat.st_ino}-{stat.st_mtime_ns}" for name, stat in stats}


def verify_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, once every file was found to be as written.

    Raises:
        DamagedFile: what is missing or differs.
        RequestError: another version of this program wrote it.
    """
    try:
        content = read_sealed_json(folder / STATE_NAME)
        check_version(content.get("version"), VERSION, str(folder))
        for name, sha256 in (content["files"] | content.get("lines", {})).items():
            if sha256_file(folder / name) != sha256:
                raise DamagedFile(f"{folder / name} does not have the SHA-256 that it was written with.")
    except FileNotFoundError as error:
        raise DamagedFile(f"{error.filename} is missing.") from None
    return Checkpoint(folder, content)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint; damaged ones are passed over, loudly. None where there is none.

    Raises:
        RequestError: there are checkpoints, and all are damaged: starting anew would be a quiet loss of the run.
    """
    folders = list_checkpoints(run_dir)
    for folder in reversed(folders):
        try:
            return verify_checkpoint(folder)
        except DamagedFile as error:
            print(f"checkpoint {folder.name} is damaged and passed over: {error}", flush=True)
    if folders:
        raise RequestError(
            f"Every checkpoint of {run_dir} is damaged ({', '.join(folder.name for folder in folders)}). Restore one "
            f"from a copy; or remove {run_dir}/checkpoints to train from the start."
        )
    return None


def restore(
    checkpoint: Checkpoint,
    unet: Any,
    optimizer: Optimizer,
    averages: dict[str, Ema],
    head: nn.Module | None = None,
) -> TrainState:
    """Load what a checkpoint holds besides weights: into the optimizer and the moving averages, in place."""
    from train.model.sharding import shard_like
    from train.model.tensors import load_tensors

    unflatten(trained(unet, head), optimizer, load_tensors(checkpoint.folder / OPTIMIZER_NAME))
    state = checkpoint.state
    for folder, ema in averages.items():
        # one from before `start_step` was begun under an earlier one: it is dropped, and begun anew there
        if ema.has_begun(state.step) and (checkpoint.folder / folder).is_dir():
            average = ema.begin(unet.named_parameters())
            saved = load_tensors(checkpoint.folder / folder / WEIGHTS_NAME)
            for name, value in average.items():
                value.copy_(shard_like(saved[name].to(value.device), value))
    return state


def load_weights(unet: Any, folder: Path) -> None:
    """Load `folder`'s weights into `unet`.

    Raises:
        RequestError: they are another architecture's.
    """
    from train.model.unet import load_matching

    load_matching(unet, folder / WEIGHTS_NAME, json.loads((folder / "config.json").read_text()))


def load_head(head: nn.Module, folder: Path) -> bool:
    """Load the projection head of the checkpoint in `folder`, where it has one of the same shapes; whether it has."""
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
    """All that the optimizer moves, by its name in the optimizer's file."""
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
    """What `flatten` gave, into the optimizer."""
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
