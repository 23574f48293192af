"""Uncompressed webdataset tars: listing them, reading their samples, and verifying that they are complete.

The tar format cannot distinguish a truncated archive from a short one: at a header that is corrupt or cut off, the
listing ends without an error. Therefore, all headers are read first (`layout.py`), and the samples must match those
listed in img2dataset's sidecar files, `NNNNN_stats.json` and `NNNNN.parquet`. A damaged tar is refused by default;
under `salvage`, its intact samples are used and every lost sample is accounted for.
"""

import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.input.layout import IMAGE_SUFFIXES, REPLACE, Member, read_layout
from shards.base.config import Config
from shards.base.durable import sha256_file
from shards.base.errors import DamagedInput, Outage, RequestError
from shards.base.remote import store_errors
from shards.base.table import counted

TarPolicy = Literal["reject", "salvage"]
SUCCESS = "success"
"""Status of downloaded images in img2dataset's files."""
MAX_LISTED = 5
"""Maximum number of damage descriptions listed in a receipt."""
MAX_JSON_BYTES = 1 << 20
"""Maximum size of a sample's JSON. Parsing takes up to 30 times as much memory. Larger JSON is ignored, as is
invalid JSON."""
MAX_ROWS = 1_000_000
"""Maximum number of rows in the parquet sidecar file, because a few bytes can decode to any number of rows."""

TarRecord = dict[str, str | int | None]
"""Description of a tar in receipts."""


class TarsConfig(Config):
    """Handling of damaged tars."""

    policy: TarPolicy = "reject"
    """With `reject`, a damaged tar fails. With `salvage`, its intact samples are used and the lost ones are
    recorded."""
    check_sha256: bool = False
    """Check each image against the `sha256` in its JSON, if present. Use this for tars with the original image bytes,
    which `make download` writes by default, but not if img2dataset re-encoded the images."""


class Named(Protocol):
    """A unit of work named after its tar: a tar to encode, or a tar's parts in a root to derive from."""

    @property
    def name(self) -> str:
        """Name of the tar, such as 00042."""


AnyTar = TypeVar("AnyTar", bound=Named)


@dataclass
class RawSample:
    """A sample as it is in a tar: the undecoded members that share its key."""

    key: str
    image: bytes | None = None
    caption: bytes | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    oversized: str = ""
    """Name and size of a member that was not read because it exceeds the size limit; empty if there is none."""
    lost: str = ""
    """Reason why damage to the tar made this sample unusable; empty for an intact sample."""


@dataclass(frozen=True)
class InputTar:
    """A tar's name, such as `00042`, and its address: a path, or any fsspec URL."""

    name: str
    address: str


def list_tars(folder: str) -> list[InputTar]:
    """Return the tars directly in `folder` (a path or any fsspec URL), sorted by name and excluding hidden files.
    Raises RequestError if the folder cannot be listed or contains no tars."""
    file_system, paths = _listed(folder)
    names = [Path(path).name for path in paths or ()]
    if paths is None:
        raise RequestError(
            f"The `input` folder {folder} does not exist. Set `input` to the folder of your tars, or to the output "
            "of `make download`."
        )
    found = [path for path in paths if path.endswith(".tar") and not Path(path).name.startswith(".")]
    if not found and (compressed := [name for name in names if ".tar." in name or name.endswith(".tgz")]):
        raise RequestError(
            f"{folder} contains only compressed tars, such as {compressed[0]}, which do not support random access. "
            "Decompress them in place (gunzip, zstd -d, …)."
        )
    if not found:
        raise RequestError(
            f"The `input` folder {folder} contains no *.tar files. Set `input` to the folder that directly contains "
            "your tars, or to the output of `make download`."
        )
    return [InputTar(Path(path).stem, file_system.unstrip_protocol(path)) for path in found]


def _listed(folder: str) -> tuple[Any, list[str] | None]:
    """Return the file system of a folder, and the sorted paths in the folder or, if it does not exist, None. On an
    object store, a folder exists if there are objects below it."""
    try:
        file_system, path = fsspec.core.url_to_fs(folder)
        paths = sorted(file_system.glob(f"{path.rstrip('/')}/*"))
        return file_system, paths if paths or file_system.exists(path) else None
    except (OSError, ImportError, ValueError) as error:
        raise RequestError(
            f"The input {folder} cannot be listed: {error}. Check the path and your credentials."
        ) from error


def note_unverifiable(folder: str, tars: Sequence[Named]) -> None:
    """Print a note if some of the tars in `folder` have no img2dataset sidecar file."""
    files = {Path(path).name for path in _listed(folder)[1] or ()}
    unverifiable = [tar for tar in tars if not files & {f"{tar.name}_stats.json", f"{tar.name}.parquet"}]
    if unverifiable:
        print(
            f"note: {len(unverifiable)} of {len(tars)} tars in {folder} have no NNNNN_stats.json or NNNNN.parquet, "
            f"which img2dataset writes next to each tar. Corrupt and truncated tars are still detected, but whole "
            f"samples that are missing from a tar are not.",
            flush=True,
        )


def choose_tars(wanted: str, available: list[AnyTar]) -> list[AnyTar]:
    """Return the tars that `wanted` selects, in order: `00042`, `00000-00099`, a comma-separated list of both, or
    `all`. Raises RequestError if the selection is invalid, or names a tar that does not exist."""
    if wanted == "all":
        return available
    by_name = {tar.name: tar for tar in available}
    names: list[str] = []
    for word in wanted.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if not match:
            raise RequestError(
                f"--shards {wanted} is not a selection of tars. Use 00042, 00000-00099, a comma-separated list of "
                f"both, or all."
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise RequestError(f"--shards {wanted}: the end of the range {word} is before its start.")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    missing = [name for name in names if name not in by_name]
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RequestError(
            f"{'This tar does' if len(missing) == 1 else 'These tars do'} not exist: {listed}. The input contains "
            f"{counted(len(available), 'tar')}: {available[0].name} to "
            f"{available[-1].name}."
        )
    return [by_name[name] for name in sorted(set(names))]


@contextmanager
def local_copy(address: str) -> Iterator[Path]:
    """Provide the tar at `address` as a local path: the file itself if it is local, or else a temporary copy. Raises
    Outage if it cannot be downloaded, and FileNotFoundError if it does not exist."""
    file_system, path = fsspec.core.url_to_fs(address)
    if "file" in file_system.protocol:
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        target = Path(folder) / "copy.tar"
        with store_errors(address, FileNotFoundError):
            file_system.get_file(path, str(target))
            size = file_system.size(path)
        if target.stat().st_size != size:
            raise Outage(f"{address} was downloaded incompletely: {target.stat().st_size} of {size} bytes.")
        yield target


@dataclass(frozen=True)
class Counted:
    """The samples that a tar should contain, according to img2dataset's sidecar files."""

    counts: dict[str, int]
    """Name of each existing sidecar file → number of samples that it lists."""
    urls: dict[str, str] | None
    """Key → URL of each sample; None if there is no parquet file."""


class Tar:
    """A local tar, whose headers have been read.

    Raises:
        DamagedInput: The tar is compressed; or, unless the policy is `salvage`, it is truncated or damaged, or a key
            occurs twice.
    """

    def __init__(self, path: Path, max_member_bytes: int, policy: TarPolicy = "reject"):
        self.path = path
        self.max_member_bytes = max_member_bytes
        self.bytes = path.stat().st_size
        layout = read_layout(path)
        if layout.damage and policy == "reject":
            if "is not in order" in layout.damage[0]:
                remedy = "Recreate it, sorted by name: tar --sort=name -cf NAME.tar -C FOLDER ."
            elif "occurs twice" in layout.damage[0]:
                remedy = "Recreate it with a unique key for each sample."
            else:
                remedy = REPLACE
            raise DamagedInput(f"{path} {layout.damage[0]}. {remedy}")
        self.policy = policy
        self.damage = layout.damage
        self.members = {key: members for key, members in layout.members.items() if key not in layout.lost}
        self.lost = {key: RawSample(key, lost=why) for key, why in layout.lost.items()}
        self.num_unnamed = 0

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the whole file."""
        return sha256_file(self.path)

    def check(self, tar: InputTar) -> None:
        """Check the samples against img2dataset's sidecar files at the tar's address, if there are any. Under
        `salvage`, record the missing ones as lost.

        Raises:
            DamagedInput: A sidecar file cannot be parsed. Under `reject`, the samples differ from those listed, so the
                tar lost or gained samples after it was written. Under `salvage`, the tar is damaged and has no intact
                samples left.
        """
        expected = counted_samples(tar)
        listed = expected.urls if expected.urls is not None else dict.fromkeys(self.members | self.lost, "")
        missing = listed.keys() - self.members.keys()
        foreign = self.members.keys() - listed.keys()
        found = len(self.members)
        wrong = [
            f"contains {counted(found, 'sample')}, but {file} lists {count}"
            for file, count in expected.counts.items()
            if count != found
        ]
        if foreign:
            wrong.append(
                f"contains {counted(len(foreign), 'sample')} that its parquet file does "
                f"not list, starting with {min(foreign)}"
            )
        if wrong and self.policy == "reject":
            raise DamagedInput(
                f"{tar.address} {wrong[0]}. One of these files has been replaced or damaged since img2dataset wrote "
                f"them. Download the tar again."
            )
        self.damage += wrong
        self.members = {key: members for key, members in self.members.items() if key in listed}
        reasons = {key: self.lost[key].lost if key in self.lost else "it is not in the tar" for key in sorted(missing)}
        self.lost = {key: RawSample(key, metadata={"url": listed[key]}, lost=why) for key, why in reasons.items()}
        num_known = len(self.members) + len(self.lost)
        self.num_unnamed = max([num_known, *expected.counts.values()]) - num_known
        if self.damage and not self.members:
            raise DamagedInput(f"{tar.address} {self.damage[0]}, and no intact sample is left. {REPLACE}")

    def samples(self) -> Iterator[RawSample]:
        """Yield the intact samples in the order of their first members, and then the lost samples, sorted by key."""
        with self.path.open("rb") as file:
            for key, members in self.members.items():
                sample = RawSample(key)
                for suffix, member in members.items():
                    self._add(sample, suffix, file.fileno(), member)
                yield sample
        yield from self.lost.values()

    def record(self, address: str) -> TarRecord:
        """Describe the tar for receipts. For a damaged tar, `lost` counts the samples that are rejected as
        `lost_in_tar`, and `lost_unnamed` counts additional lost samples, whose keys are unknown."""
        record: TarRecord = {"address": address, "bytes": self.bytes, "sha256": self.sha256}
        if self.damage:
            damage = "; ".join(self.damage[:MAX_LISTED]) + ("; …" if len(self.damage) > MAX_LISTED else "")
            record |= {"damage": damage, "lost": len(self.lost), "lost_unnamed": self.num_unnamed}
        return record

    def _add(self, sample: RawSample, suffix: str, file: int, member: Member) -> None:
        if member.size > self.max_member_bytes:
            sample.oversized = f"the member {member.name} has {member.size} bytes, more than {self.max_member_bytes}"
            return
        if suffix == "json" and member.size > MAX_JSON_BYTES:
            return
        data = os.pread(file, member.size, member.offset)
        if len(data) != member.size:
            raise DamagedInput(
                f"{self.path} changed while it was being read: the member {member.name!r} is truncated. Run "
                f"the job again once the tar is complete."
            )
        if suffix in IMAGE_SUFFIXES:
            sample.image = data
        elif suffix == "txt":
            sample.caption = data
        elif suffix == "json":
            try:  # invalid UTF-8 stays recognisable, and affects only the text that contains it
                parsed = json.loads(data.decode("utf-8-sig", errors="surrogateescape"))
            except (ValueError, RecursionError):
                parsed = None
            if isinstance(parsed, dict):
                sample.metadata = parsed


def counted_samples(tar: InputTar) -> Counted:
    """Read img2dataset's sidecar files of a tar, `NNNNN_stats.json` and `NNNNN.parquet`, if they exist. Raises
    DamagedInput if one of them cannot be parsed."""
    file_system, path = fsspec.core.url_to_fs(tar.address.removesuffix(".tar"))
    counts: dict[str, int] = {}
    urls: dict[str, str] | None = None
    if (data := _side_file(file_system, name := f"{path}_stats.json")) is not None:
        with damaged(name):
            counts[f"{tar.name}_stats.json"] = int(json.loads(data)["successes"])
    if (data := _side_file(file_system, name := f"{path}.parquet")) is not None:
        with damaged(name):
            rows = successes(data)
            urls = {str(row["key"]): row.get("url") or "" for row in rows}
            counts[f"{tar.name}.parquet"] = len(rows)
    return Counted(counts, urls)


def _side_file(file_system: Any, name: str) -> bytes | None:
    try:
        with store_errors(name, FileNotFoundError):
            return bytes(file_system.cat_file(name))
    except FileNotFoundError:
        return None


@contextmanager
def damaged(name: str) -> Iterator[None]:
    """Convert any exception raised while parsing a sidecar file's bytes, including OSError, to DamagedInput."""
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError, pa.ArrowException) as error:
        raise DamagedInput(f"{name} is damaged ({type(error).__name__}: {error}). {REPLACE}") from error


def successes(data: bytes) -> list[dict[str, Any]]:
    """Return the successful rows of img2dataset's parquet file, with the columns `key`, `status` and, if present,
    `url`. Raises ValueError if the file has more than MAX_ROWS rows."""
    table = pq.ParquetFile(io.BytesIO(data))
    if table.metadata.num_rows > MAX_ROWS:
        raise ValueError(f"it has {table.metadata.num_rows} rows, more than the limit of {MAX_ROWS}")
    columns = [column for column in ("key", "url", "status") if column in table.schema_arrow.names]
    return [row for row in table.read(columns).to_pylist() if row["status"] == SUCCESS]
