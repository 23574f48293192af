"""The stages of a worker between a tar's members and its parts: decoding samples, batching them by bucket, and starting
the batches on the device."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from precompute.encode.overlap import Turns, map_in_order, threads
from precompute.encode.parts import Parts
from precompute.encode.recipe import Decode, Recipe
from precompute.encode.samples import (
    CaptionTask,
    CroppedSample,
    DecodedSample,
    PixelBatch,
    Rejected,
    SampleInfo,
    StartedBatch,
    set_started,
)
from precompute.encode.towers import DeviceClock, Towers, batch_size_of
from precompute.input.captions import read_captions, read_license, read_scores, valid_text
from precompute.input.reject import Reject
from precompute.input.unit import RawSample
from precompute.pixels.blur import boxes_of
from precompute.pixels.isolation import CLOCK_PER_PROCESSOR_SECOND, Isolated
from shards.base.errors import DamagedInput

LOST = "lost_in_tar"
MAX_DETAIL, MAX_URL = 1000, 4096
"""Maximum number of characters stored for a refused sample's detail and for its URL."""
MAX_DECODED_IN_A_ROW = 8
"""Maximum number of images that a thread decodes in one call."""
Decoding = Callable[[Iterable[RawSample]], Iterator[DecodedSample | Rejected]]


@contextmanager
def decoding(recipe: Recipe, isolate: bool) -> Iterator[Decoding]:
    """Provide a function that decodes samples, and yields the results in order. Images are decoded in threads or, with
    `isolate`, in child processes.

    Images are decoded for all buckets of the job, even those that are committed already, because the size at which a
    JPEG is decoded depends on its buckets.

    Raises Stuck if decoding an image in a thread does not end; the process should then exit.
    """
    longest = None if isolate else CLOCK_PER_PROCESSOR_SECOND * recipe.limits.decode_seconds
    worker = recipe.worker
    ahead = max(worker.batch_size, 4 * worker.decode_threads)
    in_a_row = min(MAX_DECODED_IN_A_ROW, ahead // (4 * worker.decode_threads))
    with (
        Isolated(recipe.decode, recipe.limits) if isolate else nullcontext(recipe.decode) as decode,
        threads(worker.decode_threads, longest) as pool,
    ):
        decode_one = partial(decode_sample, recipe=recipe, decode=decode)
        yield lambda samples: map_in_order(pool, decode_one, samples, ahead, longest, in_a_row)


def decode_sample(raw: RawSample, recipe: Recipe, decode: Decode) -> DecodedSample | Rejected:
    """Clean the captions of a sample and decode its image, or reject the sample. Raises DamagedInput if the image
    differs from the one that was downloaded, unless the policy is `salvage`."""
    url = valid_text(str(raw.metadata.get("url") or "")[:MAX_URL])
    encoding = recipe.encoding
    try:
        if raw.lost:
            raise Reject(LOST, raw.lost)
        if raw.oversized:
            raise Reject("too_many_bytes", raw.oversized)
        clean = read_captions(raw, encoding.captions, encoding.max_characters)
        if raw.image is None:
            raise Reject("no_image", f"the input has no image for the key {raw.key}")
        sha256 = hashlib.sha256(raw.image).hexdigest()
        if recipe.tars.check_sha256 and str(raw.metadata.get("sha256") or sha256).lower() != sha256:
            if recipe.tars.policy == "salvage":
                raise Reject(LOST, "the image does not match the sha256 in its JSON")
            raise DamagedInput(
                f"The image of sample {raw.key} does not match the sha256 that its JSON records, so the tar is "
                f"damaged. Download the tar again. If img2dataset re-encoded the images, set tars.check_sha256 to "
                f"false."
            )
        arguments = (raw.image, recipe.buckets.covering, recipe.pixels, recipe.limits, recipe.buckets.tables)
        boxes = boxes_of(raw.metadata, recipe.pixels.blur_boxes)
        picture = decode(*arguments, boxes) if boxes else decode(*arguments)
    except Reject as reject:
        # the detail may quote many member names, which may contain arbitrary bytes
        return Rejected(raw.key, url, Reject(reject.reason, valid_text(str(reject)[:MAX_DETAIL])))
    scores = read_scores(raw, encoding.scores)
    captions = [None if caption is None else CaptionTask(caption) for caption in clean]
    info = SampleInfo(raw.key, url, scores, captions, picture.width, picture.height, sha256, read_license(raw.metadata))
    return DecodedSample(info, picture)


def batched_by_bucket(
    samples: Iterable[DecodedSample], parts: Parts, batch_size: int
) -> Generator[PixelBatch, None, None]:
    """Collect samples into batches, each for one bucket, and yield the batches as they fill up. Which samples share a
    batch depends only on their order in the tar."""
    waiting = {bucket: PixelBatch(bucket) for bucket in parts.writers}
    for sample in samples:
        pixels, corners = sample.picture.pixels, sample.picture.corners
        for bucket in parts.writers:
            if bucket not in pixels:
                parts.leave_out(sample, bucket)
                continue
            batch = waiting[bucket]
            batch.samples.append(CroppedSample(sample.info, corners[bucket]))
            batch.pixels.append(pixels[bucket])
            if len(batch.samples) == batch_size_of(bucket, batch_size):
                waiting[bucket] = PixelBatch(bucket)
                yield batch
    yield from (batch for batch in waiting.values() if batch.samples)


def start_batches(
    batches: Generator[PixelBatch, None, None], towers: Towers, clock: DeviceClock, turns: Turns
) -> Generator[StartedBatch, None, None]:
    """Submit batches of images to the device, and yield them in order, each as soon as all of its captions have been
    started too.

    Captions form separate batches, shared by all buckets. A batch of captions is started as soon as it is full or, if
    towers run one by one, after all images, so that each tower is moved to the device only once per tar.
    """
    captions: list[CaptionTask] = []
    held: deque[StartedBatch] = deque()
    size = towers.caption_batch
    with turns.at_device(batches) as at_device:
        for batch in at_device:
            captions += take_captions(batch.samples)
            while len(captions) >= size and not towers.one_by_one:
                group, captions = captions[:size], captions[size:]
                set_started(group, towers.start_captions([task.caption.text for task in group], clock))
            latents = towers.start_pictures(batch.bucket, batch.pixels, clock)
            if held and towers.one_by_one:  # now that this batch has been started, release the previous one's pixels
                held[-1].finish_pictures()
            held.append(StartedBatch(batch.bucket, batch.samples, latents))
            yield from ready(held)
        if held and towers.one_by_one:
            held[-1].finish_pictures()
        groups = [captions[first : first + size] for first in range(0, len(captions), size)]
        texts = [[task.caption.text for task in group] for group in groups]
        for group, wait in zip(groups, towers.start_groups(texts, clock), strict=True):
            # their captions are in earlier groups, and the device already works on the next group
            yield from ready(held)
            set_started(group, wait)
    # all work of this tar is queued on the device, so the next tar may use the device
    yield from held


def ready(held: deque[StartedBatch]) -> Iterator[StartedBatch]:
    """Remove and yield the batches at the front of `held` whose captions have all been started."""
    while held and held[0].is_ready:
        yield held.popleft()


def take_captions(samples: Iterable[CroppedSample]) -> Iterator[CaptionTask]:
    """Yield the captions of `samples` that were not yet queued for another bucket, and mark them as queued."""
    for sample in samples:
        for task in sample.info.captions:
            if task is not None and not task.is_queued:
                task.is_queued = True
                yield task
