"""All of stage 1 for one tar, from reading it to committing its parts."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from datetime import UTC, datetime

import torch

from precompute.encode.overlap import Turns
from precompute.encode.parts import Parts
from precompute.encode.recipe import Recipe
from precompute.encode.samples import PixelBatch
from precompute.encode.stages import batched_by_bucket, decoding, start_batches
from precompute.encode.towers import DeviceClock, Towers
from precompute.input.table import table_settings, with_tables
from precompute.input.unit import Unit
from shards.base.device import is_accelerator
from shards.base.pool import in_background
from shards.base.scratch import attempt_folder
from shards.base.store import Store
from shards.root.commit import Attempt, commit, current_generation
from shards.root.committed import TarReceipts
from shards.root.provenance import Stopwatch, made_by, versions
from shards.root.shared import has_uncond, write_uncond

SOFTWARE = ("diffusers", "mosaicml-streaming", "numpy", "pillow", "torch", "transformers")


def encode_tar(
    unit: Unit,
    recipe: Recipe,
    store: Store,
    towers: Towers,
    attempt: int = 1,
    report: Callable[[int], None] = lambda samples_in: None,
    turns: Turns | None = None,
) -> TarReceipts:
    """Encode one tar into every bucket of `recipe` for which it has no receipt yet, and commit it.

    From attempt `workers.isolate_from` on, images are decoded in child processes.

    Args:
        report: called after each batch with the number of samples processed so far.
        turns: shared by the calls in all threads of a process, so that they overlap: the device works on the next tar
            while this one is being committed.

    Returns:
        The tar's active receipts after the call. If there was nothing to do, these existed before.

    Raises:
        DamagedInput: the tar is damaged, or its samples are not those that img2dataset listed.
        Stuck: decoding an image in a thread did not end. The process should exit.
    """
    started, stopwatch, turns = datetime.now(UTC), Stopwatch(), turns or Turns()
    earlier = {str(bucket): current_generation(store, str(bucket), unit.name)[1] for bucket in recipe.buckets.all}
    committed = {bucket: receipt for bucket, receipt in earlier.items() if receipt}
    fresh = [bucket for bucket in recipe.buckets.all if str(bucket) not in committed]
    if not fresh:
        return TarReceipts(unit.name, committed)
    with turns.empty_caption:
        if not has_uncond(store):
            write_uncond(store, towers.empty_caption())

    with attempt_folder(store, unit.name) as folder:
        with turns.pictures:
            report(0)  # raises if the job was stopped during the wait, before anything is fetched
            found = Counter[str]()
            parts = Parts(folder, recipe.encoding, fresh, recipe.buckets)
            with ExitStack() as stack:
                with stopwatch("fetch"):
                    source = stack.enter_context(unit.open(recipe.limits.max_bytes, recipe.tars.policy))
                isolate = attempt >= recipe.worker.isolate_from
                decoded = stack.enter_context(decoding(recipe, isolate))
                # raw samples => pixels => latents => parts
                samples = with_tables(source.samples(), recipe.tables, found)
                accepted = parts.accept(stopwatch.waiting("decode", decoded(samples)))
                batches = batched_by_bucket(accepted, parts, recipe.worker.batch_size)
                fill(parts, batches, towers, stopwatch, turns, report)
                with stopwatch("write"):
                    written = parts.finish()
                record = source.record()
        # parts => committed, while the device works on the next tar
        made = Attempt(
            tar=unit.name,
            folder=folder,
            encoding=recipe.encoding,
            places={key: place for place, key in enumerate(sorted(parts.keys))},
            samples_in=len(parts.keys),
            parts=written,
            rules={str(bucket): rule for bucket, rule in recipe.buckets.rules.items()},
            source=record,
            software=versions(SOFTWARE),
            settings=settings(recipe, towers.device) | table_settings(recipe.tables, found),
            made_by=made_by(towers.device),
            number=attempt,
            started=started.isoformat(timespec="seconds"),
            seconds={**stopwatch.seconds, "worker": turns.lap()},
            clock=stopwatch.began,
        )
        return TarReceipts(unit.name, committed | commit(store, made))


def fill(
    parts: Parts,
    batches: Generator[PixelBatch, None, None],
    towers: Towers,
    stopwatch: Stopwatch,
    turns: Turns,
    report: Callable[[int], None],
) -> None:
    """Encode batches of pixels into `parts`, in order. Each stage runs ahead of the next."""
    clock = DeviceClock(towers.device, stopwatch)
    # a batch is started on the device while the previous batch is being written
    started = start_batches(in_background(batches, ahead=1), towers, clock, turns)
    with closing(in_background(started, ahead=1)) as on_device:
        for batch in on_device:
            with stopwatch("encode"):
                encoded = batch.encoded()
            with stopwatch("write"):
                parts.add(batch.bucket, encoded)
            report(len(parts.keys))
    clock.stop()


def settings(recipe: Recipe, device: torch.device) -> dict[str, str | int | float | bool]:
    """Return the settings that a receipt records, besides the encoding, for a tar encoded on `device`."""
    return {
        "device": made_by(device).gpu,
        "attention_by_products": is_accelerator(device),
        **recipe.batches(device),
        "tars": recipe.tars.policy,
        "check_sha256": recipe.tars.check_sha256,
        **recipe.limits.model_dump(mode="json", exclude={"formats"}),
        "formats": " ".join(recipe.limits.formats),
    }
