"""Everything that is found, opened and checked before a launch acquires the run.

Nothing here changes the run, neither its folder nor its URL.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from shards.base.device import Precision, resolve_precision
from shards.base.errors import RequestError, WorkError
from shards.base.store import Place
from shards.open import open_store
from train.config import TrainConfig
from train.data.spec import DataSpec, keep_towers
from train.data.streams import FoundData, find_data, open_data
from train.early import no_checkpoint
from train.export.pipeline import check_pipeline
from train.model.backbone import BackboneConfig
from train.model.fit import check_fit, check_precision, on_meta
from train.model.optimizer import freeze_except
from train.model.unet import build_unet, load_pretrained
from train.objective.alignment import Aligned, find_features, layer_shape, make_head
from train.objective.validation import FoundValidation, Validation, find_validation, open_validation
from train.run.checkpoints import local_copy, remote
from train.run.checkpoints.checkpoint import (
    Checkpoint,
    Seen,
    checkpoints_seen,
    load_head,
    load_weights,
    newest_checkpoint,
)
from train.run.fingerprint import check_resume, check_same_everywhere, make_fingerprint
from train.run.launches import Sign, wait_until_free
from train.run.preflight import World, check_launch, check_run_dir, check_tracker


@dataclass(frozen=True)
class Held:
    """The launch that held the run when this one was preparing, and the checkpoints that existed then."""

    sign: Sign = field(default_factory=Sign)
    seen: list[Seen] = field(default_factory=list)
    number: int = 0
    """Number of the last launch at the run's URL; 0: there was none, or the run is a local folder."""
    found: dict[str, str] = field(default_factory=dict)
    """Folders of the checkpoints at the URL → SHA-256 of their state.json."""


@dataclass(frozen=True)
class Prepared:
    """Everything from which a run is built, besides its config."""

    world: World
    spec: DataSpec
    network: Any
    """The diffusers network to train, on the CPU, with its first weights or those of the checkpoint."""
    backbone: BackboneConfig
    """How to call the network, with its text towers resolved."""
    checkpoint: Checkpoint | None
    """The run's own newest checkpoint; None: the run is new."""
    start: str | None
    """Description of the weights with which a new run starts; None: random weights."""
    fingerprint: dict[str, Any]
    validation: Validation | None
    aligned: Aligned | None = None
    """`network` with its projection head, if a layer is aligned (REPA)."""
    held: Held = field(default_factory=Held)
    start_seed: int | None = None
    """Seed of the run that the weights come from, if there is one."""

    @property
    def ahead(self) -> list[Path]:
        """Folder of `checkpoint`, if it exists on this machine but was never uploaded to the run's URL."""
        if not self.held.number or self.checkpoint is None or self.checkpoint.folder.name in self.held.found:
            return []
        return [self.checkpoint.folder]


def prepare(
    config: TrainConfig, accelerator: Accelerator | None = None, downloads: ExitStack | None = None
) -> Prepared:
    """Open the data, build the network, and load the weights with which training continues or starts.

    The main process finds and hashes checkpoints and broadcasts the result. If the run or its start is at an
    object-store URL, one process of each other node downloads and hashes its own copy.

    Args:
        accelerator: None: this is the only process.
        downloads: closing it deletes the downloaded checkpoints. Required if `run_dir` or `init_from` is a URL. It
            must stay open until `install` has moved the run's own checkpoint.

    Raises:
        RequestError: something is missing or does not fit.
    """
    assert downloads or not any(isinstance(place, str) for place in (config.run_dir, config.init_from))
    downloads = downloads or ExitStack()
    world = World.launched()
    check_tracker(config.log.tracker)
    check_launch(accelerator, world)
    world.check(config.num_processes, config.global_batch_size)

    # the run, the start, and the indexes: whatever may change with time is looked up once, by the main process
    held, checkpoint, start, found, held_out = on_main_process(accelerator, lambda: find_all(config, world, downloads))
    checkpoint = on_each_node(accelerator, config.run_dir, checkpoint, downloads)
    if config.init_from is not None:
        start = on_each_node(accelerator, config.init_from, start, downloads)

    # data and network
    spec = open_data(config.data, config.global_batch_size, found)
    encoding = found.streams[0].encoding
    backbone = config.backbone.resolved(spec.texts)
    without_weights = build_unet(config.network, None)
    check_fit(without_weights, spec, backbone)
    check_precision(without_weights, config.precision)
    network = build_unet(config.network, config.seed)
    freeze_except(network, config.train_only)
    aligned = make_aligned(config, spec, network, backbone, sorted(encoding.features))

    # the run's fingerprint, which must be the same in all processes and in the checkpoint
    fingerprint = make_fingerprint(
        config.seed,
        config.global_batch_size,
        config.data,
        spec,
        config.objective,
        network,
        config.backbone,
        None if aligned is None else config.repa.model_dump(mode="json") | {"tower": aligned.features.name},
        None if held_out is None else held_out.pin,
        config.optimizer.kind,
        config.train_only,
    )
    spec = spec.keep_towers(backbone.text_towers, [] if aligned is None else [aligned.features.name])
    check_same_everywhere(accelerator, fingerprint, spec.size_check.problem if spec.size_check else None)
    if checkpoint is not None:
        check_resume(checkpoint.folder, checkpoint.fingerprint, fingerprint, config.data.index == "newest")

    # weights
    words = load_first_weights(config, network, aligned, checkpoint, start)
    validation = None
    if held_out is not None:
        training = keep_towers(encoding, [f"texts.{name}" for name in spec.texts])
        rank, ranks = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
        validation = open_validation(config.validation, training, config.seed, held_out, rank, ranks)
    if accelerator is not None:
        accelerator.wait_for_everyone()  # from here on, the process that downloaded the weights may delete them
    return Prepared(
        world=world,
        spec=spec,
        network=network,
        backbone=backbone,
        checkpoint=checkpoint,
        start=words,
        fingerprint=fingerprint,
        validation=validation,
        aligned=aligned,
        held=held,
        start_seed=None if checkpoint is not None or start is None else start.fingerprint["seed"],
    )


def load_first_weights(
    config: TrainConfig, network: Any, aligned: Aligned | None, checkpoint: Checkpoint | None, start: Checkpoint | None
) -> str | None:
    """Load the weights of the checkpoint to resume, of the run to start from, or of a pretrained network.

    Returns:
        A description of the run to start from; None: the weights are not from another run.

    Raises:
        RequestError: the weights belong to a different architecture.
    """
    source = checkpoint or start
    if aligned is not None and source is not None:
        load_head(aligned.head, source.folder)
    if checkpoint is not None:
        load_weights(network, checkpoint.folder / "unet")
    elif start is not None:
        weights = start.weights(config.init_weights)
        load_weights(network, weights)
        shown = weights
        if isinstance(config.init_from, str) and weights.is_relative_to(start.folder):
            shown = weights.relative_to(start.folder.parents[1])  # hides the folder of the download
        return f"{start.tag} after step {start.state.step} ({shown})"
    elif config.init_unet is not None:
        load_pretrained(network, config.init_unet)
    return None


def make_aligned(
    config: TrainConfig, spec: DataSpec, network: Any, backbone: BackboneConfig, stored: list[str]
) -> Aligned | None:
    """Add the projection head that the config asks for to the network; None: no layer is aligned.

    Args:
        stored: names of the feature towers that the root has.

    Raises:
        RequestError: the tower or the layer does not exist, is not read, or does not consist of tokens.
    """
    if config.repa.layer is None:
        return None
    features = find_features(config.repa, spec, stored)
    shapes = {}
    for latent_hw in sorted({stream.latent_hw for stream in spec.streams}):
        copy, call = on_meta(network, backbone, spec, latent_hw)
        shapes[latent_hw] = layer_shape(copy, config.repa, call)
    head = make_head(config.repa, shapes, features.tower.width, config.seed)
    return Aligned(network, head, config.repa, features)


def on_each_node(
    accelerator: Accelerator | None, place: Place, checkpoint: Checkpoint | None, downloads: ExitStack
) -> Checkpoint | None:
    """Return the checkpoint that the main process found, in a folder of this process's node.

    Raises:
        WorkError: the checkpoint was damaged, replaced or deleted since the main process found it.
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
    """Return the precision to train in. `auto` becomes the run's earlier precision, or else the best for `device`.

    Prints one line about the choice of `auto`, or a warning if the CPU emulates the given precision.
    """
    asked = config.precision
    if asked == "auto" and (before := open_store(config.run_dir).read_many(["config.yaml"])):
        asked = yaml.safe_load(before["config.yaml"])["precision"]
    return resolve_precision(asked, device)


def find_all(
    config: TrainConfig, world: World, downloads: ExitStack
) -> tuple[Held, Checkpoint | None, Checkpoint | None, FoundData, FoundValidation | None]:
    """Look up everything that may change with time, once per launch.

    Returns:
        The launch that held the run; its newest checkpoint, or else the checkpoint of the run to start from; and the
        indexes of the training and the validation data, which the run's own checkpoint pins.

    Raises:
        RequestError: another launch holds the run, or what `find_start`, `find_data` and `find_validation` raise.
    """
    check_run_dir(config.work)
    sign, number, there = wait_until_free(config.work, config.takeover_after), 0, dict[str, str]()
    if isinstance(config.run_dir, str):
        number = remote.wait_until_free(open_store(config.run_dir), config.takeover_after)
    seen = checkpoints_seen(config.work)
    if isinstance(config.run_dir, str):
        alone = world.size == world.local_size
        there, own = local_copy.find(open_store(config.run_dir), config.work, downloads, alone)
    else:
        own = newest_checkpoint(config.run_dir)
    held = Held(sign, seen, number, there)
    start = find_start(config, downloads) if own is None else None
    found = find_data(config.data, own.fingerprint["streams"] if own else ())
    check_pipeline(config, found.streams[0].encoding)  # refuse now what could not be exported after training
    held_out = None
    if config.validation.root is not None:
        pinned = own is not None and config.data.index == "pinned"
        held_out = find_validation(config.validation, own.fingerprint.get("validation") if own and pinned else None)
    return held, own, start, found, held_out


def find_start(config: TrainConfig, downloads: ExitStack) -> Checkpoint | None:
    """Return the newest checkpoint of the run to start from; None if `init_from` is not set.

    Raises:
        RequestError: `init_from` has no checkpoint, or not the weights that `init_weights` asks for.
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
    """Call `decide` on the main process only, and return its result, or raise its RequestError or WorkError, on all."""
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
