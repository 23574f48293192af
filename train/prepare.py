"""Preparation of a launch before it acquires the run: finding checkpoints and data, building and checking the network.

Nothing in this module changes the run, neither in its folder nor at its URL.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from accelerate import Accelerator, PartialState, init_empty_weights
from accelerate.utils import broadcast_object_list, gather_object
from diffusers import UNet2DConditionModel
from torch import Tensor

from shards.base.device import Precision, is_accelerator, memory_of, resolve_precision
from shards.base.errors import RequestError, WorkError
from shards.base.store import Place
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from train.config import TrainConfig
from train.data.spec import DataSpec, keep_towers
from train.data.streams import FoundData, find_data, open_data
from train.early import no_checkpoint
from train.export.pipeline import check_pipeline
from train.memory import check_memory, largest_shape, step_settings
from train.model.attention import check_attention
from train.model.backbone import BackboneConfig
from train.model.fit import check_fit, check_precision, dry_call
from train.model.float8 import float8_problem
from train.model.memory import step_memory
from train.model.network import build_network, load_matching, load_pretrained, width_field
from train.model.optimizer import freeze_except
from train.model.sharding import allocate
from train.model.text_width import (
    conversion_matrix,
    hash_projection,
    multiply_text_layers,
    text_layers,
    text_projection,
)
from train.objective.alignment import Aligned, check_whole_block, find_features, layer_shape, make_head
from train.objective.validation import FoundValidation, Validation, find_validation, open_validation
from train.run.checkpoints import local_copy
from train.run.checkpoints.checkpoint import (
    STATE_NAME,
    WEIGHTS_NAME,
    Checkpoint,
    checkpoint_identities,
    list_checkpoints,
    load_head,
    load_weights,
    newest_checkpoint,
)
from train.run.fingerprint import check_resume, check_same_everywhere, make_fingerprint
from train.run.lease.backend import Seen
from train.run.lease.lease import wait_until_free
from train.run.preflight import World, check_launch, check_run_dir, check_shared, check_tracker


@dataclass(frozen=True)
class Prepared:
    """The data, network and checkpoint from which `train/setup.py` builds a run."""

    world: World
    spec: DataSpec
    network: Any
    """The diffusers network to train, on the CPU, with its initial weights or the checkpoint's weights. On
    processes other than the main one, its parameters are on the meta device."""
    backbone: BackboneConfig
    """The config of the network and its inputs, with the text towers resolved."""
    checkpoint: Checkpoint | None
    """Newest checkpoint of the run itself; None: the run is new."""
    start: str | None
    """Description of the checkpoint that provides the weights of a new run; None: no checkpoint does."""
    fingerprint: dict[str, Any]
    validation: Validation | None
    aligned: Aligned | None = None
    """`network` with its projection head, if a layer is aligned (REPA)."""
    seen: Seen = field(default_factory=Seen)
    """The state of the run as this launch saw it."""
    start_seed: int | None = None
    """Seed of the run whose checkpoint provides the weights of a new run; None: no checkpoint does."""

    @property
    def orphan(self) -> Path | None:
        """Folder of `checkpoint`, if it exists on this machine but was never uploaded to the run's URL."""
        if self.checkpoint is None or self.checkpoint.folder.name in (self.seen.checkpoints or {}):
            return None
        return self.checkpoint.folder


def prepare(
    config: TrainConfig,
    accelerator: Accelerator | None = None,
    downloads: ExitStack | None = None,
    world: World | None = None,
) -> Prepared:
    """Open the data, build the network, and load the weights of the checkpoint to resume or to start from.

    The main process finds the checkpoints, verifies their hashes and broadcasts the result. If `run_dir` is an
    object-store URL, or `init_from` is one and a layer is aligned, one process on every other node downloads and
    verifies a copy.

    Args:
        accelerator: the accelerator of this process; None: this is the only process.
        downloads: closing it deletes the downloaded checkpoints. It is required if `run_dir` or `init_from` is a URL,
            and must stay open until `install` has moved the run's own checkpoint.
        world: processes of the planned run; None: the launched processes.

    Raises:
        RequestError: an input is missing, or the config, the data and the checkpoint do not match.
    """
    assert downloads or not any(isinstance(place, str) for place in (config.run_dir, config.init_from))
    downloads = downloads or ExitStack()
    world = world or World.launched()
    check_tracker(config.log.tracker)
    problem = None
    if config.float8 and accelerator is not None:
        assert config.precision != "auto"
        problem = float8_problem(accelerator.device, config.precision)
    check_launch(accelerator, world, problem)
    world.check(config.num_processes, config.global_batch_size, config.active_group)

    # checkpoints and indexes may change at any time, so the main process looks them up once for all processes
    seen, checkpoint, start, found, held_out = on_main_process(accelerator, lambda: find_all(config, world, downloads))
    checkpoint = on_each_node(accelerator, "run_dir", config.run_dir, checkpoint, downloads)
    if config.init_from is not None and config.repa.layer is not None:  # each process loads the projection head
        start = on_each_node(accelerator, "init_from", config.init_from, start, downloads)

    # data and network
    spec = open_data(config.data, config.global_batch_size, found)
    encoding = found.streams[0].encoding
    backbone = config.backbone.resolved(spec.texts)
    projection = text_projection(backbone.states, spec.texts)
    widths = None if projection is None else (projection.shape[0], projection.shape[1])
    without_weights = build_network(config.network, None, widths)
    check_fit(without_weights, spec, backbone, config.validation.bucket if config.validation.root is not None else None)
    check_precision(without_weights, config.precision)
    if widths is not None:
        text_layers(without_weights.config, widths[0])  # fail now if the trained network could not be exported
        if config.init_unet is not None:
            raise RequestError(
                f"init_unet: the weights of {config.init_unet} read full-width text, but this run's data has text "
                f"projected onto {widths[1]} dimensions. Train on a root without `text.width`."
            )
    is_main = accelerator is None or accelerator.is_main_process
    from_file = checkpoint is not None or start is not None or config.init_unet is not None
    # only the main process initializes or loads weights, and `place_network` sends them to the others
    with init_empty_weights(include_buffers=False) if from_file or not is_main else nullcontext():
        network = build_network(config.network, config.seed, widths)
    freeze_except(network, config.train_only)
    aligned = make_aligned(config, spec, network, backbone, sorted(encoding.features))

    # the fingerprint must be the same in all processes and in the checkpoint
    fingerprint = make_fingerprint(
        config.seed,
        config.global_batch_size,
        config.data,
        spec,
        config.objective,
        network,
        config.backbone,
        repa=None if aligned is None else config.repa.model_dump(mode="json") | {"tower": aligned.features.name},
        validation=None if held_out is None else held_out.pin,
        # determines the format of a checkpoint's optimizer state
        optimizer=None if config.optimizer.kind == "adamw" else config.optimizer.kind,
        train_only=config.train_only,
        text_projection=hash_projection(projection),
    )
    spec = spec.keep_towers(backbone.text_towers, [] if aligned is None else [aligned.features.name])
    check_same_everywhere(accelerator, fingerprint, spec.size_check.problem if spec.size_check else None)
    if checkpoint is not None:
        check_resume(checkpoint.folder, checkpoint.fingerprint, fingerprint, config.data.index == "newest")
    has_steps_left = checkpoint is None or checkpoint.state.step < config.max_steps
    if accelerator is not None and is_accelerator(accelerator.device) and has_steps_left:
        shape = largest_shape({stream.latent_hw for stream in spec.streams})
        settings, capacity = step_settings(config, world.size), memory_of(accelerator.device)
        estimate = partial(step_memory, network, backbone, spec, shape)
        on_main_process(accelerator, lambda: check_memory(estimate, settings, capacity))
        tried = (config.attention, accelerator.device, settings.precision)
        on_main_process(accelerator, lambda: check_attention(*tried))

    # weights
    start_description = on_main_process(
        accelerator, lambda: load_first_weights(config, network, checkpoint, start, projection)
    )
    source = checkpoint or start
    if aligned is not None and source is not None:
        load_head(aligned.head, source.folder)
    validation = None
    if held_out is not None:
        training = keep_towers(encoding, [f"texts.{name}" for name in spec.texts])
        rank, ranks = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
        validation = open_validation(config.validation, training, config.seed, held_out, rank, ranks)
    if accelerator is not None:
        accelerator.wait_for_everyone()  # from then on, a process may delete weights that it downloaded
    return Prepared(
        world=world,
        spec=spec,
        network=network,
        backbone=backbone,
        checkpoint=checkpoint,
        start=start_description,
        fingerprint=fingerprint,
        validation=validation,
        aligned=aligned,
        seen=seen,
        start_seed=None if checkpoint is not None or start is None else start.fingerprint["seed"],
    )


def load_first_weights(
    config: TrainConfig,
    network: Any,
    checkpoint: Checkpoint | None,
    start: Checkpoint | None,
    projection: np.ndarray | None,
) -> str | None:
    """Load the weights of the checkpoint to resume, of the run to start from, or of a pretrained network.

    Args:
        network: its parameters are on the meta device if any of these sources is given.
        projection: projection of the text that the network reads; None: it reads full-width text.

    Returns:
        A description of the checkpoint to start from; None: the weights come from a different source.

    Raises:
        RequestError: the weights belong to a different architecture.
    """
    if checkpoint or start or config.init_unet:
        allocate(network, "cpu")
    if checkpoint is not None:
        load_weights(network, checkpoint.folder / "unet")
    elif start is not None:
        weights = start.weights(config.init_weights)
        if start.fingerprint.get("text_projection") == hash_projection(projection):
            load_weights(network, weights)
        else:
            assert config.init_from is not None
            load_converted(network, weights, config.init_from, start, projection)
        shown = weights
        if isinstance(config.init_from, str) and weights.is_relative_to(start.folder):
            shown = weights.relative_to(start.folder.parents[1])  # omits the temporary download folder
        return f"{start.tag} after step {start.state.step} ({shown})"
    elif config.init_unet is not None:
        load_pretrained(network, config.init_unet)
    return None


def load_converted(network: Any, weights: Path, run: Place, start: Checkpoint, projection: np.ndarray | None) -> None:
    """Load a run's weights that were trained on a different projection, converted so that the output does not change.

    Args:
        weights: folder with the weights.
        run: the run.
        projection: projection of the text that `network` reads; None: it reads full-width text.

    Raises:
        RequestError: the weights cannot be converted exactly.
    """
    old = None
    if expected := start.fingerprint.get("text_projection"):
        old = projection_of_run(run)
        if hash_projection(old) != expected:
            raise RequestError(
                f"init_from: the root of {run} now has a different projection than the one on which the run was "
                f"trained, so its weights cannot be converted. Use data with the original projection "
                f"(`text.projection` in stage 1)."
            )
    change = conversion_matrix(old, projection)
    if change is None:
        has = "full-width text" if old is None else f"text projected onto {old.shape[1]} dimensions"
        wants = "full-width text"
        if projection is not None:
            wants = f"text with a different projection, onto {projection.shape[1]} dimensions"
        raise RequestError(
            f"init_from: {run} was trained on {has}, but this run's data has {wants}. Converting the weights would "
            f"lose information. Use data with that run's projection (`text.projection: ROOT` in stage 1), or "
            f"full-width data."
        )
    fields = json.loads((weights / "config.json").read_text())
    layers, name = text_layers(fields, 1), width_field(fields)
    fields |= {name: network.config[name]}

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return multiply_text_layers({key: value.float() for key, value in tensors.items()}, layers, change)

    load_matching(network, weights / WEIGHTS_NAME, fields, convert)


def projection_of_run(run: Place) -> np.ndarray | None:
    """Return the projection of the text that a run was trained on, as recorded in its first root."""
    config = TrainConfig.model_validate(yaml.safe_load(open_store(run).read("config.yaml")))
    encoding = keep_towers(EncodingRecord.load(open_store(config.data.streams[0].root)), config.data.towers)
    return text_projection(config.backbone.resolved(encoding.texts).states, encoding.texts)


def make_aligned(
    config: TrainConfig, spec: DataSpec, network: Any, backbone: BackboneConfig, stored: list[str]
) -> Aligned | None:
    """Combine the network with the projection head of `config.repa`, or return None if no layer is aligned.

    Args:
        stored: names of the feature towers in the root.

    Raises:
        RequestError: the tower is missing, ambiguous or not read, or the layer does not exist or cannot be aligned.
    """
    if config.repa.layer is None:
        return None
    features = find_features(config.repa, spec, stored)
    shapes = {}
    for latent_hw in sorted({stream.latent_hw for stream in spec.streams}):
        copy, call = dry_call(network, backbone, spec, latent_hw)
        shapes[latent_hw] = layer_shape(copy, config.repa, call)
    if config.compile and config.gradient_checkpointing is True and not isinstance(network, UNet2DConditionModel):
        check_whole_block(network, config.repa.layer)
    head = make_head(config.repa, shapes, features.tower.width, config.seed)
    return Aligned(network, head, config.repa, features)


def on_each_node(
    accelerator: Accelerator | None, setting: str, place: Place, checkpoint: Checkpoint | None, downloads: ExitStack
) -> Checkpoint | None:
    """Return the checkpoint that the main process found, downloaded to a folder on this node if `place` is a URL.

    Args:
        setting: name of the config field `place`.

    Raises:
        RequestError: `place` is a folder that a node does not share.
        WorkError: the checkpoint was damaged, replaced or deleted after the main process found it.
    """
    if accelerator is None or checkpoint is None:
        return checkpoint
    if isinstance(place, Path):
        check_shared(accelerator, setting, checkpoint.folder)
        return checkpoint
    folder = checkpoint.folder
    if accelerator.is_local_main_process and not accelerator.is_main_process:
        work = local_copy.work_folder(place)
        folder = local_copy.obtain_same(open_store(place), checkpoint, work, downloads).folder
    folders = gather_object([folder])
    return replace(checkpoint, folder=folders[accelerator.process_index - accelerator.local_process_index])


def precision_of_run(config: TrainConfig, device: str) -> Precision:
    """Return the precision in which to train.

    `auto` means the earlier precision of a resumed run, or the best precision for `device` for a run without a
    checkpoint. This prints the choice made for `auto`, or a warning if the CPU has to emulate the given precision.

    Raises:
        RequestError: the precision is `auto`, and the resumed run's config.yaml is damaged.
    """
    precision = config.precision
    files = open_store(config.run_dir).read_many(["config.yaml"]) if precision == "auto" else {}
    if files and has_checkpoint(config):
        try:
            precision = yaml.safe_load(files["config.yaml"])["precision"]
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise RequestError(
                f"{config.run_dir}/config.yaml is damaged, so the run's earlier precision is unknown. Set "
                f"`precision` to it; the run then rewrites the file."
            ) from error
        print(f"precision: auto keeps {precision}, in which this run was trained so far", file=sys.stderr, flush=True)
    return resolve_precision(precision, device)


def has_checkpoint(config: TrainConfig) -> bool:
    """Return whether the run has a checkpoint on this machine or at its URL, intact or not."""
    if list_checkpoints(config.work):
        return True
    stored = [] if isinstance(config.run_dir, Path) else open_store(config.run_dir).files("checkpoints")
    return any(name.endswith(f"/{STATE_NAME}") for name in stored)


def find_all(
    config: TrainConfig, world: World, downloads: ExitStack
) -> tuple[Seen, Checkpoint | None, Checkpoint | None, FoundData, FoundValidation | None]:
    """Look up everything that may change over time, once per launch.

    Returns:
        The state of the run; its newest checkpoint; the checkpoint to start from if the run has no checkpoint; and the
        training and validation data that were found, whose indexes the run's own checkpoint pins.

    Raises:
        RequestError: another launch holds the run, the trained model could not be exported, or `find_start`,
            `find_data` or `find_validation` raised it.
    """
    check_run_dir(config.work)
    free = wait_until_free(local_copy.lease_backend(config.run_dir), config.takeover_after)
    if isinstance(config.run_dir, Path):
        checkpoints = checkpoint_identities(config.run_dir)
        own = newest_checkpoint(config.run_dir)
    else:
        single_node = world.size == world.local_size
        checkpoints, own = local_copy.find(open_store(config.run_dir), config.work, downloads, single_node)
    seen = Seen(free, checkpoints)
    start = find_start(config, downloads) if own is None else None
    found = find_data(config.data, own.fingerprint["streams"] if own else ())
    check_pipeline(config, found.streams[0].encoding)  # fail now if the trained model could not be exported
    held_out = None
    if config.validation.root is not None:
        pinned = own is not None and config.data.index == "pinned"
        held_out = find_validation(config.validation, own.fingerprint.get("validation") if own and pinned else None)
    return seen, own, start, found, held_out


def find_start(config: TrainConfig, downloads: ExitStack) -> Checkpoint | None:
    """Return the newest checkpoint of the run to start from, or None if `init_from` is not set.

    Raises:
        RequestError: `init_from` has no checkpoint, or its checkpoint lacks the weights named by `init_weights`.
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


def on_main_process(accelerator: Accelerator | PartialState | None, function: Callable[[], Any]) -> Any:
    """Call `function` on the main process, and return its result on all processes.

    Raises:
        RequestError, WorkError: `function` raised this error on the main process. All processes raise it.
    """
    result: list[Any] = [None]
    if accelerator is None or accelerator.is_main_process:
        try:
            result = [function()]
        except (RequestError, WorkError) as error:
            result = [error]
    if accelerator is not None:
        broadcast_object_list(result)
    if isinstance(result[0], RequestError | WorkError):
        raise result[0]
    return result[0]
