"""Checkpoints: a folder appears whole or not at all, and is used only if every byte of it is what was written.

checkpoints/step-00001000/unet/         config.json, diffusion_pytorch_model.safetensors   (loads in diffusers)
                         /ema/          the same, from the EMA's first step on; ema-0.050/, … the post-hoc averages
                         /optimizer.safetensors, and repa.safetensors, the projection head where there is one
                         /state.json    tag, step, fingerprint, SHA-256 of every file; sealed with its own
"""

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from shards.base.config import Config
from shards.base.durable import DamagedFile, fsync_tree, read_sealed_json, sha256_file, write_sealed_json
from shards.base.errors import RequestError, WorkError
from train.model.ema import Ema
from train.model.sharding import part_like
from train.model.tensors import copied, write_tensors
from train.model.unet import load_matching
from train.run.launches import publish, remove
from train.run.state import TrainState

STATE_NAME = "state.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
HEAD = "repa"
HEAD_NAME = f"{HEAD}.safetensors"
AGREED_SECONDS = 2.0
"""Within which the processes agree to leave."""
SNAPSHOTS = "posthoc"
"""Folder of a run, laid out as a run's own: checkpoints/step-…/ema-0.050/, of post-hoc averages alone."""


class CheckpointConfig(Config):
    """When the run is saved."""

    every: int = Field(1000, ge=1)
    """Steps; the last step is always saved."""
    keep: int = Field(3, ge=1)
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints of steps that this divides are kept for good."""
    asynchronous: bool = False
    """Copy what is to be saved to the CPU's memory, and write it while training goes on; one at a time."""
    grace: float = Field(120.0, gt=0)
    """Seconds from the signal to leave to the kill, as the scheduler has it: a run that saves more slowly is warned."""
    tag: str | None = None
    """The phase's name, in the checkpoint and in messages; null: the run folder's name."""


class Seen(NamedTuple):
    """A checkpoint's folder, as far as a look at its name tells."""

    name: str
    inode: int
    changed: int


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
        return TrainState.from_json(self.content["state"])

    @property
    def tag(self) -> str:
        """Its phase's name; its run folder's, where it has none."""
        return str(self.content.get("tag", self.folder.parents[1].name))

    def weights(self, which: str) -> Path:
        """The folder of its weights: `raw`, `ema`, or `auto`, the moving average where there is one; or one of others.

        Raises:
            RequestError: it holds no moving average, and that was asked for; or there are no weights in that folder.
        """
        if which not in ("auto", "raw", "ema"):
            if not (Path(which) / WEIGHTS_NAME).is_file():
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


def too_slow_to_leave(seconds: float | None, config: CheckpointConfig) -> str | None:
    """What to tell of a save of so many seconds, where it may not fit between the signal to leave and the kill."""
    if seconds is None:
        return None
    grace = min(config.grace, float(os.environ.get("PET_SHUTDOWN_TIMEOUT", config.grace)))
    # one may be under way, which the last one waits for
    needed = seconds * (2 if config.asynchronous else 1) + AGREED_SECONDS
    if needed <= grace:
        return None
    return (
        f"warning: to leave takes {needed:.0f} s and the rest of a step, as a checkpoint takes {seconds:.0f} s to "
        f"write, but {grace:g} s pass before the kill (the lesser of checkpoint.grace and the launcher's LEAVE). What "
        f"was done since the last checkpoint would be lost. Ask the scheduler for more time and raise both, or lower "
        f"checkpoint.every."
    )


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: the run's own tensors, or copies of them, beside which the run may go on."""

    state: TrainState
    files: dict[str, dict[str, Tensor]]
    """File below the checkpoint's folder → its tensors, by name."""

    def copied(self, keep: bool) -> "Snapshot":
        """In the CPU's memory. Every process calls this, as parts are gathered; only those that `keep` get copies."""
        return Snapshot(self.state, {file: copied(tensors, keep) for file, tensors in self.files.items()})


def take_snapshot(
    state: TrainState,
    unet: Any,
    optimizer: Optimizer,
    averages: dict[str, Ema],
    head: nn.Module | None = None,
) -> Snapshot:
    """The run as it stands; nothing is copied yet. `head`: the projection head, where a layer is aligned."""
    files = {f"unet/{WEIGHTS_NAME}": unet.state_dict(), OPTIMIZER_NAME: _flatten(_trained(unet, head), optimizer)}
    if head is not None:
        files[HEAD_NAME] = head.state_dict()
    return Snapshot(state.copy(), files | average_files(unet, averages))


def average_files(
    unet: Any, averages: dict[str, Ema], dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Tensor]]:
    """File → tensors, of those averages that are held, as `dtype`; and buffers, which are not averaged, as they are."""
    files = {}
    for folder, ema in averages.items():
        if ema.average is not None:
            average = {name: value.to(dtype) for name, value in ema.average.items()}
            files[f"{folder}/{WEIGHTS_NAME}"] = unet.state_dict() | average
    return files


class CheckpointWriter:
    """Writes snapshots into a run folder, one at a time; while training goes on, where `asynchronous`.

    Every process has one, as parts of weights are gathered; only the main one's writes.
    """

    def __init__(
        self,
        run_dir: Path,
        folder: Path,
        unet_json: str,
        fingerprint: dict[str, Any],
        config: CheckpointConfig,
        main: bool = True,
    ):
        """`folder`: the launch's own; `unet_json`: the diffusers config of the U-Net."""
        self.folder = folder
        self.run_dir, self.unet_json, self.config, self.main = run_dir, unet_json, config, main
        self.content = {"tag": config.tag or run_dir.name, "fingerprint": fingerprint}
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.seconds: float | None = None
        """That the last checkpoint took to write; of the main process, and None before the first."""

    def write(self, snapshot: Snapshot) -> None:
        """Write, tensor by tensor; or, where `asynchronous`, copy, and begin to write once the one before is done.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        self.finish()
        if self.config.asynchronous:
            snapshot = snapshot.copied(keep=self.main)
            if self.main:
                self.pending = self.thread.submit(self._write, snapshot)
        elif self.main:
            with self._explained():
                self._write(snapshot)
        else:
            for tensors in snapshot.files.values():
                write_tensors(None, tensors)

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
        if pending is not None:
            with self._explained():
                pending.result()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WorkError(
                f"A checkpoint of {self.run_dir} could not be written: {error}. The ones before it are whole. Make "
                f"room or mend the storage; the same command again resumes from the newest."
            ) from error

    def _write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint durably, then drop the older ones that are not to be kept."""
        step, began = snapshot.state.step, time.monotonic()
        target = step_folder(self.run_dir, step)
        target.parent.mkdir(parents=True, exist_ok=True)
        private = self.folder / f"{target.name}.{uuid.uuid4().hex[:8]}"
        private.mkdir()
        try:
            self._write_files(snapshot, private)
            fsync_tree(private)
            publish(private, target, self.folder)  # in place of a damaged one, or of this step saved before
        finally:
            shutil.rmtree(private, ignore_errors=True)
        self.seconds = time.monotonic() - began
        self._drop_old(step, snapshot.state.alarm.steps)

    def _write_files(self, snapshot: Snapshot, folder: Path) -> None:
        hashes = {}
        for name, tensors in snapshot.files.items():
            path = folder / name
            if path.parent != folder:  # in the layout that `Any.from_pretrained` loads
                path.parent.mkdir()
                config = path.with_name("config.json")
                config.write_text(self.unet_json)
                hashes[str(config.relative_to(folder))] = sha256_file(config)
            hashes[name] = write_tensors(path, tensors)
        content = self.content | {"state": snapshot.state.to_json(), "files": dict(sorted(hashes.items()))}
        write_sealed_json(folder / STATE_NAME, content)

    def _drop_old(self, step: int, alarms: Iterable[int]) -> None:
        # damaged ones of later steps, which this run passed over, do not count among the newest
        whole = [folder for folder in list_checkpoints(self.run_dir) if step_of(folder) <= step]
        kept = before_alarms([step_of(folder) for folder in whole], alarms)
        for folder in whole[: -self.config.keep]:
            if step_of(folder) not in kept and (
                self.config.keep_every is None or step_of(folder) % self.config.keep_every
            ):
                remove(folder, self.folder)


def before_alarms(steps: list[int], alarms: Iterable[int]) -> set[int]:
    """Of the `steps` of checkpoints, ascending, those before the loss alarms at steps `alarms`.

    The loss of step s is of the weights that step s − 1 made, which may be what is wrong: the checkpoint before it is
    of step s − 2 at most. Where there is none, one of s − 1 is better than nothing.
    """
    found = set()
    for alarm in alarms:
        earlier = [step for step in steps if step < alarm]
        sound = [step for step in earlier if step < alarm - 1]
        found |= set(sound[-1:] or earlier[-1:])
    return found


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


def checkpoints_seen(run_dir: Path) -> list[Seen]:
    """What tells whether another launch changed a run's checkpoints between two looks."""
    stats = [(folder.name, folder.stat()) for folder in list_checkpoints(run_dir)]
    return [Seen(name, stat.st_ino, stat.st_mtime_ns) for name, stat in stats]


def verify_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, once every file was found to be as written.

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
    _unflatten(_trained(unet, head), optimizer, load_file(checkpoint.folder / OPTIMIZER_NAME))
    state = checkpoint.state
    for folder, ema in averages.items():
        # one from before `start_step` was begun under an earlier one: it is dropped, and begun anew there
        if ema.has_begun(state.step) and (checkpoint.folder / folder).is_dir():
            average = ema.begin(unet.named_parameters())
            saved = load_file(checkpoint.folder / folder / WEIGHTS_NAME)
            for name, value in average.items():
                value.copy_(part_like(saved[name].to(value.device), value))
    return state


def load_weights(unet: Any, folder: Path) -> None:
    """Load `folder`'s weights into `unet`.

    Raises:
        RequestError: they are another architecture's.
    """
    load_matching(unet, folder / WEIGHTS_NAME, json.loads((folder / "config.json").read_text()))


def load_head(head: nn.Module, folder: Path) -> bool:
    """Load the projection head of the checkpoint in `folder`, where it has one of the same shapes; whether it has."""
    if not (folder / HEAD_NAME).is_file():
        return False
    saved = load_file(folder / HEAD_NAME)
    fits = {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in head.state_dict().items()
    }
    if fits:
        head.load_state_dict(saved)
    return fits


def _trained(unet: Any, head: nn.Module | None) -> dict[str, nn.Parameter]:
    """All that the optimizer moves, by its name in the optimizer's file."""
    beside = {} if head is None else {f"{HEAD}.{name}": value for name, value in head.named_parameters()}
    return dict(unet.named_parameters()) | beside


def _flatten(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in parameters.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{slot}/{name}"] = value
    return tensors


def _unflatten(parameters: dict[str, nn.Parameter], optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    for key, value in tensors.items():
        slot, _, name = key.partition("/")
        parameter = parameters[name]
        # AdamW counts steps on the CPU unless it is fused
        device = "cpu" if slot == "step" and not optimizer.defaults.get("fused") else parameter.device
        tensor = part_like(value.to(device), parameter)
        if tensor.shape == parameter.shape:  # in the parameter's memory format
            tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
        optimizer.state[parameter][slot] = tensor
