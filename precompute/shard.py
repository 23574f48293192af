"""The whole of stage 1 for one input shard, top to bottom."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import NoReturn

import numpy as np
from torch import Tensor

from precompute.captions import CleanCaption, read_captions, read_scores, valid_text
from precompute.config import PrecomputeConfig
from precompute.encoders import EncodedCaption, ImageEncoder, TextEncoder
from precompute.isolation import CLOCK_PER_PROCESSOR_SECOND, maybe_isolated
from precompute.pipeline import in_background, map_in_order, threads
from precompute.pixels import Picture, Reject, decode
from precompute.tars import InputShard, RawSample, Tar, TarPolicy, counted_samples, is_as_served, local_copy
from shards.buckets import AspectTable, Bucket
from shards.commit import Attempt, attempt_folder, commit
from shards.encoding import EncodingRecord
from shards.errors import DamagedInput
from shards.receipts import Receipt, load_receipt
from shards.root import has_uncond, write_uncond
from shards.tables import TOO_SMALL
from shards.writing import Caption, PartWriter, Sample

Decode = Callable[..., Picture]
"""`pixels.decode`, or what stands in for it."""
LOST = "lost_in_tar"
PIXELS_PER_BATCH_ITEM = 512 * 512
SOFTWARE = ("diffusers", "mosaicml-streaming", "numpy", "pillow", "torch", "transformers")


@dataclass
class Decoded:
    """A sample between decoding and encoding: captions and pixels for each bucket, or why it is rejected."""

    key: str
    url: str
    scores: np.ndarray
    content: tuple[list[CleanCaption | None], Picture] | Reject
    encoded: list[Caption | None] | None = None
    """The captions' text latents, once some bucket's batch has had them encoded."""


class Parts:
    """The parts that are being written, one per bucket, and how many samples have come in."""

    def __init__(self, writers: dict[Bucket, PartWriter], config: PrecomputeConfig):
        self.writers = writers
        self.samples_in = 0
        # those of the tables' buckets that hold only the pictures nearest to them
        self.aspects: dict[Bucket, AspectTable] = {
            bucket: table for table in config.aspect.tables for bucket in table.buckets if bucket not in config.covering
        }

    def refuse(self, sample: Decoded, reject: Reject, buckets: Iterable[Bucket]) -> None:
        """Record that `buckets` do not hold the sample."""
        for bucket in buckets:
            self.writers[bucket].refuse(sample.key, sample.url, reject.reason, str(reject))

    def leave_out(self, sample: Decoded, picture: Picture, bucket: Bucket) -> None:
        """Record that `bucket` does not get a sound picture: it is too small, or its ratio is another bucket's."""
        table = self.aspects.get(bucket)
        if table and table.nearest(picture.width, picture.height):
            self.writers[bucket].pass_over()
        else:
            self.refuse(sample, Reject(TOO_SMALL, f"{picture.width}x{picture.height}"), [bucket])


def encode_shard(
    shard: InputShard,
    config: PrecomputeConfig,
    encoding: EncodingRecord,
    image_encoder: ImageEncoder,
    text_encoder: TextEncoder,
    attempt_number: int = 1,
    report: Callable[[int], None] = lambda samples_in: None,
    decode: Decode = decode,
) -> Receipt:
    """Encode one tar into every configured bucket that its receipt does not have yet, and commit it.

    `report` hears after each batch how many samples have been taken in. From attempt `workers.isolate_from` on,
    `decode` runs in child processes.

    Returns:
        The receipt in force afterwards; the one that was there where there was nothing to do.

    Raises:
        DamagedInput: the tar is damaged, or its samples are not those that img2dataset counted.
        Stuck: a picture was decoded in a thread and did not end. The process should.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    root, committed = config.output, load_receipt(config.output, shard.name)
    buckets = [bucket for bucket in config.bucket_list if committed is None or str(bucket) not in committed.parts]
    if committed is not None and not buckets:
        return committed
    if not has_uncond(root):
        empty = text_encoder([""], config.workers.batch_size)[0]
        write_uncond(root, empty.latents, empty.num_tokens)

    isolate = attempt_number >= config.workers.isolate_from
    with (
        local_copy(shard.address, ".tar") as path,
        attempt_folder(root, shard.name, config.workers.scratch) as folder,
        maybe_isolated(decode, config.limits, isolate) as decode_picture,
        threads(config.workers.decode_threads) as pool,
    ):
        tar = Tar(path, config.limits.max_bytes, config.tars.policy)
        tar.check(shard, counted_samples(shard))
        writers = {bucket: PartWriter(folder / str(bucket), encoding, bucket) for bucket in buckets}
        parts = Parts(writers, config)

        # tar members => raw samples => pixels, in the tar's order, running ahead of the encoders
        wanted = [bucket for bucket in config.covering if bucket in buckets]
        decode_one = partial(decode_sample, buckets=wanted, config=config, decode=decode_picture)
        longest = None if isolate else CLOCK_PER_PROCESSOR_SECOND * config.limits.decode_seconds
        decoded = map_in_order(pool, decode_one, tar.samples(), 4 * config.workers.decode_threads, longest)
        accepted = drop_rejects(in_background(decoded, ahead=config.workers.batch_size), parts)
        # pixels => latents => parts
        for bucket, samples in batched_by_bucket(accepted, parts, config.workers.batch_size):
            encode_captions(samples, text_encoder, config.workers.batch_size)
            # taken out, so that samples that wait for another bucket's batch do not hold this one's
            pictures = [picture.pixels.pop(bucket) for _, picture in map(content, samples)]
            latents = image_encoder(pictures, batch_size_of(bucket, config.workers.batch_size))
            for sample, image_latents in zip(samples, latents, strict=True):
                write_sample(sample, bucket, image_latents, parts)
            report(parts.samples_in)

        # parts => committed
        attempt = Attempt(
            shard=shard.name,
            folder=folder,
            encoding=encoding,
            samples_in=parts.samples_in,
            counts={str(bucket): writer.finish() for bucket, writer in parts.writers.items()},
            rules={str(bucket): rule for bucket, rule in config.rules.items()},
            source=tar.record(shard.address),
            software={name: version(name) for name in SOFTWARE},
            number=attempt_number,
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 3),
        )
        return commit(root, attempt)


def decode_sample(raw: RawSample, buckets: list[Bucket], config: PrecomputeConfig, decode: Decode) -> Decoded:
    """Clean the captions and decode the picture; a sample that fails carries its `Reject`.

    Raises:
        DamagedInput: the picture is not the one that was downloaded.
    """
    content: tuple[list[CleanCaption | None], Picture] | Reject
    try:
        if raw.lost:
            raise Reject(LOST, raw.lost)
        if raw.oversized:
            raise Reject("too_many_bytes", raw.oversized)
        captions = read_captions(raw, config.captions, config.limits.max_caption_characters)
        if raw.image is None:
            raise Reject("no_image", "the tar holds no picture under this key")
        if config.tars.check_sha256 and not is_as_served(raw):
            refuse_changed(raw, config.tars.policy)
        content = captions, decode(raw.image, buckets, config.pixels, config.limits, config.aspect.tables)
    except Reject as reject:
        content = reject
    return Decoded(raw.key, valid_text(str(raw.metadata.get("url") or "")), read_scores(raw.metadata), content)


def refuse_changed(raw: RawSample, policy: TarPolicy) -> NoReturn:
    """Reject a sample whose picture is not the one that was downloaded, or its whole tar."""
    if policy == "salvage":
        raise Reject(LOST, "the picture has not the sha256 of its JSON")
    raise DamagedInput(
        f"the picture of sample {raw.key} has not the sha256 of its JSON: the tar was damaged. Download this "
        f"shard again; or, where img2dataset encoded the pictures again, set tars.check_sha256 to false."
    )


def content(sample: Decoded) -> tuple[list[CleanCaption | None], Picture]:
    """Captions and picture of a sample that is no reject."""
    assert not isinstance(sample.content, Reject)
    return sample.content


def drop_rejects(samples: Iterable[Decoded], parts: Parts) -> Iterator[Decoded]:
    """Count every sample; pass on those with a picture."""
    for sample in samples:
        parts.samples_in += 1
        if isinstance(sample.content, Reject):
            parts.refuse(sample, sample.content, parts.writers)
        else:
            yield sample


def batched_by_bucket(
    samples: Iterable[Decoded], parts: Parts, batch_size: int
) -> Iterator[tuple[Bucket, list[Decoded]]]:
    """Gather samples into one batch per bucket. Who shares a batch depends on the tar's order alone."""
    waiting: dict[Bucket, list[Decoded]] = {bucket: [] for bucket in parts.writers}
    for sample in samples:
        _, picture = content(sample)
        for bucket, batch in waiting.items():
            if bucket not in picture.pixels:
                parts.leave_out(sample, picture, bucket)
                continue
            batch.append(sample)
            if len(batch) == batch_size_of(bucket, batch_size):
                waiting[bucket] = []
                yield bucket, batch
    yield from ((bucket, batch) for bucket, batch in waiting.items() if batch)


def batch_size_of(bucket: Bucket, batch_size: int) -> int:
    """`batch_size` holds up to 512x512; a larger bucket's batch has as many pixels."""
    return max(1, batch_size * PIXELS_PER_BATCH_ITEM // max(PIXELS_PER_BATCH_ITEM, bucket.width * bucket.height))


def encode_captions(samples: list[Decoded], text_encoder: TextEncoder, batch_size: int) -> None:
    """Encode every caption of `samples`; what another bucket's batch has had encoded is not encoded again."""
    fresh = [sample for sample in samples if sample.encoded is None]
    waiting = [caption for sample in fresh for caption in content(sample)[0] if caption is not None]
    encoded: list[EncodedCaption] = []
    for start in range(0, len(waiting), batch_size):
        encoded += text_encoder([caption.text for caption in waiting[start : start + batch_size]], batch_size)
    in_turn = iter(encoded)
    for sample in fresh:
        captions, _ = content(sample)
        sample.encoded = [stored_caption(caption, next(in_turn)) if caption else None for caption in captions]


def stored_caption(caption: CleanCaption, encoded: EncodedCaption) -> Caption:
    """A clean caption with its text latents."""
    cut = {"truncated"} if encoded.truncated else set()
    return Caption(caption.text, encoded.latents, encoded.num_tokens, caption.mended | cut)


def write_sample(sample: Decoded, bucket: Bucket, image_latents: Tensor, parts: Parts) -> None:
    """Append one sample to its part, or refuse it as `non_finite`: its latents overflow float16, in float32 too."""
    assert sample.encoded is not None
    texts = [caption.latents for caption in sample.encoded if caption is not None]
    if not all(latents.half().isfinite().all() for latents in (image_latents, *texts)):
        parts.refuse(sample, Reject("non_finite", "encoded in float32 too"), [bucket])
        return
    _, picture = content(sample)
    size = (picture.width, picture.height, *picture.corners[bucket])
    parts.writers[bucket].write(Sample(sample.key, sample.encoded, image_latents, size, sample.scores))
