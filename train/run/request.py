"""What a run asks for, checked before anything is written: data, U-Net, processes, earlier runs."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from diffusers import UNet2DConditionModel

from shards.base.errors import RequestError, WorkError
from shards.base.files import read_sealed_json
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from train.config import TrainConfig
from train.data.loader import DataSpec, open_data
from train.model.unet import build_unet, check_fit, load_pretrained
from train.objective.validation import Validation, open_validation
from train.run.checkpoint import STATE_NAME, load_weights, newest_checkpoint

ORDER_VERSION = 2
"""Of `train/data/order.py` and `choose_per_epoch`: one higher with each change that deals out samples otherwise."""
PLAIN_LAUNCHES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


@dataclass(frozen=True)
class Request:
    """A request that holds up."""

    spec: DataSpec
    unet: UNet2DConditionModel
    """On the CPU, with the weights that the run starts from where it has no checkpoint yet."""
    checkpoint: tuple[Path, dict[str, Any]] | None
    """The run's own newest undamaged checkpoint and the content of its state.json."""
    start: str | None
    """Where the weights come from that it starts with, in words; None: random, or its own checkpoint."""
    fingerprint: dict[str, Any]
    validation: Validation | None
    local_world_size: int


def check_request(config: TrainConfig, accelerator: Accelerator | None = None) -> Request:
    """Open the data, build the U-Net, and find where to start from. Writes nothing.

    Checkpoints are read and hashed by the main process alone; the others are told what it found.

    Raises:
        RequestError: what does not fit, and the remedy.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.num_processes not in (None, world_size):
        raise RequestError(
            f"{config.num_processes} processes were asked for, but {world_size} were started. On a machine without "
            f"GPUs, accelerate needs `--multi_gpu --num_processes {config.num_processes}` (it then uses gloo)."
        )
    if config.global_batch_size % world_size:
        raise RequestError(
            f"global_batch_size {config.global_batch_size} cannot be shared evenly by {world_size} processes. "
            f"Choose a multiple."
        )
    check_tracker(config.log.tracker)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    check_launch(accelerator, world_size, local_world_size)
    check_nodes(config, world_size // local_world_size)
    spec = open_data(config.data, config.global_batch_size)
    unet = build_unet(config.unet, config.seed)
    check_fit(unet, spec)
    fingerprint = make_fingerprint(config, spec, unet)
    check_same_everywhere(accelerator, fingerprint)
    checkpoint, weights = on_main_process(accelerator, lambda: find_start(config, fingerprint))
    if weights is not None:
        load_weights(unet, weights)
    elif checkpoint is None and config.init_unet is not None:
        load_pretrained(unet, config.init_unet)
    validation = None
    if config.validation.root is not None:
        training = EncodingRecord.load(open_store(config.data.streams[0].root))
        validation = open_validation(config.validation, training, config.seed)
    start = None if weights is None else describe_weights(weights)
    return Request(spec, unet, checkpoint, start, fingerprint, validation, local_world_size)


def check_tracker(name: str) -> None:
    """Hold the tracker against those that accelerate drives, and that can be imported here.

    Raises:
        RequestError: it is none of them, or its package is not installed.
    """
    if name == "none":
        return
    if name not in LOGGER_TYPE_TO_CLASS:
        raise RequestError(f"log.tracker {name} is none of none, {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}.")
    if name not in {tracker.value for tracker in get_available_trackers()}:
        raise RequestError(
            f"log.tracker {name} needs a package that is not installed here. Install it (`pip install "
            f"{name.replace('_', '-')}`), or set log.tracker to tensorboard or none."
        )


def check_launch(accelerator: Accelerator | None, world_size: int, local_world_size: int) -> None:
    """Hold what the launcher set up against what this trainer drives.

    Raises:
        RequestError: it is something else; or nodes have unequal shares, and samples would come twice or never.
    """
    shares, scaled = {local_world_size}, False
    if accelerator is not None:
        if accelerator.distributed_type not in PLAIN_LAUNCHES:
            raise RequestError(
                f"The launcher set up {accelerator.distributed_type.value}, which this trainer does not drive. Launch "
                f"with one of configs/accelerate/."
            )
        # of all, so that all refuse together: each node has an environment of its own
        everywhere = gather_object([(local_world_size, accelerator.gradient_accumulation_steps)])
        shares, scaled = {share for share, _ in everywhere}, any(steps != 1 for _, steps in everywhere)
    if len(shares) > 1 or world_size % local_world_size:
        raise RequestError(
            f"{world_size} processes are not spread evenly over the nodes: LOCAL_WORLD_SIZE is "
            f"{' and '.join(map(str, sorted(shares)))}. Start as many processes on each node as on the others."
        )
    if scaled:
        raise RequestError(
            "The environment has ACCELERATE_GRADIENT_ACCUMULATION_STEPS, by which accelerate would scale gradients. "
            "Unset it: microbatch_size decides here."
        )


def check_nodes(config: TrainConfig, num_nodes: int) -> None:
    """Nodes must share the canonical ones evenly, or one would read the files of others'.

    Raises:
        RequestError: they cannot.
    """
    canonical = config.data.num_canonical_nodes
    if canonical % num_nodes and num_nodes % canonical:
        raise RequestError(
            f"{num_nodes} nodes cannot share data.num_canonical_nodes {canonical} evenly. Use a number of nodes that "
            f"divides it, or start a new run with another one (it must divide global_batch_size too)."
        )


def find_start(
    config: TrainConfig, fingerprint: dict[str, Any]
) -> tuple[tuple[Path, dict[str, Any]] | None, Path | None]:
    """The run's own newest checkpoint, or else the folder of the weights to start from; both None: random weights.

    Raises:
        RequestError: the checkpoint was trained under other settings, there are no weights at `init_from`, or the run
            folder cannot be written.
    """
    above = (config.run_dir, *config.run_dir.absolute().parents)
    nearest = next(folder for folder in above if os.path.exists(folder))  # false, where Path.exists may raise
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        why = "may not be written" if nearest.is_dir() else "is a file"
        raise RequestError(f"run_dir {config.run_dir} cannot be used: {nearest} {why}. Give another run_dir.")
    checkpoint = newest_checkpoint(config.run_dir)
    if checkpoint is not None:
        folder, content = checkpoint
        check_resume(folder, content["fingerprint"], fingerprint)
        return checkpoint, None
    if config.init_from is not None:
        return None, starting_weights(config.init_from, config.init_weights)
    return None, None


def check_same_everywhere(accelerator: Accelerator | None, fingerprint: dict[str, Any]) -> None:
    """Hold the fingerprints of all processes against each other.

    Raises:
        RequestError: on all of them; they opened different data, and would train on samples twice or never.
    """
    if accelerator is None:
        return
    everywhere = gather_object([json.dumps(fingerprint, sort_keys=True, default=str)])
    if len(set(everywhere)) > 1:
        fields = [json.loads(text) for text in everywhere]
        differing = sorted(key for key in fingerprint if any(other[key] != fields[0][key] for other in fields))
        raise RequestError(
            f"The processes opened different data ({', '.join(differing)} differ): an index.json was written while "
            f"they started, or their copies of a root are not the same. Start again once nothing writes to the roots."
        )


def on_main_process(accelerator: Accelerator | None, decide: Callable[[], Any]) -> Any:
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


def starting_weights(run_dir: Path, which: str) -> Path:
    """The folder of an earlier run's newest weights, as `weights_folder`.

    Raises:
        RequestError: the run has no checkpoint, or not the weights asked for.
    """
    found = newest_checkpoint(run_dir)
    if found is None:
        raise RequestError(
            f"init_from: {run_dir} has no complete checkpoint. Train that phase first (`make train PHASE=1`), or set "
            f"init_from to a run folder that has one."
        )
    return weights_folder(found[0], which)


def weights_folder(checkpoint: Path, which: str) -> Path:
    """The folder of a checkpoint's weights: `raw`, `ema`, or `auto`, the moving average where there is one.

    Raises:
        RequestError: it holds no moving average, and that was asked for.
    """
    has_ema = (checkpoint / "ema").is_dir()
    if which == "ema" and not has_ema:
        raise RequestError(f"{checkpoint} holds no moving average. Ask for raw or auto weights.")
    return checkpoint / ("ema" if has_ema and which != "raw" else "unet")


def describe_weights(folder: Path) -> str:
    """A checkpoint's weights in words: `phase1 after step 550000 (runs/phase1/checkpoints/step-00550000/unet)`."""
    content = read_sealed_json(folder.parent / STATE_NAME)
    return f"{content.get('tag', folder.parents[2].name)} after step {content['state']['step']} ({folder})"


def make_fingerprint(config: TrainConfig, spec: DataSpec, unet: UNet2DConditionModel) -> dict[str, Any]:
    """What the loss curve is a function of: a checkpoint goes on only under the same."""
    return {
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "num_canonical_nodes": config.data.num_canonical_nodes,
        "shuffle": config.data.shuffle,
        "order": ORDER_VERSION,
        "shuffle_block": config.data.shuffle_block,
        "streams": [
            {
                "bucket": stream.config.bucket,
                "weight": stream.config.weight,
                "samples": stream.num_samples,
                "selection_sha256": stream.selection.sha256 if stream.selection is not None else None,
                "index_sha256": stream.index_sha256,
                "encoding_id": stream.encoding_id,
            }
            for stream in spec.streams
        ],
        "objective": config.objective.model_dump(mode="json"),
        "unet": {key: value for key, value in sorted(unet.config.items()) if not key.startswith("_")},
    }


def check_resume(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue a checkpoint under another data order or objective.

    Raises:
        RequestError: the entries that differ.
    """
    now = json.loads(json.dumps(now))  # as the saved one was: tuples are lists
    different = [f"{key}: {saved.get(key)} ≠ {now.get(key)}" for key in now if saved.get(key) != now.get(key)]
    if different:
        raise RequestError(
            f"{folder} was trained under other settings: {'; '.join(different)} (checkpoint ≠ this run). Set them "
            f"back, or give another run_dir (and init_from, to start from these weights)."
        )
