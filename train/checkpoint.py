"""Checkpoints: a folder appears whole or not at all, and is used only if every byte of it is what was written.

checkpoints/step-00001000/unet/         config.json, diffusion_pytorch_model.safetensors   (loads in diffusers)
                         /ema/          the same, from the EMA's first step on
                         /optimizer.safetensors
                         /state.json    step, fingerprint, SHA-256 of every file; sealed with its own
"""

import shutil
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from shards.errors import RequestError
from shards.files import DamagedFile, fsync_folder, fsync_tree, read_sealed_json, sha256_file, write_sealed_json
from train.config import CheckpointConfig, EmaConfig
from train.ema import Ema

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


def save_checkpoint(
    run_dir: Path,
    state: TrainState,
    fingerprint: dict[str, Any],
    unet: UNet2DConditionModel,
    optimizer: Optimizer,
    ema: Ema | None,
    config: CheckpointConfig,
) -> Path:
    """Write a checkpoint durably, then drop the older ones that `config` does not keep."""
    target = step_folder(run_dir, state.step)
    for abandoned in target.parent.glob(".step-*"):  # half-written when its run was killed
        shutil.rmtree(abandoned)
    private = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    private.mkdir(parents=True)
    try:
        save_model(unet, unet.state_dict(), private / "unet")
        if ema is not None:
            save_model(unet, ema.average, private / "ema")
        save_file(_on_cpu(_flatten(unet, optimizer)), private / "optimizer.safetensors")
        files = sorted(path for path in private.rglob("*") if path.is_file())
        hashes = {str(path.relative_to(private)): sha256_file(path) for path in files}
        content = {"state": asdict(state), "fingerprint": fingerprint, "files": hashes}
        write_sealed_json(private / STATE_NAME, content)
        fsync_tree(private)
        if target.exists():  # a damaged one, or this step saved before
            shutil.rmtree(target)
        private.replace(target)
        fsync_folder(target.parent)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    # damaged ones of later steps, which this run passed over, do not count among the newest
    whole = [folder for folder in list_checkpoints(run_dir) if step_of(folder) <= state.step]
    for folder in whole[: -config.keep]:
        if config.keep_every is None or step_of(folder) % config.keep_every:
            shutil.rmtree(folder)
    return target


def save_model(unet: UNet2DConditionModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Weights in the layout that `UNet2DConditionModel.from_pretrained` loads."""
    unet.save_config(folder)
    save_file(_on_cpu(weights), folder / WEIGHTS_NAME, metadata={"format": "pt"})


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders, oldest first; whole ones as far as names tell."""
    return sorted((run_dir / "checkpoints").glob("step-*"))


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
    """Load a verified checkpoint into the U-Net and the optimizer, in place."""
    load_weights(unet, folder / "unet")
    _unflatten(unet, optimizer, load_file(folder / "optimizer.safetensors"))
    ema = None
    if config.start_step is not None and (folder / "ema").is_dir():
        ema = Ema(dict(unet.named_parameters()))
        for name, value in load_file(folder / "ema" / WEIGHTS_NAME).items():
            ema.average[name].copy_(value)
    return TrainState(**content["state"]), ema


def load_weights(unet: UNet2DConditionModel, folder: Path) -> None:
    """Load `folder`'s weights into `unet`.

    Raises:
        RequestError: they are another architecture's.
    """
    try:
        unet.load_state_dict(load_file(folder / WEIGHTS_NAME))
    except RuntimeError as error:
        raise RequestError(f"The weights in {folder} are not of this U-Net: {error}") from error


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # one tensor at a time, so that the device needs no room for a second copy; safetensors stores no strides
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


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
        tensor = value.to(device)
        if value.ndim == 4:  # keep the parameter's memory format
            tensor = tensor.contiguous(memory_format=_memory_format(parameter))
        optimizer.state[parameter][slot] = tensor


def _memory_format(parameter: Tensor) -> Any:
    return (
        torch.channels_last if parameter.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    )
