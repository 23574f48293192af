"""Checkpoints: a folder appears whole or not at all, and is used only if every byte of it is what was written.

checkpoints/step-00001000/unet/         config.json, diffusion_pytorch_model.safetensors   (loads in diffusers)
                         /ema/          the same, from the EMA's first step on
                         /optimizer.safetensors
                         /state.json    tag, step, fingerprint, SHA-256 of every file; sealed with its own
"""

import json
import re
import shutil
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from shards.base.errors import RequestError, WorkError
from shards.base.files import DamagedFile, fsync_folder, fsync_tree, read_sealed_json, sha256_file, write_sealed_json
from train.config import CheckpointConfig, EmaConfig
from train.model.ema import Ema
from train.model.sharding import part_like, whole
from train.model.unet import architecture_differences

STATE_NAME = "state.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"


@dataclass
class TrainState:
    """What a run carries from step to step besides weights and optimizer."""

    step: int = 0
    """Optimizer steps done."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step since the last line of metrics.jsonl."""
    quarters: list[float] = field(default_factory=lambda: [0.0] * 8)
    """Of the same steps: for each quarter of the timesteps the summed losses, then the samples."""
    skipped: int = 0
    """Steps whose gradient was not finite, which changed nothing."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """The loss scaler's state, in float16."""


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, in the CPU's memory and apart from the run, which may go on."""

    state: dict[str, Any]
    unet: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, Tensor]


def take_snapshot(
    state: TrainState, unet: UNet2DConditionModel, optimizer: Optimizer, ema: Ema | None, keep: bool
) -> Snapshot:
    """Copy the run as it stands. Every process calls this, as parts are gathered; only those that `keep` get a copy."""
    return Snapshot(
        state=asdict(state),
        unet=_copy(unet.state_dict(), keep),
        ema=None if ema is None else _copy(ema.average, keep),
        optimizer=_copy(_flatten(unet, optimizer), keep),
    )


class CheckpointWriter:
    """Writes snapshots into a run folder, one at a time; while training goes on, where `asynchronous`."""

    def __init__(self, run_dir: Path, unet_json: str, fingerprint: dict[str, Any], config: CheckpointConfig):
        """`unet_json`: the diffusers config of the U-Net."""
        self.run_dir, self.unet_json, self.config = run_dir, unet_json, config
        self.content = {"tag": config.tag or run_dir.name, "fingerprint": fingerprint}
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[Path] | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Begin to write, once the one before is done; and end, unless `asynchronous`."""
        self.finish()
        self.pending = self.thread.submit(self._write, snapshot)
        if not self.config.asynchronous:
            self.finish()

    def check(self) -> None:
        """Raise what went wrong with a checkpoint written in the background, once it is known; waits for nothing.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        if self.pending is not None and self.pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until nothing is being written.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except OSError as error:
            raise WorkError(
                f"A checkpoint of {self.run_dir} could not be written: {error}. The ones before it are whole. Make "
                f"room or mend the storage; the same command again resumes from the newest."
            ) from error

    def _write(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint durably, then drop the older ones that are not to be kept."""
        target = step_folder(self.run_dir, snapshot.state["step"])
        for abandoned in target.parent.glob(".step-*"):  # half-written when its run was killed
            shutil.rmtree(abandoned)
        private = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        private.mkdir(parents=True)
        try:
            self._write_files(snapshot, private)
            fsync_tree(private)
            if target.exists():  # a damaged one, or this step saved before
                shutil.rmtree(target)
            private.replace(target)
            fsync_folder(target.parent)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        self._drop_old(snapshot.state["step"])
        return target

    def _write_files(self, snapshot: Snapshot, folder: Path) -> None:
        for name, weights in (("unet", snapshot.unet), ("ema", snapshot.ema)):
            if weights is not None:  # in the layout that `UNet2DConditionModel.from_pretrained` loads
                (folder / name).mkdir()
                (folder / name / "config.json").write_text(self.unet_json)
                _save_tensors(weights, folder / name / WEIGHTS_NAME)
        _save_tensors(snapshot.optimizer, folder / "optimizer.safetensors")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        hashes = {str(path.relative_to(folder)): sha256_file(path) for path in files}
        write_sealed_json(folder / STATE_NAME, self.content | {"state": snapshot.state, "files": hashes})

    def _drop_old(self, step: int) -> None:
        # damaged ones of later steps, which this run passed over, do not count among the newest
        whole = [folder for folder in list_checkpoints(self.run_dir) if step_of(folder) <= step]
        for folder in whole[: -self.config.keep]:
            if self.config.keep_every is None or step_of(folder) % self.config.keep_every:
                shutil.rmtree(folder)


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders, oldest first; whole ones as far as names tell. What else lies there is left alone."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted((f for f in folders if re.fullmatch(r"step-\d{8,}", f.name) and f.is_dir()), key=step_of)


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The content of state.json, once every file was found to be as written.

    Raises:
        DamagedFile: what is missing or differs.
    """
    try:
        content = read_sealed_json(folder / STATE_NAME)
        for name, sha256 in content["files"].items():
            if sha256_file(folder / name) != sha256:
                raise DamagedFile(f"{folder / name} does not have the SHA-256 that it was written with.")
    except FileNotFoundError as error:
        raise DamagedFile(f"{error.filename} is missing.") from None
    return content


def newest_checkpoint(run_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint and its state; damaged ones are passed over, loudly. None where there is none.

    Raises:
        RequestError: there are checkpoints, and all are damaged: starting anew would be a quiet loss of the run.
    """
    folders = list_checkpoints(run_dir)
    for folder in reversed(folders):
        try:
            return folder, verify_checkpoint(folder)
        except DamagedFile as error:
            print(f"checkpoint {folder.name} is damaged and passed over: {error}", flush=True)
    if folders:
        raise RequestError(
            f"Every checkpoint of {run_dir} is damaged ({', '.join(folder.name for folder in folders)}). Restore one "
            f"from a copy; or remove {run_dir}/checkpoints to train from the start."
        )
    return None


def restore(
    folder: Path, content: dict[str, Any], unet: UNet2DConditionModel, optimizer: Optimizer, config: EmaConfig
) -> tuple[TrainState, Ema | None]:
    """Load what a verified checkpoint holds besides weights: into the optimizer, in place, and the moving average."""
    _unflatten(unet, optimizer, load_file(folder / "optimizer.safetensors"))
    ema = None
    # one in a checkpoint from before `start_step` was begun under an earlier one: it is dropped, and begun anew there
    begun = config.start_step is not None and content["state"]["step"] >= config.start_step
    if begun and (folder / "ema").is_dir():
        ema = Ema(dict(unet.named_parameters()))
        for name, value in load_file(folder / "ema" / WEIGHTS_NAME).items():
            average = ema.average[name]
            average.copy_(part_like(value.to(average.device), average))
    return TrainState(**content["state"]), ema


def load_weights(unet: UNet2DConditionModel, folder: Path) -> None:
    """Load `folder`'s weights into `unet`.

    Raises:
        RequestError: they are another architecture's.
    """
    if different := architecture_differences(json.loads((folder / "config.json").read_text()), unet):
        raise RequestError(
            f"{folder} is another architecture than `unet`: {different} (there ≠ here). Set `unet` to a config like "
            f"{folder}/config.json."
        )
    try:
        unet.load_state_dict(load_file(folder / WEIGHTS_NAME))
    except RuntimeError as error:
        raise RequestError(f"The weights in {folder} are not of this U-Net: {error}") from error


def _copy(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    # one tensor at a time, so that the device needs no room for a second copy; safetensors stores no strides
    copies = {}
    for name, value in tensors.items():
        gathered = whole(value.detach())
        if keep:
            copies[name] = gathered.to("cpu", copy=True).contiguous()
    return copies


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """safetensors' `save_file`, whose own error neither is an OSError nor names the file."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def _flatten(unet: UNet2DConditionModel, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in unet.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{slot}/{name}"] = value
    return tensors


def _unflatten(unet: UNet2DConditionModel, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(unet.named_parameters())
    for key, value in tensors.items():
        slot, _, name = key.partition("/")
        parameter = parameters[name]
        # AdamW counts steps on the CPU unless it is fused
        device = "cpu" if slot == "step" and not optimizer.defaults.get("fused") else parameter.device
        tensor = part_like(value.to(device), parameter)
        if value.ndim == 4:  # keep the parameter's memory format
            tensor = tensor.contiguous(memory_format=_memory_format(parameter))
        optimizer.state[parameter][slot] = tensor


def _memory_format(parameter: Tensor) -> Any:
    return (
        torch.channels_last if parameter.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    )
