"""The parts that a tar is written to, one for each bucket, and which of its samples each holds or refuses."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from precompute.encode.overlap import threads
from precompute.encode.samples import Decoded, Encoded, Rejected
from precompute.input.reject import Reject
from precompute.pixels.buckets import Buckets
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.tables import TOO_SMALL
from shards.root.writing import PartWriter, WrittenPart

NON_FINITE = Reject("non_finite", "encoded in float32 too")


class Parts:
    """Counts the samples that come in; every one is written to a part or refused by it, for each bucket."""

    def __init__(self, folder: Path, encoding: EncodingRecord, fresh: list[Bucket], buckets: Buckets):
        """`fresh`: those of the job's `buckets` that have no part of this tar yet."""
        self.writers = {bucket: PartWriter(folder / str(bucket), encoding, bucket) for bucket in fresh}
        self.nearest_only = buckets.nearest_only
        self.keys: list[str] = []
        """Of all samples that came in."""

    def accept(self, samples: Iterable[Decoded | Rejected]) -> Iterator[Decoded]:
        """Count every sample; pass on those with a picture."""
        for sample in samples:
            self.keys.append(sample.key if isinstance(sample, Rejected) else sample.about.key)
            if isinstance(sample, Rejected):
                for bucket in self.writers:
                    self._refuse(bucket, sample.key, sample.url, sample.reject)
            else:
                yield sample

    def leave_out(self, sample: Decoded, bucket: Bucket) -> None:
        """Record that `bucket` does not get a sound picture: it is too small, or its ratio is another bucket's."""
        about, table = sample.about, self.nearest_only.get(bucket)
        if table and not sample.picture.corners.keys().isdisjoint(table.buckets):
            self.writers[bucket].skip()
        else:
            self._refuse(bucket, about.key, about.url, Reject(TOO_SMALL, f"{about.width}x{about.height}"))

    def add(self, bucket: Bucket, samples: Iterable[Encoded]) -> None:
        """Append samples to a part, or refuse them as `non_finite`: their latents overflow float16, in float32 too."""
        finite = []
        for sample in samples:
            if sample.finite:
                finite.append(sample.to_store)
            else:
                self._refuse(bucket, sample.about.key, sample.about.url, NON_FINITE)
        self.writers[bucket].write(*finite)

    def finish(self) -> dict[str, WrittenPart]:
        """Close the files; bucket → what they hold."""
        with threads(len(self.writers)) as finishers:
            written = list(finishers.map(PartWriter.finish, self.writers.values()))
        return dict(zip(map(str, self.writers), written, strict=True))

    def _refuse(self, bucket: Bucket, key: str, url: str, reject: Reject) -> None:
        self.writers[bucket].refuse(key, url, reject.reason, str(reject))
