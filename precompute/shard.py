"""The whole of stage 1 for one input shard, top to bottom."""

import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from precompute.captions import clean_caption, read_scores
from precompute.config import PrecomputeConfig
from precompute.encoders import EncodedCaption, ImageEncoder, TextEncoder
from precompute.pipeline import in_background, map_in_order
from precompute.pixels import Picture, Reject, decode
from precompute.tars import InputShard, RawSample, Tar, check_count, expected_samples, local_copy
from shards.buckets import Bucket
from shards.commit import Attempt, attempt_folder, commit
from shards.encoding import EncodingRecord
from shards.receipts import Receipt, load_receipt
from shards.root import UNCOND_NAME, write_uncond
from shards.tables import TOO_SMALL
from shards.writing import PartWriter, Sample

PIXELS_PER_BATCH_ITEM = 512 * 512
SOFTWARE = ("diffusers", "mosaicml-streaming", "numpy", "pillow", "torch", "transformers")


@dataclass
class Decoded:
    """A sample between decoding and encoding: a caption and pixels for each bucket, or why it is rejected."""

    key: str
    url: str
    scores: np.ndarray
    content: tuple[str, Picture] | Reject
    text: Callable[[], EncodedCaption] | None = None
    """Waits for the text latents, once they were begun."""


@dataclass(frozen=True)
class StartedBatch:
    """Samples of one bucket on the device."""

    bucket: Bucket
    samples: list[Decoded]
    image_latents: Callable[[], Tensor]
    """Waits for them."""


class Parts:
    """The parts that are being written, one per bucket, and how many samples have come in."""

    def __init__(self, writers: dict[Bucket, PartWriter]):
        self.writers = writers
        self.samples_in = 0

    def refuse(self, sample: Decoded, reject: Reject, buckets: Iterable[Bucket]) -> None:
        """Record that `buckets` do not hold the sample."""
        for bucket in buckets:
            self.writers[bucket].refuse(sample.key, sample.url, reject.reason, str(reject))


def encode_shard(
    shard: InputShard,
    config: PrecomputeConfig,
    encoding: EncodingRecord,
    image_encoder: ImageEncoder,
    text_encoder: TextEncoder,
    attempt_number: int = 1,
) -> Receipt:
    """Encode one tar into every configured bucket that its receipt does not have yet, and commit it.

    Returns:
        The receipt in force afterwards; the one that was there where there was nothing to do.

    Raises:
        WorkError: the tar is damaged, or its samples are not those that img2dataset counted.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    root, committed = config.output, load_receipt(config.output, shard.name)
    buckets = [bucket for bucket in config.bucket_list if committed is None or str(bucket) not in committed.parts]
    if committed is not None and not buckets:
        return committed
    if not (root / UNCOND_NAME).exists():
        empty = text_encoder([""], config.workers.batch_size)[0]
        write_uncond(root, empty.latents, empty.num_tokens)

    with (
        local_copy(shard.address, ".tar") as path,
        attempt_folder(root, shard.name) as folder,
        ThreadPoolExecutor(config.workers.decode_threads) as pool,
    ):
        tar = Tar(path, config.limits.max_bytes)
        check_count(shard, tar.count(), expected_samples(shard))
        source = pool.submit(tar.record, shard.address)  # its SHA-256, while the first pictures are decoded
        parts = Parts({bucket: PartWriter(folder / str(bucket), encoding, bucket) for bucket in buckets})

        # tar members => raw samples => pixels, in the tar's order, running ahead of the encoders
        decode_one = partial(decode_sample, buckets=buckets, config=config)
        ahead = max(config.workers.batch_size, 4 * config.workers.decode_threads)
        accepted = drop_rejects(map_in_order(pool, decode_one, tar.samples(), ahead), parts)
        batches = in_background(batched_by_bucket(accepted, parts, config.workers.batch_size), ahead=1)
        # pixels => latents, begun on the device while the batch before is being written
        on_device = start_batches(batches, image_encoder, text_encoder, config.workers.batch_size)
        # latents => parts
        with closing(in_background(on_device, ahead=1)) as encoded:
            for batch in encoded:
                for sample, image_latents in zip(batch.samples, batch.image_latents(), strict=True):
                    write_sample(sample, batch.bucket, image_latents, parts)

        # parts => committed
        attempt = Attempt(
            shard=shard.name,
            folder=folder,
            encoding=encoding,
            samples_in=parts.samples_in,
            counts={str(bucket): writer.finish() for bucket, writer in parts.writers.items()},
            records={str(bucket): writer.records for bucket, writer in parts.writers.items()},
            source=source.result(),
            software={name: version(name) for name in SOFTWARE},
            settings=settings_of(config),
            number=attempt_number,
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 3),
        )
        return commit(root, attempt)


def warm_up() -> None:
    """What a process does once: done now, the device does not wait for it at the end of the first shard."""
    pa.array([None])  # pyarrow's first array loads pandas, where that is installed


def settings_of(config: PrecomputeConfig) -> dict[str, str | int | float | bool]:
    """What a receipt says of the run besides the encoding and the software."""
    device = torch.cuda.get_device_name() if config.workers.num_gpus else f"CPU ({platform.machine()})"
    workers = config.workers
    return {
        "device": device,
        "batch_size": workers.batch_size,
        "compile": workers.compile,
        **config.limits.model_dump(mode="json"),
    }


def decode_sample(raw: RawSample, buckets: list[Bucket], config: PrecomputeConfig) -> Decoded:
    """Clean the caption and decode the picture; a sample that fails carries its `Reject`."""
    content: tuple[str, Picture] | Reject
    try:
        if raw.oversized:
            raise Reject("too_many_bytes", raw.oversized)
        caption = clean_caption(raw.caption)
        if raw.image is None:
            raise Reject("no_image", "the tar holds no picture under this key")
        content = caption, decode(raw.image, buckets, config.pixels, config.limits)
    except Reject as reject:
        content = reject
    return Decoded(raw.key, str(raw.metadata.get("url") or ""), read_scores(raw.metadata), content)


def content(sample: Decoded) -> tuple[str, Picture]:
    """Caption and picture of a sample that is no reject."""
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
                parts.refuse(sample, Reject(TOO_SMALL, f"{picture.width}x{picture.height}"), [bucket])
                continue
            batch.append(sample)
            if len(batch) == batch_size_of(bucket, batch_size):
                waiting[bucket] = []
                yield bucket, batch
    yield from ((bucket, batch) for bucket, batch in waiting.items() if batch)


def batch_size_of(bucket: Bucket, batch_size: int) -> int:
    """`batch_size` holds up to 512x512; a larger bucket's batch has as many pixels."""
    return max(1, batch_size * PIXELS_PER_BATCH_ITEM // max(PIXELS_PER_BATCH_ITEM, bucket.width * bucket.height))


def start_batches(
    batches: Generator[tuple[Bucket, list[Decoded]], None, None],
    image_encoder: ImageEncoder,
    text_encoder: TextEncoder,
    batch_size: int,
) -> Iterator[StartedBatch]:
    """Hand each batch to the device and go on with the next."""
    with closing(batches):
        for bucket, samples in batches:
            start_captions(samples, text_encoder, batch_size)
            pictures = [picture.pixels[bucket] for _, picture in map(content, samples)]
            latents = image_encoder.start(pictures, batch_size_of(bucket, batch_size))
            yield StartedBatch(bucket, samples, latents)


def start_captions(samples: list[Decoded], text_encoder: TextEncoder, batch_size: int) -> None:
    """Begin with the captions; one that another bucket's batch has begun is not encoded again."""
    fresh = [sample for sample in samples if sample.text is None]
    if fresh:
        encoded = cache(text_encoder.start([content(sample)[0] for sample in fresh], batch_size))
        for i, sample in enumerate(fresh):
            sample.text = lambda i=i: encoded()[i]


def write_sample(sample: Decoded, bucket: Bucket, image_latents: Tensor, parts: Parts) -> None:
    """Append one sample to its part, or refuse it as `non_finite`: its latents overflow float16, in float32 too."""
    assert sample.text is not None  # its batch was started
    text = sample.text()
    if not (all_finite(image_latents) and all_finite(text.latents)):
        parts.refuse(sample, Reject("non_finite", "encoded in float32 too"), [bucket])
        return
    caption, picture = content(sample)
    size = (picture.width, picture.height, *picture.corners[bucket])
    stored = (text.latents, text.num_tokens, text.truncated)
    parts.writers[bucket].write(Sample(sample.key, caption, image_latents, *stored, size, sample.scores))


def all_finite(latents: Tensor) -> bool:
    """Whether float16 latents hold neither infinities nor NaN: these alone have an exponent of all ones."""
    magnitudes = latents.numpy().view(np.uint16) & 0x7FFF
    return bool(magnitudes.max() < 0x7C00)
