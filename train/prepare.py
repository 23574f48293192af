"""What a run is asked for, opened and held against each other; nothing is written before all of it is found to fit."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from shards.base.device import Precision, resolve_precision
from shards.base.durable import locked
from shards.base.errors import RequestError, WorkError
from shards.base.store import Place
from shards.open import open_store
from train.config import TrainConfig
from train.data.spec import DataSpec, only_read
from train.data.streams import Found, find_data, open_data
from train.early import no_checkpoint
from train.export.pipeline import check_pipeline
from train.model.backbone import BackboneConfig
from train.model.fit import check_fit, check_precision, on_meta
from train.model.unet import build_unet, load_pretrained
from train.objective.alignment import Aligned, find_features, layer_shape, make_head
from train.objective.validation import FoundValidation, Validation, find_validation, open_validation
from train.run.fingerprint import check_resume, check_same_everywhere, make_fingerprint
from train.run.launches import Launch, Sign, now, take, wait_until_free
from train.run.preflight import World, check_launch, check_run_dir, check_tracker
from train.run.saving import away, local_copy
from train.run.saving.checkpoint import (
    Checkpoint,
    Seen,
    checkpoints_seen,
    load_head,
    load_weights,
    newest_checkpoint,
    step_folder,
)


@dataclass(frozen=True)
class Held:
    """Which launch held the run until now, and the checkpoints as they were then."""

    sign: Sign = field(default_factory=Sign)
    seen: list[Seen] = field(default_factory=list)
    number: int = 0
    """Of the launch at the run's address, where it lies at one; 0: there was none."""
    found: dict[str, str] = field(default_factory=dict)
    """Folders of the checkpoints at the address → SHA-256 of their state.json."""


@dataclass(frozen=True)
class Prepared:
    """All that a run is put together from, besides its config."""

    world: World
    spec: DataSpec
    unet: Any
    """The network to train, of a diffusers class, on the CPU, with the weights that the run begins with."""
    backbone: BackboneConfig
    """How it is called, with its text towers named."""
    checkpoint: Checkpoint | None
    """The run's own newest, from which it goes on."""
    start: str | None
    """Where the weights come from that a new run begins with, in words; None: random."""
    fingerprint: dict[str, Any]
    validation: Validation | None
    aligned: Aligned | None = None
    """`unet` with its projection head, where a layer is aligned."""
    held: Held = field(default_factory=Held)
    start_seed: int | None = None
    """The seed of the run that the weights come from; None: there is none."""

    @property
    def ahead(self) -> list[Path]:
        """The folder of `checkpoint`, where this machine has it and the run's address has not."""
        if not self.held.number or self.checkpoint is None or self.checkpoint.folder.name in self.held.found:
            return []
        return [self.checkpoint.folder]


def preflight(config: TrainConfig, accelerator: Accelerator | None) -> World:
    """What can be said of the request before anything is opened.

    Raises:
        RequestError: what does not fit, and the remedy.
    """
    world = World.launched()
    check_tracker(config.log.tracker)
    check_launch(accelerator, world)
    world.check(config.num_processes, config.global_batch_size)
    return world


def prepare(
    config: TrainConfig, accelerator: Accelerator | None = None, downloads: ExitStack | None = None
) -> Prepared:
    """Open the data, build the U-Net, and load what it begins with. Changes nothing in the run, here or at its address.

    The main process reads and hashes checkpoints, and tells the others what it found. Of a run at an address, one
    process of each other node downloads and hashes its own copy.

    Args:
        downloads: closing it removes the checkpoints that were downloaded. Required for a `run_dir` or an `init_from`
            at an address. It must stay open until `install` has moved the run's own checkpoint.

    Raises:
        RequestError: what does not fit, and the remedy.
    """
    assert downloads or not any(isinstance(place, str) for place in (config.run_dir, config.init_from))
    world, downloads = preflight(config, accelerator), downloads or ExitStack()
    held, checkpoint, start, found, held_out = on_main_process(accelerator, lambda: find_all(config, world, downloads))
    checkpoint = on_each_node(accelerator, config.run_dir, checkpoint, downloads)
    if config.init_from is not None:
        start = on_each_node(accelerator, config.init_from, start, downloads)
    spec = open_data(config.data, config.global_batch_size, found)
    backbone = config.backbone.resolved(spec.texts)
    check_fit(network := build_unet(config.network, None), spec, backbone)
    check_precision(network, config.precision)
    unet = build_unet(config.network, config.seed)
    aligned = make_aligned(config, spec, unet, backbone, sorted(found.streams[0].encoding.features))
    repa = None if aligned is None else config.repa.model_dump(mode="json") | {"tower": aligned.features.name}
    fingerprint = make_fingerprint(
        config.seed,
        config.global_batch_size,
        config.data,
        spec,
        config.objective,
        unet,
        config.backbone,
        repa,
        None if held_out is None else held_out.pin,
    )
    spec = spec.of_towers(backbone.text_towers, [] if aligned is None else [aligned.features.name])
    check_same_everywhere(accelerator, fingerprint, spec.look.problem if spec.look else None)
    if checkpoint is not None:
        check_resume(checkpoint.folder, checkpoint.fingerprint, fingerprint, config.data.index == "newest")
    words, start_seed = None, None
    if aligned is not None and (checkpoint or start) is not None:
        load_head(aligned.head, (checkpoint or start).folder)
    if checkpoint is not None:
        load_weights(unet, checkpoint.folder / "unet")
    elif start is not None:
        weights = start.weights(config.init_weights)
        load_weights(unet, weights)
        start_seed = start.fingerprint["seed"]
        shown = weights
        if isinstance(config.init_from, str) and weights.is_relative_to(start.folder):  # and not the private folder
            shown = weights.relative_to(start.folder.parents[1])
        words = f"{start.tag} after step {start.state.step} ({shown})"
    elif config.init_unet is not None:
        load_pretrained(unet, config.init_unet)
    validation = None
    if held_out is not None:
        training = only_read(found.streams[0].encoding, [f"texts.{name}" for name in spec.texts])
        validation = open_validation(
            config.validation,
            training,
            config.seed,
            held_out,
            accelerator.process_index if accelerator is not None else 0,
            accelerator.num_processes if accelerator is not None else 1,
        )
    if accelerator is not None:
        accelerator.wait_for_everyone()  # the process that downloaded the weights may remove them from here on
    return Prepared(world, spec, unet, backbone, checkpoint, words, fingerprint, validation, aligned, held, start_seed)


def make_aligned(
    config: TrainConfig, spec: DataSpec, unet: Any, backbone: BackboneConfig, stored: list[str]
) -> Aligned | None:
    """The network with the projection head that the config asks for; None: it asks for none.

    Args:
        stored: the feature towers that the root has.

    Raises:
        RequestError: the tower, or the layer, is not there, is not read, or is not of tokens.
    """
    if config.repa.layer is None:
        return None
    features = find_features(config.repa, spec, stored)
    calls = {hw: on_meta(unet, backbone, spec, hw) for hw in sorted({stream.latent_hw for stream in spec.streams})}
    shapes = {hw: layer_shape(network, config.repa, call) for hw, (network, call) in calls.items()}
    return Aligned(unet, make_head(config.repa, shapes, features.tower.width, config.seed), config.repa, features)


def on_each_node(
    accelerator: Accelerator | None, place: Place, checkpoint: Checkpoint | None, downloads: ExitStack
) -> Checkpoint | None:
    """The checkpoint that the main process found, in a folder of this process's node.

    Raises:
        WorkError: it was damaged, replaced or removed since the main process found it.
    """
    if accelerator is None or checkpoint is None or isinstance(place, Path):
        return checkpoint
    folder = checkpoint.folder
    if accelerator.is_local_main_process and not accelerator.is_main_process:
        work = local_copy.work_folder(place)
        folder = local_copy.obtain_same(open_store(place), checkpoint, work, downloads).folder
    folders = gather_object([folder])
    return replace(checkpoint, folder=folders[accelerator.process_index - accelerator.local_process_index])


def precision_of_run(config: TrainConfig, device: str) -> Precision:
    """Resolve the precision to train in: the one given, or for `auto` what the run began with, or what suits `device`.

    Prints one line about what `auto` became, or a warning if the CPU emulates the given precision.
    """
    asked = config.precision
    if asked == "auto" and (before := open_store(config.run_dir).read_many(["config.yaml"])):
        asked = yaml.safe_load(before["config.yaml"])["precision"]
    return resolve_precision(asked, device)


def find_all(
    config: TrainConfig, world: World, downloads: ExitStack
) -> tuple[Held, Checkpoint | None, Checkpoint | None, Found, FoundValidation | None]:
    """Look up everything that changes with time, once per launch: the launch that held the run, its newest checkpoint,
    or else the result of `find_start`, and the indexes of the training and validation data. The run's own checkpoint
    pins those indexes.

    Raises:
        RequestError: another launch holds the run, or what `find_start`, `find_data` and `find_validation` raise.
    """
    check_run_dir(config.work)
    sign, number, there = wait_until_free(config.work, config.takeover_after), 0, dict[str, str]()
    if isinstance(config.run_dir, str):
        number = away.wait_until_free(open_store(config.run_dir), config.takeover_after)
    seen = checkpoints_seen(config.work)
    if isinstance(config.run_dir, str):
        alone = world.size == world.local_size
        there, own = local_copy.find(open_store(config.run_dir), config.work, downloads, alone)
    else:
        own = newest_checkpoint(config.run_dir)
    held = Held(sign, seen, number, there)
    start = find_start(config, downloads) if own is None else None
    found = find_data(config.data, own.fingerprint["streams"] if own else ())
    check_pipeline(config, found.streams[0].encoding)  # now, and not when it was trained
    held_out = None
    if config.validation.root is not None:
        pinned = own is not None and config.data.index == "pinned"
        held_out = find_validation(config.validation, own.fingerprint.get("validation") if own and pinned else None)
    return held, own, start, found, held_out


def take_run(config: TrainConfig, prepared: Prepared) -> Path:
    """Take the run over, for this launch alone; returns the launch's own folder. From here on it is written to.

    Raises:
        RequestError: another launch holds the run.
        WorkError: one that slept went on while this one was being prepared.
    """
    held = prepared.held
    folder = take(config.work, config.takeover_after, held.sign)
    if checkpoints_seen(config.work) != held.seen:
        raise WorkError(
            f"The checkpoints of {config.run_dir} changed while this launch was starting: the one before it was not "
            f"dead. It can write no more. The same command again goes on from its newest checkpoint."
        )
    return folder


def take_everywhere(config: TrainConfig, prepared: Prepared) -> tuple[Path, away.Away | None]:
    """Take the run over, first at its address, if it has one: a launch that is refused there changes nothing here.

    Raises:
        RequestError: another launch holds the run.
        WorkError: one that slept went on while this one was being prepared.
    """
    if isinstance(config.run_dir, Path):
        return take_run(config, prepared), None
    held, patience = prepared.held, config.patience(away.PATIENCE, prepared.world.size)
    ahead = {folder.name: local_copy.sha256_of_state(folder) or "" for folder in prepared.ahead}
    there = away.take(config.run_dir, held.number, held.found, patience, ahead)
    try:
        return take_run(config, prepared), there
    except BaseException:
        there.sign(ended=now())
        raise


def install(config: TrainConfig, prepared: Prepared, accelerator: Accelerator, launch: Launch) -> Prepared:
    """Bring each machine's folder of a run at an address up to date, which only the launch that owns the run may do.

    Returns:
        `prepared`, with the checkpoint's new folder.
    """
    if isinstance(config.run_dir, Path):
        return prepared
    if accelerator.is_main_process:
        local_copy.bring_tracker_id(open_store(config.run_dir), config.work, launch.folder)
        local_copy.install(prepared.checkpoint, config.work, launch.folder)
    accelerator.wait_for_everyone()  # nodes may share their temporary folders
    if accelerator.is_local_main_process and not accelerator.is_main_process:
        private = config.work / ".install"
        with locked(config.work.with_name(".lock")):
            shutil.rmtree(private, ignore_errors=True)  # what a killed process left
            private.mkdir(parents=True)
            local_copy.install(prepared.checkpoint, config.work, private)
            shutil.rmtree(private)
    accelerator.wait_for_everyone()
    if prepared.checkpoint is None:
        return prepared
    folder = step_folder(config.work, prepared.checkpoint.state.step)
    return replace(prepared, checkpoint=replace(prepared.checkpoint, folder=folder))


def find_start(config: TrainConfig, downloads: ExitStack) -> Checkpoint | None:
    """The newest checkpoint of the run to start from; None: `init_from` names none.

    Raises:
        RequestError: there are no weights at `init_from`.
    """
    if config.init_from is None:
        return None
    if isinstance(config.init_from, Path):
        start = newest_checkpoint(config.init_from)
    else:
        work = local_copy.work_folder(config.init_from)
        _, start = local_copy.find(open_store(config.init_from), work, downloads)
    if start is None:
        raise no_checkpoint(config.init_from)
    start.weights(config.init_weights)
    return start


def on_main_process(accelerator: Accelerator | PartialState | None, decide: Callable[[], Any]) -> Any:
    """What `decide` returns, or the error for people that it raises, on every process; only the main one calls it."""
    answer: list[Any] = [None]
    if accelerator is None or accelerator.is_main_process:
        try:
            answer = [decide()]
        except (RequestError, WorkError) as error:
            answer = [error]
    if accelerator is not None:
        broadcast_object_list(answer)
    if isinstance(answer[0], RequestError | WorkError):
        raise answer[0]
    return answer[0]
