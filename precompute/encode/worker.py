"""What a worker process does: load the encoders once, then encode one tar after another."""

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from precompute.encode.encoders import ImageEncoder, TextEncoder
from precompute.encode.memory import warm_up
from precompute.encode.overlap import Stuck
from precompute.encode.recipe import Recipe
from precompute.encode.tar import encode_tar
from precompute.encode.towers import Towers
from precompute.input.tars import InputTar
from shards.base.errors import RequestError, WorkError
from shards.base.store import Store
from shards.format.encoding import EncodingRecord
from shards.format.models import hash_weights, model_folder
from shards.format.receipts import Receipt
from shards.open import open_store


def encode_on_worker(
    tar: InputTar,
    attempt: int,
    report: Callable[[int], None],
    recipe: Recipe,
    output: Path | str,
    device: str,
    num_cpus: float,
) -> Receipt:
    """One attempt at one tar, into the root at `output`; `report` hears how many samples were taken in.

    Raises:
        WorkError: this node does not see the latents root that the job made, or has other models.
    """
    # encoders on the CPU share its cores; beside a GPU, torch scales pictures in the decoding threads, one core each
    torch.set_num_threads(1 if device == "cuda" else max(1, int(num_cpus)))
    store = open_store(output)
    check_shared_root(store, recipe.encoding)
    try:
        towers = Towers(*load_encoders(recipe.encoding, device, recipe.worker.compile), recipe.worker.batch_size)
        return encode_tar(tar, recipe, store, towers, attempt, report)
    except RuntimeError as error:
        if "CUDA error" not in str(error) and not isinstance(error, Stuck):
            raise
        # this process cannot use its GPU again, or has a thread that never ends: Ray starts another one
        traceback.print_exc()
        os._exit(1)


def check_shared_root(store: Store, encoding: EncodingRecord) -> None:
    """See that the root that this worker sees is the one that the driver made.

    Raises:
        WorkError: it is not.
    """
    try:
        shared = EncodingRecord.load(store).id == encoding.id
    except RequestError:
        shared = False
    if not shared:
        raise WorkError(
            f"{store.where()} on {os.uname().nodename} is not the latents root that the job made: the nodes do not "
            f"share this folder. Give an `output` that all of them see under one path, or an object store's address."
        )


@functools.lru_cache(maxsize=1)
def load_encoders(encoding: EncodingRecord, device: str, compiled: bool) -> tuple[ImageEncoder, TextEncoder]:
    """The models that `encoding` names, on `device`; kept for the next call.

    Raises:
        WorkError: what this node has under a name is not what was recorded.
    """
    folders = []
    for recorded in (encoding.vae, encoding.text_encoder, encoding.tokenizer):
        folders.append(folder := model_folder(recorded.name))
        if hash_weights(recorded.name, folder).sha256 != recorded.sha256:
            raise WorkError(
                f"{recorded.name} on {os.uname().nodename} ({folder}) has other content than encoding.json recorded."
            )
    vae, text_encoder, tokenizer = folders
    precision = encoding.compute_dtype
    on = torch.device(device)
    image_encoder = ImageEncoder(vae, on, precision, encoding.image.posterior, compiled)
    encoders = image_encoder, TextEncoder(text_encoder, tokenizer, on, precision, compiled)
    warm_up()
    return encoders
