"""The whole of stage 1 for one tar, top to bottom."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from typing import Any

import torch

from precompute.encode.encoders import attends_by_products
from precompute.encode.overlap import Turns, in_background, threads
from precompute.encode.parts import Parts
from precompute.encode.provenance import DeviceClock
from precompute.encode.recipe import Recipe
from precompute.encode.samples import Cut
from precompute.encode.stages import batched_by_bucket, decoding, start_batches
from precompute.encode.towers import Towers
from precompute.input.tars import InputTar, Tar, TarRecord, counted_samples, local_copy
from shards.base.scratch import attempt_folder
from shards.base.store import Store
from shards.format.buckets import Bucket
from shards.root.commit import Attempt, commit, current_generation
from shards.root.committed import TarReceipts
from shards.root.provenance import Stopwatch, made_by, versions
from shards.root.shared import has_uncond, write_uncond

SOFTWARE = ("diffusers", "mosaicml-streaming", "numpy", "pillow", "torch", "transformers")


def encode_tar(
    tar: InputTar,
    recipe: Recipe,
    store: Store,
    towers: Towers,
    attempt: int = 1,
    report: Callable[[int], None] = lambda samples_in: None,
    turns: Turns | None = None,
) -> TarReceipts:
    """Encode one tar into every bucket of `recipe` that it has no receipt for yet, and commit it.

    `report` hears after each batch how many samples have been taken in. From attempt `workers.isolate_from` on,
    pictures are decoded in child processes. Calls with the same `turns`, in threads of one process, overlap: the device
    has the next tar's batches while this one is being committed.

    Returns:
        The receipts in force afterwards; those that were there where there was nothing to do.

    Raises:
        DamagedInput: the tar is damaged, or its samples are not those that img2dataset counted.
        Stuck: a picture was decoded in a thread and did not end. The process should.
    """
    started, stopwatch, turns = datetime.now(UTC), Stopwatch(), turns or Turns()
    earlier = {str(bucket): current_generation(store, str(bucket), tar.name)[1] for bucket in recipe.buckets.all}
    committed = {bucket: receipt for bucket, receipt in earlier.items() if receipt}
    fresh = [bucket for bucket in recipe.buckets.all if str(bucket) not in committed]
    if not fresh:
        return TarReceipts(tar.name, committed)
    with turns.empty_caption:
        if not has_uncond(store):
            write_uncond(store, towers.empty_caption())

    with attempt_folder(store, tar.name) as folder:
        with turns.pictures:
            report(0)  # who was told to leave while it waited fetches nothing
            parts = Parts(folder, recipe.encoding, fresh, recipe.buckets)
            with (
                opened(tar, recipe, stopwatch) as (members, source),
                decoding(recipe, fresh, isolate=attempt >= recipe.worker.isolate_from) as decoded,
            ):
                # tar members => raw samples => pixels => latents => parts
                accepted = parts.accept(stopwatch.waiting("decode", decoded(members.samples())))
                batches = batched_by_bucket(accepted, parts, recipe.worker.batch_size)
                fill(parts, batches, towers, stopwatch, turns, report)
                with stopwatch("write"):
                    written = parts.finish()
                record = source.result()
        # parts => committed, while the device has the next tar
        made = Attempt(
            tar=tar.name,
            folder=folder,
            encoding=recipe.encoding,
            places={key: place for place, key in enumerate(sorted(parts.keys))},
            samples_in=len(parts.keys),
            parts=written,
            rules={str(bucket): rule for bucket, rule in recipe.buckets.rules.items()},
            source=record,
            software=versions(libraries(recipe)),
            settings=settings(recipe, towers.device),
            made_by=made_by(towers.device),
            number=attempt,
            started=started.isoformat(timespec="seconds"),
            seconds={**stopwatch.seconds, "worker": turns.lap()},
            clock=stopwatch.began,
        )
        return TarReceipts(tar.name, committed | commit(store, made))


def fill(
    parts: Parts,
    batches: Generator[tuple[Bucket, list[Cut]], None, None],
    towers: Towers,
    stopwatch: Stopwatch,
    turns: Turns,
    report: Callable[[int], None],
) -> None:
    """Encode batches of pixels into `parts`, in their order; each stage runs ahead of the next."""
    clock = DeviceClock(towers.device, stopwatch)
    # begun on the device while the batch before is being written
    started = start_batches(in_background(batches, ahead=1), towers, clock, turns)
    with closing(in_background(started, ahead=1)) as on_device:
        for batch in on_device:
            with stopwatch("encode"):
                encoded = list(batch.encoded())
            with stopwatch("write"):
                parts.add(batch.bucket, encoded)
            report(len(parts.keys))
    clock.stop()


@contextmanager
def opened(tar: InputTar, recipe: Recipe, stopwatch: Stopwatch) -> Iterator[tuple[Tar, Future[TarRecord]]]:
    """A tar that was found whole, or was salvaged; and, once its SHA-256 is there, its record for the receipt.

    The hash has a thread of its own: among those that decode, a picture would wait for it, with the clock running.
    """
    with ExitStack() as stack:
        with stopwatch("fetch"):
            path = stack.enter_context(local_copy(tar.address, ".tar"))
        members = Tar(path, recipe.limits.max_bytes, recipe.tars.policy)
        members.check(tar, counted_samples(tar))
        hasher = stack.enter_context(threads(1))
        yield members, hasher.submit(members.record, tar.address)


def libraries(recipe: Recipe) -> tuple[str, ...]:
    """Packages whose versions a receipt names."""
    return (*SOFTWARE, "torchao") if any(text.quantised for text in recipe.encoding.texts.values()) else SOFTWARE


def settings(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """What a receipt says of how the tar was encoded on `device`."""
    own = {"device": made_by(device).gpu, "attention_by_products": attends_by_products(device)}
    return own | recipe.settings(device)
