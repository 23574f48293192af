"""One input shard: an uncompressed webdataset tar, its members grouped into samples, and proof that it is whole.

Nothing in the tar format tells a shortened archive from a short one: a flipped bit in a header, or a cut at one, ends
the listing without an error. So the bytes after the last member must be the zeros that end an archive, and the number
of samples must be what img2dataset's own `NNNNN_stats.json` and parquet beside the tar counted.
"""

import json
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq

from shards.errors import RequestError, WorkError
from shards.files import sha256_file

IMAGE_SUFFIXES = {"jpg", "jpeg", "png", "webp", "gif", "tif", "tiff", "avif"}


@dataclass
class RawSample:
    """The members of one key, undecoded."""

    key: str
    image: bytes | None = None
    caption: bytes | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    oversized: str = ""
    """The member that was over the size limit and was not read."""


@dataclass(frozen=True)
class InputShard:
    """A tar by the name of its shard, such as `00042`, and its address (a path or any fsspec URL)."""

    name: str
    address: str


def list_shards(folder: str) -> list[InputShard]:
    """The tars directly in `folder` (a path or any fsspec URL), by name.

    Raises:
        RequestError: the folder cannot be listed, or holds no tar.
    """
    try:
        file_system, path = fsspec.core.url_to_fs(folder)
        found = sorted(file_system.glob(f"{path.rstrip('/')}/*.tar"))
    except (OSError, ImportError, ValueError) as error:
        raise RequestError(f"The input {folder} cannot be listed: {error}.") from error
    if not found:
        raise RequestError(f"There is no tar in {folder}. Set `input` to the folder that `make download` wrote.")
    return [InputShard(Path(name).stem, file_system.unstrip_protocol(name)) for name in found]


@contextmanager
def local_copy(address: str, suffix: str = "") -> Iterator[Path]:
    """The file at `address` as a local path: itself where it is local, a temporary copy otherwise."""
    file_system, path = fsspec.core.url_to_fs(address)
    if "file" in file_system.protocol:
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        target = Path(folder) / f"copy{suffix}"
        file_system.get_file(path, str(target))
        yield target


class Tar:
    """A local tar being read."""

    def __init__(self, path: Path, max_member_bytes: int):
        self.path = path
        self.max_member_bytes = max_member_bytes
        self.bytes = path.stat().st_size

    @cached_property
    def sha256(self) -> str:
        """Of the whole file."""
        return sha256_file(self.path)

    def samples(self, headers_only: bool = False) -> Iterator[RawSample]:
        """Samples in the tar's order. A key's members stand side by side, as the webdataset format has it.

        Raises:
            WorkError: the archive is compressed, cut short, or damaged, or a key comes back after another.
        """
        seen: set[str] = set()
        current: RawSample | None = None
        try:
            with tarfile.open(self.path, "r:") as tar:
                for member in tar:
                    if not member.isfile():
                        continue
                    key, _, suffix = Path(member.name).name.partition(".")
                    if current is None or key != current.key:
                        if current is not None:
                            yield current
                        if key in seen:
                            raise WorkError(
                                f"{self.path}: the key {key} comes twice, so its samples cannot be told apart."
                            )
                        seen.add(key)
                        current = RawSample(key)
                    if not headers_only:
                        self._add(current, suffix.lower(), tar, member)
                self._check_end(tar.offset)
        except tarfile.TarError as error:
            raise WorkError(
                f"{self.path} is not a whole, uncompressed tar: {error}. Download this shard again."
            ) from error
        if current is not None:
            yield current

    def count(self) -> int:
        """How many samples it holds, from the headers alone: a damaged tar is found before any of it is encoded.

        Raises:
            WorkError: as `samples` does.
        """
        return sum(1 for _ in self.samples(headers_only=True))

    def record(self, address: str) -> dict[str, str | int | None]:
        """Which tar it was, for the receipt."""
        return {"address": address, "bytes": self.bytes, "sha256": self.sha256}

    def _add(self, sample: RawSample, suffix: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if member.size > self.max_member_bytes:
            sample.oversized = f"{member.name}: {member.size} bytes"
            return
        file = tar.extractfile(member)
        assert file is not None  # it is a regular file
        data = file.read()
        if suffix in IMAGE_SUFFIXES:
            sample.image = data
        elif suffix == "txt":
            sample.caption = data
        elif suffix == "json":
            try:
                parsed = json.loads(data)
            except ValueError:
                parsed = None
            if isinstance(parsed, dict):
                sample.metadata = parsed

    def _check_end(self, offset: int) -> None:
        with self.path.open("rb") as file:
            file.seek(offset)
            length = 0
            while block := file.read(1 << 20):
                if block.count(0) != len(block):
                    raise WorkError(
                        f"{self.path} is damaged: what follows byte {offset} is neither a member nor the end of the "
                        f"archive, so samples are missing. Download this shard again."
                    )
                length += len(block)
        if length < 2 * tarfile.BLOCKSIZE:
            raise WorkError(f"{self.path} is cut short: it ends without the end-of-archive marker. Download it again.")


def expected_samples(shard: InputShard) -> dict[str, int]:
    """What img2dataset says the tar holds: file → count, for those of its two side files that are there."""
    stem = shard.address.removesuffix(".tar")
    file_system, path = fsspec.core.url_to_fs(stem)
    counts = {}
    if file_system.exists(f"{path}_stats.json"):
        counts[f"{shard.name}_stats.json"] = int(json.loads(file_system.cat_file(f"{path}_stats.json"))["successes"])
    if file_system.exists(f"{path}.parquet"):
        with file_system.open(f"{path}.parquet", "rb") as file:
            statuses = pq.read_table(file, columns=["status"])["status"].to_pylist()
        counts[f"{shard.name}.parquet"] = statuses.count("success")
    return counts


def check_count(shard: InputShard, num_samples: int, expected: dict[str, int]) -> None:
    """Hold the number of samples read against what img2dataset counted.

    Raises:
        WorkError: they differ, so the tar lost or gained samples after it was written.
    """
    for source, count in expected.items():
        if count != num_samples:
            raise WorkError(
                f"{shard.address} holds {num_samples} samples, but {source} beside it counted {count}. The tar was "
                f"damaged after it was written: download this shard again."
            )
