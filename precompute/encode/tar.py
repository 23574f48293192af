"""The whole of stage 1 for one tar, top to bottom."""

import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from precompute.encode.overlap import in_background, threads
from precompute.encode.parts import Parts
from precompute.encode.recipe import Recipe
from precompute.encode.stages import batched_by_bucket, decoding, start_batches
from precompute.encode.towers import Towers
from precompute.input.tars import InputTar, Tar, TarRecord, counted_samples, local_copy
from shards.base.store import Store
from shards.format.receipts import Receipt, load_receipt
from shards.root.commit import Attempt, attempt_folder, commit
from shards.root.shared import has_uncond, write_uncond

SOFTWARE = ("diffusers", "mosaicml-streaming", "numpy", "pillow", "torch", "transformers")


def encode_tar(
    tar: InputTar,
    recipe: Recipe,
    store: Store,
    towers: Towers,
    attempt: int = 1,
    report: Callable[[int], None] = lambda samples_in: None,
) -> Receipt:
    """Encode one tar into every bucket of `recipe` that its receipt does not have yet, and commit it.

    `report` hears after each batch how many samples have been taken in. From attempt `workers.isolate_from` on,
    pictures are decoded in child processes.

    Returns:
        The receipt in force afterwards; the one that was there where there was nothing to do.

    Raises:
        DamagedInput: the tar is damaged, or its samples are not those that img2dataset counted.
        Stuck: a picture was decoded in a thread and did not end. The process should.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    committed = load_receipt(store, tar.name)
    fresh = [bucket for bucket in recipe.buckets.all if committed is None or str(bucket) not in committed.parts]
    if committed is not None and not fresh:
        return committed
    if not has_uncond(store):
        write_uncond(store, towers.empty_caption(), recipe.encoding)

    with (
        opened(tar, recipe) as (members, source),
        attempt_folder(store, tar.name, recipe.worker.scratch) as folder,
        decoding(recipe, fresh, isolate=attempt >= recipe.worker.isolate_from) as decoded,
    ):
        parts = Parts(folder, recipe.encoding, fresh, recipe.buckets)
        # tar members => raw samples => pixels, in the tar's order, running ahead of the encoders
        accepted = parts.accept(decoded(members.samples()))
        batches = in_background(batched_by_bucket(accepted, parts, recipe.worker.batch_size), ahead=1)
        # pixels => latents, begun on the device while the batch before is being written
        with closing(in_background(start_batches(batches, towers), ahead=1)) as on_device:
            # latents => parts
            for batch in on_device:
                for sample in batch.encoded():
                    parts.add(sample)
                report(parts.samples_in)
        # parts => committed
        made = Attempt(
            shard=tar.name,
            folder=folder,
            encoding=recipe.encoding,
            samples_in=parts.samples_in,
            counts=parts.finish(),
            rules={str(bucket): rule for bucket, rule in recipe.buckets.rules.items()},
            records=parts.records,
            source=source.result(),
            software={name: version(name) for name in SOFTWARE},
            settings={"device": device_name(towers.device), **recipe.settings},
            number=attempt,
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 3),
        )
        return commit(store, made)


@contextmanager
def opened(tar: InputTar, recipe: Recipe) -> Iterator[tuple[Tar, Future[TarRecord]]]:
    """A tar that was found whole, or was salvaged; and, once its SHA-256 is there, its record for the receipt.

    The hash has a thread of its own: among those that decode, a picture would wait for it, with the clock running.
    """
    with local_copy(tar.address, ".tar") as path:
        members = Tar(path, recipe.limits.max_bytes, recipe.tars.policy)
        members.check(tar, counted_samples(tar))
        with threads(1) as hasher:
            yield members, hasher.submit(members.record, tar.address)


def device_name(device: torch.device) -> str:
    """For a receipt."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})"
