"""The stages of a worker between a tar's members and its parts: decode, batch by bucket, begin on the device."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, TypeVar

from precompute.encode.overlap import Later, Turns, map_in_order, threads
from precompute.encode.parts import Parts
from precompute.encode.provenance import DeviceClock
from precompute.encode.recipe import Decode, Recipe
from precompute.encode.samples import (
    About,
    Captions,
    Cut,
    Decoded,
    Rejected,
    Started,
    StartedBatch,
    with_latents,
)
from precompute.encode.towers import EncodedCaptions, Timer, Towers, batch_size_of
from precompute.input.captions import read_captions, read_scores, valid_text
from precompute.input.reject import Reject
from precompute.input.tars import RawSample, TarPolicy
from precompute.pixels.isolation import CLOCK_PER_PROCESSOR_SECOND, maybe_isolated
from shards.base.errors import DamagedInput
from shards.format.buckets import Bucket

Item = TypeVar("Item")
LOST = "lost_in_tar"
MAX_DETAIL, MAX_URL = 1000, 4096
"""Characters that a refusal keeps."""
MOST_TOGETHER = 8
"""Pictures that a thread decodes in a row."""
Decoding = Callable[[Iterable[RawSample]], Iterator[Decoded | Rejected]]


@contextmanager
def decoding(recipe: Recipe, fresh: list[Bucket], isolate: bool) -> Iterator[Decoding]:
    """Threads that decode samples, in their order, for those of the job's buckets that are `fresh`; where `isolate`, in
    child processes, which a picture may kill.

    Raises:
        Stuck: a picture was decoded in a thread and did not end. The process should.
    """
    longest = None if isolate else CLOCK_PER_PROCESSOR_SECOND * recipe.limits.decode_seconds
    wanted = [bucket for bucket in recipe.buckets.covering if bucket in fresh]
    worker = recipe.worker
    ahead = max(worker.batch_size, 4 * worker.decode_threads)
    together = min(MOST_TOGETHER, ahead // (4 * worker.decode_threads))
    with (
        maybe_isolated(recipe.decode, recipe.limits, isolate) as decode,
        threads(worker.decode_threads, longest) as pool,
    ):
        decode_one = partial(decode_sample, buckets=wanted, recipe=recipe, decode=decode)
        yield lambda samples: map_in_order(pool, decode_one, samples, ahead, longest, together)


def decode_sample(raw: RawSample, buckets: list[Bucket], recipe: Recipe, decode: Decode) -> Decoded | Rejected:
    """Clean the captions and decode the picture.

    Raises:
        DamagedInput: the picture is not the one that was downloaded.
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
            raise Reject("no_image", f"the tar holds no picture under the key {raw.key}")
        sha256 = hashlib.sha256(raw.image).hexdigest()
        if recipe.tars.check_sha256 and (raw.metadata.get("sha256") or sha256) != sha256:
            refuse_changed(raw, recipe.tars.policy)
        picture = decode(raw.image, buckets, recipe.pixels, recipe.limits, recipe.buckets.tables)
    except Reject as reject:
        # it may name a member, whose name may be any bytes, and many
        return Rejected(raw.key, url, Reject(reject.reason, valid_text(str(reject)[:MAX_DETAIL])))
    scores = read_scores(raw.metadata, encoding.scores)
    return Decoded(About(raw.key, url, scores, captions, picture.width, picture.height, sha256), picture)


def refuse_changed(raw: RawSample, policy: TarPolicy) -> NoReturn:
    """Reject a sample whose picture is not the one that was downloaded, or its whole tar."""
    if policy == "salvage":
        raise Reject(LOST, "the picture has not the sha256 of its JSON")
    raise DamagedInput(
        f"the picture of sample {raw.key} has not the sha256 of its JSON: the tar was damaged. Download this "
        f"tar again; or, where img2dataset encoded the pictures again, set tars.check_sha256 to false."
    )


def batched_by_bucket(
    samples: Iterable[Decoded], parts: Parts, batch_size: int
) -> Generator[tuple[Bucket, list[Cut]], None, None]:
    """Gather samples into one batch per bucket. Who shares a batch depends on the tar's order alone."""
    waiting: dict[Bucket, list[Cut]] = {bucket: [] for bucket in parts.writers}
    for sample in samples:
        pixels, corners = sample.picture.pixels, sample.picture.corners
        num_buckets = sum(bucket in pixels for bucket in waiting)
        for bucket, batch in waiting.items():
            if bucket not in pixels:
                parts.leave_out(sample, bucket)
                continue
            batch.append(Cut(sample.about, pixels[bucket], corners[bucket], num_buckets))
            if len(batch) == batch_size_of(bucket, batch_size):
                waiting[bucket] = []
                yield bucket, batch
    yield from ((bucket, batch) for bucket, batch in waiting.items() if batch)


def start_batches(
    batches: Generator[tuple[Bucket, list[Cut]], None, None], towers: Towers, clock: DeviceClock, turns: Turns
) -> Generator[StartedBatch, None, None]:
    """Hand each batch to the device and go on with the next; a batch comes out once all its captions are begun.

    Where towers run one by one, all pictures are encoded before any caption.
    """
    captions = CaptionsOnce(towers, clock)
    held: deque[tuple[StartedBatch, int]] = deque()
    before: Callable[[], object] = list

    def begun() -> Iterator[StartedBatch]:
        while held and held[0][1] <= captions.num_begun:
            yield held.popleft()[0]

    with turns.at_device(batches) as at_device:
        for bucket, cuts in at_device:
            asked = captions.start(cuts)
            latents = Later(listed(towers.start_pictures(bucket, [cut.pixels for cut in cuts], clock)))
            samples = [Started(cut.about, cut.corner, later) for cut, later in zip(cuts, asked, strict=True)]
            held.append((StartedBatch(bucket, samples, latents), captions.num_asked))
            if towers.one_by_one:  # a batch's pixels are held until it was waited for
                before()
                before = latents
            yield from begun()
        before()
        while captions.num_begun < captions.num_asked:
            yield from begun()
            captions.start_more()
    yield from begun()


def listed(items: Callable[[], Iterable[Item]]) -> Callable[[], list[Item]]:
    """The same function, that makes a list."""
    return lambda: list(items())


class CaptionToCome:
    """A caption's place in a batch that may still have to fill up."""

    wait: Callable[[], EncodedCaptions]
    """Is set when that batch is begun."""

    def __call__(self) -> EncodedCaptions:
        return self.wait()


class CaptionsOnce:
    """Has each sample's captions encoded once for all buckets, in full batches, in the order in which they first come.

    A batch of captions is begun when it is full: a bucket's batch brings as many as were not begun with another's.
    Where towers run one by one the batches are the same, and are begun when all captions were asked for.
    """

    def __init__(self, towers: Towers, clock: Timer):
        self.towers, self.clock = towers, clock
        self.begun: dict[str, tuple[Later[Captions], int]] = {}
        """Key → captions, and how many buckets' batches are still to come that need them."""
        self.waiting: deque[tuple[str, CaptionToCome]] = deque()
        self.rest: Iterator[list[Callable[[], EncodedCaptions]]] | None = None
        self.num_asked = 0
        """Captions that were asked for so far."""

    @property
    def num_begun(self) -> int:
        """Of those that were asked for, in their order."""
        return self.num_asked - len(self.waiting)

    def start(self, cuts: list[Cut]) -> list[Later[Captions]]:
        """Ask for every caption of a batch that was not asked for with another bucket's; begin with full batches."""
        for cut in cuts:
            if cut.about.key not in self.begun:
                own = [None if caption is None else self._ask(caption.text) for caption in cut.about.captions]
                self.begun[cut.about.key] = Later(partial(with_latents, cut.about.captions, own)), cut.num_buckets
        while not self.towers.one_by_one and len(self.waiting) >= self.towers.caption_batch:
            self.start_more()
        return [self._take(cut.about.key) for cut in cuts]

    def start_more(self) -> None:
        """Begin with the next batch of captions, which is not full where there are no more."""
        if self.rest is None or not self.towers.one_by_one:
            size, texts = self.towers.caption_batch, [text for text, _ in self.waiting]
            firsts = range(0, len(texts), size) if self.towers.one_by_one else range(1)
            self.rest = self.towers.start_captions([texts[first : first + size] for first in firsts], self.clock)
        for wait in next(self.rest):
            self.waiting.popleft()[1].wait = wait

    def _ask(self, text: str) -> CaptionToCome:
        to_come = CaptionToCome()
        self.waiting.append((text, to_come))
        self.num_asked += 1
        return to_come

    def _take(self, key: str) -> Later[Captions]:
        captions, left = self.begun.pop(key)
        if left > 1:
            self.begun[key] = captions, left - 1
        return captions
