"""What a worker process does: load the encoders once, then encode one tar after another."""

import atexit
import functools
import gc
import os
import threading
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import torch
from torch._dynamo.exc import TorchDynamoException

from precompute.encode.encoders import FeatureEncoder, ImageEncoder, TextEncoder
from precompute.encode.networks import MOST_SHAPES, Offload, Site
from precompute.encode.overlap import Stuck, Turns
from precompute.encode.provenance import DeviceClock, check_source
from precompute.encode.recipe import Recipe
from precompute.encode.tar import encode_tar
from precompute.encode.towers import TextTowers, Towers
from precompute.input.tars import InputTar
from shards.base.device import is_accelerator, is_device_error
from shards.base.errors import RequestError, UnfitNode
from shards.base.pool import configure_malloc
from shards.base.scratch import use_scratch
from shards.base.store import Store
from shards.derive.part import Captions, Derivation, Settings, derive_tar, kept_uncond
from shards.derive.source import SourceTar
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.models import recorded_folder
from shards.format.towers import TextTower, Weights
from shards.open import open_store
from shards.root.committed import TarReceipts
from shards.root.provenance import Stopwatch, made_by
from shards.root.shared import has_uncond, load_uncond, write_uncond

TURNS, LOADING = Turns(), threading.Lock()
"""Of this process, which has several tars in hand at once, each in a thread."""


def encode_on_worker(
    tar: InputTar | SourceTar,
    attempt: int,
    report: Callable[[int], None],
    recipe: Recipe,
    output: Path | str,
    device: str,
    num_cpus: float,
    source: str,
) -> TarReceipts:
    """One attempt at one tar, or at its parts in another root, into the root at `output`; `report` hears how many
    samples were taken in.

    Raises:
        UnfitNode: this node's code has not the SHA-256 `source`, it does not see the latents root that the job made,
            or it has other models.
    """
    check_source(source)
    with LOADING:
        scratch_of_process(recipe.worker.scratch)
    # encoders on the CPU share its cores; beside a GPU, torch scales pictures in the decoding threads, one core each
    torch.set_num_threads(1 if is_accelerator(device) else max(1, int(num_cpus)))
    store = open_store(output)
    check_shared_root(store, recipe.encoding)
    try:
        if isinstance(tar, SourceTar):
            with TURNS.device:
                return derive_tar(tar, with_fresh_towers(recipe, store, device), attempt, report)
        with LOADING:
            towers = load_towers(recipe, device)
        return encode_tar(tar, recipe, store, towers, attempt, report, TURNS)
    except RuntimeError as error:
        if not is_device_error(error) and not isinstance(error, Stuck):
            raise
        # this process cannot use its GPU again, or has a thread that never ends: Ray starts another one
        traceback.print_exc()
        os._exit(1)


@functools.cache
def scratch_of_process(scratch: Path | None) -> None:
    """Once in a process, before anything is written."""
    use_scratch(scratch)


def check_shared_root(store: Store, encoding: EncodingRecord) -> None:
    """See that the root that this worker sees is the one that the driver made.

    Raises:
        UnfitNode: it is not.
    """
    try:
        shared = EncodingRecord.load(store).id == encoding.id
    except RequestError:
        shared = False
    if not shared:
        raise UnfitNode(
            f"{store.where()} on {os.uname().nodename} is not the latents root that the job made: the nodes do not "
            f"share this folder. Give an `output` that all of them see under one path, or an object store's address."
        )


Networks = tuple[ImageEncoder, dict[str, TextEncoder], dict[str, FeatureEncoder]]


def load_towers(recipe: Recipe, device: str) -> Towers:
    """The towers that the recipe's encoding names, on `device`; their networks are kept for the next call.

    Raises:
        UnfitNode: this node has not what was recorded under a name.
    """
    compiled = recipe.worker.compiles(torch.device(device))
    networks = _kept_networks(recipe.encoding.sealed(), device, compiled, recipe.worker.one_by_one)
    towers = Towers(*networks, recipe.worker.batch_size, recipe.batch_sizes)
    towers.one_by_one = recipe.worker.one_by_one
    if compiled:
        compile_now(towers, recipe.buckets.all)
    return towers


def compile_now(towers: TextTowers, buckets: Iterable[Bucket] = ()) -> None:
    """Have what is compiled when it is first run be compiled, before a tar's time counts.

    Raises:
        UnfitNode: it cannot be compiled here.
    """
    torch._dynamo.config.recompile_limit = MOST_SHAPES  # is a thread's own: another one may have loaded the networks
    try:
        towers.warm_up(buckets)
    except TorchDynamoException as error:
        raise UnfitNode(
            f"torch.compile fails on {os.uname().nodename} ({' '.join(str(error).split())[:300]}). On GPUs it needs a "
            f"C compiler beside torch's triton. Install one there, or set workers.compile to false."
        ) from error


@functools.lru_cache(maxsize=1)
def _kept_networks(encoding_json: bytes, device: str, compiled: bool, one_by_one: bool) -> Networks:
    encoding = EncodingRecord.parse(encoding_json, "this job's encoding record")
    networks = load_networks(encoding, device, compiled, one_by_one)
    warm_up()
    return networks


def load_networks(encoding: EncodingRecord, device: str, compiled: bool = False, one_by_one: bool = False) -> Networks:
    """Each tower's network on `device`, or taking turns there. Raises as `load_towers`."""
    site = site_of(encoding, torch.device(device), compiled, one_by_one)
    texts = load_texts(encoding.texts, site)
    features = {
        name: FeatureEncoder(_recorded(tower.weights), tower, site) for name, tower in encoding.features.items()
    }
    return ImageEncoder(_recorded(encoding.image.weights), encoding.image, site), texts, features


def site_of(encoding: EncodingRecord, device: torch.device, compiled: bool, one_by_one: bool) -> Site:
    """Of all networks of an encoding, which take turns on the device where they run `one_by_one`."""
    return Site(device, encoding.compute_dtype, compiled, Offload(device) if one_by_one else None)


def load_texts(towers: dict[str, TextTower], site: Site) -> dict[str, TextEncoder]:
    """The networks of text towers. Raises as `load_towers`."""
    return {
        name: TextEncoder(_recorded(tower.weights), _recorded(tower.tokenizer), tower, site)
        for name, tower in towers.items()
    }


def with_fresh_towers(recipe: Recipe, store: Store, device: str) -> Derivation:
    """How the source's parts become the job's: by the text towers that encode its captions. Raises as `load_towers`."""
    assert recipe.source is not None
    how, worker = recipe.source.conversion, recipe.worker
    on = torch.device(device)
    texts = _kept_texts(recipe.encoding.sealed(), how.reencoded, device, worker.compiles(on), worker.one_by_one)
    towers = TextTowers(texts, worker.batch_size, recipe.batch_sizes)
    towers.one_by_one = worker.one_by_one
    if worker.compiles(on):
        compile_now(towers)
    source = open_store(recipe.source.place)
    if not has_uncond(store):
        write_uncond(store, kept_uncond(load_uncond(source).items(), how) | towers.empty_caption())

    def encode(captions: list[str], stopwatch: Stopwatch) -> Captions:
        clock = DeviceClock(on, stopwatch)
        try:
            with stopwatch("encode"):
                waits = next(towers.start_captions([captions], clock))
            for wait in waits:
                with stopwatch("encode"):
                    caption = wait()
                yield caption.latents, caption.truncated
        finally:
            clock.stop()

    settings: Settings = {"device": made_by(on).gpu, **recipe.batches(on)}
    if any(tower.tower.quantised for tower in texts.values()):
        settings["torchao"] = version("torchao")
    settings = {f"derived.{name}": value for name, value in settings.items()}
    return Derivation(source, store, how, encode, on, settings)


@functools.lru_cache(maxsize=1)
def _kept_texts(
    encoding_json: bytes, names: frozenset[str], device: str, compiled: bool, one_by_one: bool
) -> dict[str, TextEncoder]:
    encoding = EncodingRecord.parse(encoding_json, "this job's encoding record")
    towers = {name: encoding.texts[name] for name in sorted(names)}
    texts = load_texts(towers, site_of(encoding, torch.device(device), compiled, one_by_one))
    warm_up()
    return texts


def _recorded(weights: Weights) -> Path:
    """The folder on this node of what encoding.json recorded."""
    try:
        return recorded_folder(weights)
    except RequestError as error:
        raise UnfitNode(f"{error} (on {os.uname().nodename})") from error


def warm_up() -> None:
    """What a process does once, when its encoders are loaded."""
    configure_malloc()
    pa.array([None])  # loads pandas, where that is installed; or the device would wait for it at the first tar's end
    gc.collect()
    atexit.register(gc.unfreeze)  # libraries complain of objects that are never collected
    gc.freeze()  # or each collection would look through all that the libraries made when they were imported
