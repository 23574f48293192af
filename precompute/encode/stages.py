"""The stages of a worker between a tar's members and its parts: decode, batch by bucket, start on the device."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from precompute.encode.overlap import Turns, map_in_order, threads
from precompute.encode.parts import Parts
from precompute.encode.provenance import DeviceClock
from precompute.encode.recipe import Decode, Recipe
from precompute.encode.samples import (
    CaptionTask,
    CroppedSample,
    DecodedSample,
    PixelBatch,
    Rejected,
    SampleInfo,
    StartedBatch,
)
from precompute.encode.towers import Timer, Towers, WaitForCaptions, batch_size_of
from precompute.input.captions import read_captions, read_scores, valid_text
from precompute.input.reject import Reject
from precompute.input.tars import RawSample, TarPolicy
from precompute.pixels.isolation import CLOCK_PER_PROCESSOR_SECOND, maybe_isolated
from shards.base.errors import DamagedInput
from shards.format.buckets import Bucket

LOST = "lost_in_tar"
MAX_DETAIL, MAX_URL = 1000, 4096
"""Maximum length of a refusal's stored detail and URL, in characters."""
MAX_DECODED_IN_A_ROW = 8
"""Maximum number of images that a thread decodes before it reports results."""
Decoding = Callable[[Iterable[RawSample]], Iterator[DecodedSample | Rejected]]


@contextmanager
def decoding(recipe: Recipe, fresh: list[Bucket], isolate: bool) -> Iterator[Decoding]:
    """Provide a function that decodes samples in threads, in order, for the job's `fresh` buckets.

    With `isolate`, images are decoded in child processes, because an image may crash its decoder.

    Raises:
        Stuck: decoding an image in a thread did not end. The process should exit.
    """
    longest = None if isolate else CLOCK_PER_PROCESSOR_SECOND * recipe.limits.decode_seconds
    wanted = [bucket for bucket in recipe.buckets.covering if bucket in fresh]
    worker = recipe.worker
    ahead = max(worker.batch_size, 4 * worker.decode_threads)
    in_a_row = min(MAX_DECODED_IN_A_ROW, ahead // (4 * worker.decode_threads))
    with (
        maybe_isolated(recipe.decode, recipe.limits, isolate) as decode,
        threads(worker.decode_threads, longest) as pool,
    ):
        decode_one = partial(decode_sample, buckets=wanted, recipe=recipe, decode=decode)
        yield lambda samples: map_in_order(pool, decode_one, samples, ahead, longest, in_a_row)


def decode_sample(raw: RawSample, buckets: list[Bucket], recipe: Recipe, decode: Decode) -> DecodedSample | Rejected:
    """Clean the captions and decode the image.

    Raises:
        DamagedInput: the image differs from the one that was downloaded.
    """
    url = valid_text(str(raw.metadata.get("url") or "")[:MAX_URL])
    encoding = recipe.encoding
    try:
        if raw.lost:
            raise Reject(LOST, raw.lost)
        if raw.oversized:
            raise Reject("too_many_bytes", raw.oversized)
        captions = read_captions(raw, encoding.captions, encoding.max_characters)
        if raw.image is None:
            raise Reject("no_image", f"the tar holds no image under the key {raw.key}")
        sha256 = hashlib.sha256(raw.image).hexdigest()
        if recipe.tars.check_sha256 and (raw.metadata.get("sha256") or sha256) != sha256:
            refuse_changed(raw, recipe.tars.policy)
        picture = decode(raw.image, buckets, recipe.pixels, recipe.limits, recipe.buckets.tables)
    except Reject as reject:
        # the detail may quote many member names, which may contain arbitrary bytes
        return Rejected(raw.key, url, Reject(reject.reason, valid_text(str(reject)[:MAX_DETAIL])))
    scores = read_scores(raw.metadata, encoding.scores)
    return DecodedSample(SampleInfo(raw.key, url, scores, captions, picture.width, picture.height, sha256), picture)


def refuse_changed(raw: RawSample, policy: TarPolicy) -> NoReturn:
    """Reject a sample whose image differs from the one that was downloaded or, depending on `policy`, its whole tar."""
    if policy == "salvage":
        raise Reject(LOST, "the image does not match the sha256 in its JSON")
    raise DamagedInput(
        f"The image of sample {raw.key} does not match the sha256 that its JSON records, so the tar is damaged. "
        f"Download the tar again. If img2dataset re-encoded the images, set tars.check_sha256 to false."
    )


def batched_by_bucket(
    samples: Iterable[DecodedSample], parts: Parts, batch_size: int
) -> Generator[PixelBatch, None, None]:
    """Collect samples into one batch per bucket. Which samples share a batch depends only on the order of the tar."""
    waiting = {bucket: PixelBatch(bucket) for bucket in parts.writers}
    for sample in samples:
        pixels, corners = sample.picture.pixels, sample.picture.corners
        captions = [None if caption is None else CaptionTask(caption) for caption in sample.info.captions]
        for bucket in parts.writers:
            if bucket not in pixels:
                parts.leave_out(sample, bucket)
                continue
            batch = waiting[bucket]
            batch.samples.append(CroppedSample(sample.info, captions, corners[bucket]))
            batch.pixels.append(pixels[bucket])
            if len(batch.samples) == batch_size_of(bucket, batch_size):
                waiting[bucket] = PixelBatch(bucket)
                yield batch
    yield from (batch for batch in waiting.values() if batch.samples)


def start_batches(
    batches: Generator[PixelBatch, None, None], towers: Towers, clock: DeviceClock, turns: Turns
) -> Generator[StartedBatch, None, None]:
    """Submit batches to the device, and yield each batch, in order, once all of its captions have been started too."""
    start = start_tower_by_tower if towers.one_by_one else start_side_by_side
    held: deque[StartedBatch] = deque()
    with turns.at_device(batches) as at_device:
        yield from start(at_device, towers, clock, held)
    # all work of this tar is queued on the device, so the next tar may use it
    yield from held


def start_side_by_side(
    batches: Iterable[PixelBatch], towers: Towers, clock: Timer, held: deque[StartedBatch]
) -> Iterator[StartedBatch]:
    """Start images and captions side by side: images in the batches of their bucket, captions of all buckets in
    separate batches, each as soon as it is full.

    `held` contains the batches that wait for captions. When the iterator ends, all captions of the batches left in
    `held` have been started.
    """
    captions = CaptionBatcher(towers.caption_batch)
    for batch in batches:
        captions.add(batch.samples)
        finish_captions = [start_captions(group, towers, clock) for group in captions.full_batches()]
        latents = towers.start_pictures(batch.bucket, batch.pixels, clock)
        held.append(StartedBatch(batch.bucket, batch.samples, latents))
        held[0].finish_captions += finish_captions
        yield from ready(held)
    for group in captions.remaining_batches():
        held[0].finish_captions.append(start_captions(group, towers, clock))


def start_tower_by_tower(
    batches: Iterable[PixelBatch], towers: Towers, clock: Timer, held: deque[StartedBatch]
) -> Iterator[StartedBatch]:
    """Encode all images first, then all captions with each text tower in turn, so that each tower is moved to the
    device once per tar. Batches and `held` are the same as in `start_side_by_side`.
    """
    captions = CaptionBatcher(towers.caption_batch)
    for batch in batches:
        captions.add(batch.samples)
        latents = towers.start_pictures(batch.bucket, batch.pixels, clock)
        if held:  # now that the next batch has been started, wait for the previous one, which releases its pixels
            held[-1].finish_pictures()
        held.append(StartedBatch(batch.bucket, batch.samples, latents))
    if held:
        held[-1].finish_pictures()
    groups = list(captions.remaining_batches())
    texts = [[task.caption.text for task in group] for group in groups]
    for group, wait in zip(groups, towers.start_tower_by_tower(texts, clock), strict=True):
        yield from ready(held)
        held[0].finish_captions.append(mark_started(group, wait))


def ready(held: deque[StartedBatch]) -> Iterator[StartedBatch]:
    """Take the leading batches whose captions have all been started."""
    while held and held[0].is_ready:
        yield held.popleft()


class CaptionBatcher:
    """Collects captions into batches in the order in which samples first need them, once for all buckets."""

    def __init__(self, size: int):
        self.size = size
        self.waiting: deque[CaptionTask] = deque()

    def add(self, samples: Iterable[CroppedSample]) -> None:
        """Queue those captions of `samples` that no other bucket's batch has queued yet."""
        for sample in samples:
            for task in sample.captions:
                if task is not None and not task.is_queued:
                    task.is_queued = True
                    self.waiting.append(task)

    def full_batches(self) -> Iterator[list[CaptionTask]]:
        """Take all full batches."""
        while len(self.waiting) >= self.size:
            yield self._take()

    def remaining_batches(self) -> Iterator[list[CaptionTask]]:
        """Take all captions; the last batch may be smaller."""
        while self.waiting:
            yield self._take()

    def _take(self) -> list[CaptionTask]:
        return [self.waiting.popleft() for _ in range(min(self.size, len(self.waiting)))]


def start_captions(tasks: list[CaptionTask], towers: Towers, clock: Timer) -> Callable[[], None]:
    """Start encoding captions; the returned function waits for them and sets their results."""
    return mark_started(tasks, towers.start_captions([task.caption.text for task in tasks], clock))


def mark_started(tasks: list[CaptionTask], wait: WaitForCaptions) -> Callable[[], None]:
    """Mark captions as started; the returned function waits for them and sets their results."""
    for task in tasks:
        task.encoded.set_running_or_notify_cancel()

    def finish() -> None:
        for task, encoded in zip(tasks, wait(), strict=True):
            task.finish(encoded)

    return finish
