"""The whole of stage 1 for one input shard, top to bottom."""

import atexit
import ctypes
import gc
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from itertools import count
from typing import NoReturn

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from precompute.config import PrecomputeConfig
from precompute.encode.encoders import EncodedCaption, ImageEncoder, TextEncoder
from precompute.encode.overlap import in_background, map_in_order, threads
from precompute.input.captions import CleanCaption, read_captions, read_scores, valid_text
from precompute.input.reject import Reject
from precompute.input.tars import InputShard, RawSample, Tar, TarPolicy, counted_samples, is_as_served, local_copy
from precompute.pixels.decode import Picture, decode
from precompute.pixels.isolation import CLOCK_PER_PROCESSOR_SECOND, maybe_isolated
from shards.base.errors import DamagedInput
from shards.format.buckets import AspectTable, Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt, load_receipt
from shards.format.tables import TOO_SMALL
from shards.open import open_store
from shards.root.commit import Attempt, attempt_folder, commit
from shards.root.shared import has_uncond, write_uncond
from shards.root.writing import Caption, PartWriter, Sample

Decode = Callable[..., Picture]
"""`pixels.decode`, or what stands in for it."""
LOST = "lost_in_tar"
MAX_DETAIL, MAX_URL = 1000, 4096
"""Characters that a refusal keeps."""
MALLOC_OPTIONS = ((-3, 32 << 20), (-1, 1 << 30), (-8, 1))
"""As mallopt(3) numbers them: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in bytes, M_ARENA_MAX."""
PIXELS_PER_BATCH_ITEM = 512 * 512
SOFTWARE = ("diffusers", "mosaicml-streaming", "numpy", "pillow", "torch", "transformers")


@dataclass
class Decoded:
    """A sample between decoding and encoding: captions and pixels for each bucket, or why it is rejected."""

    key: str
    url: str
    scores: np.ndarray
    content: tuple[list[CleanCaption | None], Picture] | Reject
    captions: list[Callable[[], Caption] | None] | None = None
    """Each waits for its text latents, once some bucket's batch has begun with them."""
    own_captions: list[Caption | None] | None = None
    """What they came to, in memory of their own, once the sample was written for the first time."""
    captions_finite: bool = False


@dataclass(frozen=True)
class StartedBatch:
    """Samples of one bucket on the device."""

    bucket: Bucket
    samples: list[Decoded]
    image_latents: Callable[[], Tensor]
    """Waits for them."""


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
        if table and not picture.corners.keys().isdisjoint(table.buckets):
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
    store = open_store(config.output)
    committed = load_receipt(store, shard.name)
    buckets = [bucket for bucket in config.bucket_list if committed is None or str(bucket) not in committed.parts]
    if committed is not None and not buckets:
        return committed
    if not has_uncond(store):
        empty = text_encoder([""], config.workers.batch_size)[0]
        write_uncond(store, empty.latents, empty.num_tokens)

    isolate = attempt_number >= config.workers.isolate_from
    longest = None if isolate else CLOCK_PER_PROCESSOR_SECOND * config.limits.decode_seconds
    with (
        local_copy(shard.address, ".tar") as path,
        attempt_folder(store, shard.name, config.workers.scratch) as folder,
        maybe_isolated(decode, config.limits, isolate) as decode_picture,
        threads(config.workers.decode_threads, longest) as pool,
        threads(1) as hasher,  # its own: in `pool` a picture would wait for it, with the clock running
    ):
        tar = Tar(path, config.limits.max_bytes, config.tars.policy)
        tar.check(shard, counted_samples(shard))
        source = hasher.submit(tar.record, shard.address)  # its SHA-256, while the first pictures are decoded
        writers = {bucket: PartWriter(folder / str(bucket), encoding, bucket) for bucket in buckets}
        parts = Parts(writers, config)

        # tar members => raw samples => pixels, in the tar's order, running ahead of the encoders
        wanted = [bucket for bucket in config.covering if bucket in buckets]
        decode_one = partial(decode_sample, buckets=wanted, config=config, decode=decode_picture)
        ahead = max(config.workers.batch_size, 4 * config.workers.decode_threads)
        accepted = drop_rejects(map_in_order(pool, decode_one, tar.samples(), ahead, longest), parts)
        batches = in_background(batched_by_bucket(accepted, parts, config.workers.batch_size), ahead=1)
        # pixels => latents, begun on the device while the batch before is being written
        on_device = start_batches(batches, image_encoder, text_encoder, config.workers.batch_size)
        # latents => parts
        with closing(in_background(on_device, ahead=1)) as encoded:
            for batch in encoded:
                for sample, image_latents in zip(batch.samples, batch.image_latents(), strict=True):
                    write_sample(sample, batch.bucket, image_latents, parts)
                report(parts.samples_in)

        # parts => committed
        with threads(len(writers)) as finishers:
            counts = list(finishers.map(PartWriter.finish, writers.values()))
        attempt = Attempt(
            shard=shard.name,
            folder=folder,
            encoding=encoding,
            samples_in=parts.samples_in,
            counts=dict(zip(map(str, writers), counts, strict=True)),
            rules={str(bucket): rule for bucket, rule in config.rules.items()},
            records={str(bucket): writer.records for bucket, writer in writers.items()},
            source=source.result(),
            software={name: version(name) for name in SOFTWARE},
            settings=settings_of(config),
            number=attempt_number,
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 3),
        )
        return commit(store, attempt)


def warm_up() -> None:
    """What a process does once, when its encoders are loaded."""
    keep_memory()
    pa.array([None])  # loads pandas, where that is installed; or the device would wait for it at the first shard's end
    gc.collect()
    atexit.register(gc.unfreeze)  # libraries complain of objects that are never collected
    gc.freeze()  # or each collection would look through all that the libraries made when they were imported


def keep_memory() -> None:
    """Have glibc keep what is freed for what comes next, and make no heaps of their own for the threads to come.

    Every picture takes some megabytes, in one thread, and gives them back in another. By default they go back to the
    kernel as well, which takes longer to clear fresh pages than decoding takes to fill them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries have none
        for option, value in MALLOC_OPTIONS:
            libc.mallopt(option, value)


def settings_of(config: PrecomputeConfig) -> dict[str, str | int | float | bool]:
    """What a receipt says of the run besides the encoding and the software."""
    device = torch.cuda.get_device_name() if config.workers.num_gpus else f"CPU ({platform.machine()})"
    workers = config.workers
    return {
        "device": device,
        "batch_size": workers.batch_size,
        "compile": workers.compile,
        "tars": config.tars.policy,
        "check_sha256": config.tars.check_sha256,
        **config.limits.model_dump(mode="json", exclude={"formats"}),
        "formats": " ".join(config.limits.formats),
    }


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
        # it may name a member, whose name may be any bytes, and many
        content = Reject(reject.reason, valid_text(str(reject)[:MAX_DETAIL]))
    url = valid_text(str(raw.metadata.get("url") or "")[:MAX_URL])
    return Decoded(raw.key, url, read_scores(raw.metadata), content)


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
            # taken out, so that samples that wait for another bucket's batch do not hold this one's
            pictures = [picture.pixels.pop(bucket) for _, picture in map(content, samples)]
            latents = image_encoder.start(pictures, batch_size_of(bucket, batch_size))
            yield StartedBatch(bucket, samples, latents)


def start_captions(samples: list[Decoded], text_encoder: TextEncoder, batch_size: int) -> None:
    """Begin with every caption of `samples`; what another bucket's batch has begun is not encoded again."""
    fresh = [sample for sample in samples if sample.captions is None]
    texts = [caption.text for sample in fresh for caption in content(sample)[0] if caption is not None]
    batches = [
        cache(text_encoder.start(texts[first : first + batch_size], batch_size))
        for first in range(0, len(texts), batch_size)
    ]
    places = count()
    for sample in fresh:
        sample.captions = [
            partial(stored_caption, caption, batches, *divmod(next(places), batch_size)) if caption else None
            for caption in content(sample)[0]
        ]


def stored_caption(
    caption: CleanCaption, batches: Sequence[Callable[[], list[EncodedCaption]]], batch: int, row: int
) -> Caption:
    """A clean caption with its text latents, once they are there."""
    encoded = batches[batch]()[row]
    cut = {"truncated"} if encoded.truncated else set()
    return Caption(caption.text, encoded.latents, encoded.num_tokens, caption.mended | cut)


def write_sample(sample: Decoded, bucket: Bucket, image_latents: Tensor, parts: Parts) -> None:
    """Append one sample to its part, or refuse it as `non_finite`: its latents overflow float16, in float32 too."""
    captions = captions_of(sample)
    if not (sample.captions_finite and all_finite(image_latents)):
        parts.refuse(sample, Reject("non_finite", "encoded in float32 too"), [bucket])
        return
    _, picture = content(sample)
    size = (picture.width, picture.height, *picture.corners[bucket])
    parts.writers[bucket].write(Sample(sample.key, captions, image_latents, size, sample.scores))


def captions_of(sample: Decoded) -> list[Caption | None]:
    """The sample's captions, waited for. A sample that waits for another bucket's batch does not hold this batch's
    page-locked memory."""
    if sample.own_captions is None:
        assert sample.captions is not None  # its batch was started
        encoded = [caption() if caption else None for caption in sample.captions]
        sample.own_captions = [caption and replace(caption, latents=caption.latents.clone()) for caption in encoded]
        sample.captions_finite = all(all_finite(caption.latents) for caption in sample.own_captions if caption)
        sample.captions = []
    return sample.own_captions


def all_finite(latents: Tensor) -> bool:
    """Whether float16 latents hold neither infinities nor NaN: these alone have an exponent of all ones."""
    magnitudes = latents.numpy().view(np.uint16) & 0x7FFF
    return bool(magnitudes.max() < 0x7C00)
