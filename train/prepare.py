"""What a run is asked for, opened and held against each other; nothing is written before all of it is found to fit."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

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
from train.objective.alignment import Aligned, find_features, hear, make_head
from train.objective.validation import FoundValidation, Validation, find_validation, open_validation
from train.run.fingerprint import check_resume, check_same_everywhere, make_fingerprint
from train.run.launches import Sign, take, wait_until_free
from train.run.preflight import World, check_launch, check_run_dir, check_tracker
from train.run.saving import away, local_copy
from train.run.saving.checkpoint import (
    Checkpoint,
    Seen,
    checkpoints_seen,
    load_head,
    load_weights,
    newest_checkpoint,
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


def prepare(config: TrainConfig, accelerator: Accelerator | None = None) -> Prepared:
    """Open the data, build the U-Net, and load what it begins with. Writes nothing.

    Checkpoints are read and hashed by the main process alone; the others are told what it found.

    Raises:
        RequestError: what does not fit, and the remedy.
    """
    world = preflight(config, accelerator)
    held, checkpoint, start, found, held_out = on_main_process(accelerator, lambda: find_all(config, world))
    checkpoint = on_each_node(accelerator, config.run_dir, config.work, checkpoint)
    if config.init_from is not None:
        start = on_each_node(accelerator, config.init_from, local_copy.work_folder(config.init_from, "read"), start)
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
        words = f"{start.tag} after step {start.state.step} ({weights})"
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
    shapes = {hw: hear(network, config.repa, call) for hw, (network, call) in calls.items()}
    return Aligned(unet, make_head(config.repa, shapes, features.tower.width, config.seed), config.repa, features)


def on_each_node(
    accelerator: Accelerator | None, place: Place, work: Path, checkpoint: Checkpoint | None
) -> Checkpoint | None:
    """The checkpoint that the main process found; where it lies at an address, each other node copies it to `work`."""
    if checkpoint is None or isinstance(place, Path):
        return checkpoint
    if accelerator is not None:
        if accelerator.is_local_main_process and not accelerator.is_main_process:
            with locked(work.with_name(".lock")):
                local_copy.fetch(open_store(place), work, checkpoint.folder.name)
        accelerator.wait_for_everyone()
    return replace(checkpoint, folder=work / "checkpoints" / checkpoint.folder.name)


def precision_of_run(config: TrainConfig, device: str) -> Precision:
    """Resolve the precision to train in: the one given, or for `auto` what the run began with, or what suits `device`.

    Prints one line about what `auto` became, or a warning if the CPU emulates the given precision.
    """
    asked = config.precision
    if asked == "auto" and (before := open_store(config.run_dir).read_many(["config.yaml"])):
        asked = yaml.safe_load(before["config.yaml"])["precision"]
    return resolve_precision(asked, device)


def find_all(
    config: TrainConfig, world: World
) -> tuple[Held, Checkpoint | None, Checkpoint | None, Found, FoundValidation | None]:
    """Look up everything that changes with time, once per launch: the launch that held the run, the results of
    `find_start`, and the indexes of the training and validation data. The run's own checkpoint pins those indexes.

    Raises:
        RequestError: another launch holds the run, or what `find_start`, `find_data` and `find_validation` raise.
    """
    check_run_dir(config.work)
    sign, number, there = wait_until_free(config.work, config.takeover_after), 0, dict[str, str]()
    if isinstance(config.run_dir, str):
        store = open_store(config.run_dir)
        number = away.wait_until_free(store, config.takeover_after)
        there = local_copy.bring(store, config.work, world.size == world.local_size)
    held = Held(sign, checkpoints_seen(config.work), number, there)
    own, start = find_start(config)
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


def take_address(config: TrainConfig, prepared: Prepared) -> away.Away | None:
    """The same at the run's address, where it lies at one.

    Raises:
        RequestError: another launch holds the run.
        WorkError: one that slept went on while this one was being prepared.
    """
    if isinstance(config.run_dir, Path):
        return None
    held, patience = prepared.held, config.patience(away.PATIENCE, prepared.world.size)
    ahead = {folder.name: local_copy.sha256_of_state(folder) or "" for folder in prepared.ahead}
    return away.take(config.run_dir, held.number, held.found, patience, ahead)


def find_start(config: TrainConfig) -> tuple[Checkpoint | None, Checkpoint | None]:
    """The run's own newest checkpoint, or else that of the run to start from; both None: there is neither.

    Raises:
        RequestError: there are no weights at `init_from`.
    """
    own = newest_checkpoint(config.work)
    if own is not None:
        return own, None
    if config.init_from is None:
        return None, None
    start = finished_run(config.init_from)
    start.weights(config.init_weights)
    return None, start


def finished_run(run_dir: Place) -> Checkpoint:
    """An earlier run's newest checkpoint.

    Raises:
        RequestError: it has none.
    """
    work = local_copy.work_folder(run_dir, "read")
    if isinstance(run_dir, str):
        with locked(work.with_name(".lock")):
            local_copy.bring(open_store(run_dir), work)
    found = newest_checkpoint(work)
    if found is None:
        raise no_checkpoint(run_dir)
    return found


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
