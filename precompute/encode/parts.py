"""The parts of one tar, one per bucket, and the accounting of its samples: each part stores, refuses or skips each
sample."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from precompute.encode.overlap import threads
from precompute.encode.samples import DecodedSample, Rejected
from precompute.input.reject import Reject
from precompute.pixels.buckets import Buckets
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.tables import TOO_SMALL
from shards.root.writing import PartWriter, Sample, WrittenPart

NON_FINITE = Reject("non_finite", "not finite in float16")


class Parts:
    """Writer for the parts of a tar. It counts the tar's samples and, for each bucket, records each sample in the part
    or in the part's list of refusals."""

    def __init__(self, folder: Path, encoding: EncodingRecord, fresh: list[Bucket], buckets: Buckets):
        """Open a part for each bucket in `fresh`: those of the job's `buckets` for which this tar is not committed
        yet."""
        self.writers = {bucket: PartWriter(folder / str(bucket), encoding, bucket) for bucket in fresh}
        self.nearest_only = buckets.nearest_only
        self.keys: list[str] = []
        """Keys of all samples of the tar so far."""

    def accept(self, samples: Iterable[DecodedSample | Rejected]) -> Iterator[DecodedSample]:
        """Count every sample, record the rejected ones, and yield the others."""
        for sample in samples:
            self.keys.append(sample.key if isinstance(sample, Rejected) else sample.info.key)
            if isinstance(sample, Rejected):
                for bucket in self.writers:
                    self._refuse(bucket, sample.key, sample.url, sample.reject)
            else:
                yield sample

    def leave_out(self, sample: DecodedSample, bucket: Bucket) -> None:
        """Record that a valid image is not stored in `bucket`, because the bucket is too large for the image or does
        not have the nearest aspect ratio."""
        info, table = sample.info, self.nearest_only.get(bucket)
        if table and not sample.picture.corners.keys().isdisjoint(table.buckets):
            self.writers[bucket].skip()
        else:
            self._refuse(bucket, info.key, info.url, Reject(TOO_SMALL, f"{info.width}x{info.height}"))

    def add(self, bucket: Bucket, samples: list[Sample]) -> None:
        """Append samples to a part. Samples with latents that are not finite are refused as `non_finite`."""
        finite = []
        for sample in samples:
            if all(map(all_finite, latents_of(sample))):
                finite.append(sample)
            else:
                self._refuse(bucket, sample.key, sample.url, NON_FINITE)
        self.writers[bucket].write(*finite)

    def finish(self) -> dict[str, WrittenPart]:
        """Close the files, and return the contents of each bucket's part."""
        with threads(len(self.writers)) as finishers:
            written = list(finishers.map(PartWriter.finish, self.writers.values()))
        return dict(zip(map(str, self.writers), written, strict=True))

    def _refuse(self, bucket: Bucket, key: str, url: str, reject: Reject) -> None:
        self.writers[bucket].refuse(key, url, reject.reason, str(reject))


def latents_of(sample: Sample) -> Iterator[Tensor]:
    """Yield all latents and features of a sample."""
    yield sample.image_latents
    yield from sample.features.values()
    for caption in sample.present:
        for latents in caption.latents.values():
            yield from latents.tensors


def all_finite(latents: Tensor) -> bool:
    """Return whether float16 latents contain no infinities or NaNs, whose exponent bits are all ones."""
    magnitudes = latents.numpy().view(np.uint16) & 0x7FFF
    return bool(magnitudes.max() < 0x7C00)
