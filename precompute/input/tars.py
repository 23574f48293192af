"""One tar: an uncompressed webdataset tar, its members grouped into samples, and proof that it is whole.

Nothing in the tar format tells a shortened archive from a short one: a flipped bit in a header, or a cut at one, ends
the listing without an error. So the headers are read first, all of them (`layout.py`), and the samples must
be those that img2dataset's own `NNNNN_stats.json` and parquet beside the tar counted. A tar that lost something is
refused, or, where the config says so, what is sound of it is taken and every sample that is not is accounted for.
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

from precompute.input.layout import IMAGE_SUFFIXES, Member, read_layout
from shards.base.config import Config
from shards.base.durable import sha256_file
from shards.base.errors import DamagedInput, Outage, RequestError
from shards.base.remote import store_errors

TarPolicy = Literal["reject", "salvage"]
MOST_NAMED = 5
MAX_JSON_BYTES = 1 << 20
"""A larger one is passed over as a broken one is: parsed, it takes up to 30 times as much memory."""
MAX_ROWS = 1_000_000
"""Of the parquet beside a tar: few bytes may say many rows."""


TarRecord = dict[str, str | int | None]
"""Which tar it was, for a receipt."""


class TarsConfig(Config):
    """What is done with tars that are damaged."""

    policy: TarPolicy = "reject"
    """`reject` fails a tar that lost anything; `salvage` takes the sound samples, and records the loss."""
    check_sha256: bool = False
    """Hold each picture against the `sha256` of its JSON, where there is one: for tars that keep the bytes as served,
    as `make download` has it, not for ones whose pictures img2dataset encoded again."""


class Named(Protocol):
    """A tar, or what is left of it in a root."""

    @property
    def name(self) -> str:
        """00042."""


AnyTar = TypeVar("AnyTar", bound=Named)


@dataclass
class RawSample:
    """The members of one key, undecoded."""

    key: str
    image: bytes | None = None
    caption: bytes | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    oversized: str = ""
    """The member that was over the size limit and was not read."""
    lost: str = ""
    """Why this sample is not to be had from the tar, where a damaged one is salvaged."""


@dataclass(frozen=True)
class InputTar:
    """A tar by its name, such as `00042`, and its address (a path or any fsspec URL)."""

    name: str
    address: str


def list_tars(folder: str) -> list[InputTar]:
    """The tars directly in `folder` (a path or any fsspec URL), by name; hidden files are none.

    Raises:
        RequestError: the folder cannot be listed, or holds no tar.
    """
    file_system, names = _listed(folder, "*.tar")
    found = [name for name in names if not Path(name).name.startswith(".")]
    if not found:
        compressed = [name for pattern in ("*.tar.*", "*.tgz") for name in _listed(folder, pattern)[1]]
        if compressed:
            raise RequestError(
                f"{folder} holds only compressed tars, such as {Path(compressed[0]).name}, and they cannot be read at "
                "random. Decompress them in place (gunzip, zstd -d, …)."
            )
        if not _exists(file_system, folder):
            raise RequestError(
                f"There is no folder {folder}, which `input` names. Set `input` to the folder that holds the tars: one "
                "that `make download` wrote, or your own."
            )
        raise RequestError(
            f"There is no tar in {folder}. Set `input` to a folder that holds NAME.tar directly: one that `make "
            "download` wrote, or your own."
        )
    return [InputTar(Path(name).stem, file_system.unstrip_protocol(name)) for name in found]


def _exists(file_system: Any, folder: str) -> bool:
    """Whether there is such a folder; object stores have none, so there it depends on the objects below it."""
    try:
        return bool(file_system.exists(fsspec.core.url_to_fs(folder)[1]))
    except (OSError, ValueError) as error:
        raise RequestError(f"The input {folder} cannot be listed: {error}.") from error


def _listed(folder: str, pattern: str) -> tuple[Any, list[str]]:
    try:
        file_system, path = fsspec.core.url_to_fs(folder)
        return file_system, sorted(file_system.glob(f"{path.rstrip('/')}/{pattern}"))
    except (OSError, ImportError, ValueError) as error:
        raise RequestError(f"The input {folder} cannot be listed: {error}.") from error


def say_what_is_unchecked(folder: str, tars: Sequence[Named]) -> None:
    """One line for people, where tars of `folder` have no side file of img2dataset's beside them.

    Raises:
        RequestError: the folder cannot be listed.
    """
    beside = {Path(name).name for name in _listed(folder, "*")[1]}
    alone = [tar for tar in tars if not beside & {f"{tar.name}_stats.json", f"{tar.name}.parquet"}]
    if alone:
        print(
            f"{len(alone)} of {len(tars)} tars in {folder} have neither NNNNN_stats.json nor NNNNN.parquet beside "
            f"them, such as img2dataset writes. Damage that shows in a tar itself is found all the same, but not that "
            f"whole samples are gone from it: nothing says how many it held.",
            flush=True,
        )


def choose_tars(wanted: str, available: list[AnyTar]) -> list[AnyTar]:
    """`00042`, `00000-00099`, commas of both, or `all` → tars, in order, each once.

    Raises:
        RequestError: a name that cannot be read, or a tar that is not there.
    """
    if wanted == "all":
        return available
    by_name = {tar.name: tar for tar in available}
    names: list[str] = []
    for word in wanted.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if not match:
            raise RequestError(f"shards = {wanted!r}: give 00042, 00000-00099, commas of both, or `all`.")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise RequestError(f"shards = {wanted!r}: the range {word} runs backwards.")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    missing = [name for name in names if name not in by_name]
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RequestError(
            f"There is no tar {listed}. The input holds {available[0].name} to {available[-1].name} "
            f"({len(available)} tars)."
        )
    return [by_name[name] for name in sorted(set(names))]


@contextmanager
def local_copy(address: str, suffix: str = "") -> Iterator[Path]:
    """The file at `address` as a local path: itself where it is local, a temporary copy otherwise."""
    file_system, path = fsspec.core.url_to_fs(address)
    if "file" in file_system.protocol:
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        target = Path(folder) / f"copy{suffix}"
        with store_errors(address, FileNotFoundError):
            file_system.get_file(path, str(target))
            size = file_system.size(path)
        if target.stat().st_size != size:
            raise Outage(f"{address} did not come whole: {target.stat().st_size} bytes of {size}.")
        yield target


@dataclass(frozen=True)
class Counted:
    """What img2dataset says a tar holds."""

    counts: dict[str, int]
    """Side file → samples, for those of the two that are there."""
    urls: dict[str, str] | None
    """Key → URL, where the parquet is there."""


class Tar:
    """A local tar being read.

    Raises:
        DamagedInput: it is compressed; or, but under `salvage`, it is cut short or damaged, or a key comes twice.
    """

    def __init__(self, path: Path, max_member_bytes: int, policy: TarPolicy = "reject"):
        self.path = path
        self.max_member_bytes = max_member_bytes
        self.bytes = path.stat().st_size
        layout = read_layout(path)
        if layout.damage and policy == "reject":
            if "is not in order" in layout.damage[0]:
                remedy = "Write it again, sorted by name: tar --sort=name -cf NAME.tar -C FOLDER ."
            elif "occurs twice" in layout.damage[0]:
                remedy = "Write it again with a key of its own for each sample."
            else:
                remedy = "Download this tar again, or write it again if it is your own."
            raise DamagedInput(f"{path} {layout.damage[0]}. {remedy}")
        self.policy = policy
        self.damage = layout.damage
        self.members = {key: members for key, members in layout.members.items() if key not in layout.lost}
        self.lost = {key: RawSample(key, lost=why) for key, why in layout.lost.items()}
        self.num_unnamed = 0

    @cached_property
    def sha256(self) -> str:
        """Of the whole file."""
        return sha256_file(self.path)

    def check(self, tar: InputTar, counted: Counted) -> None:
        """Hold the samples against those that img2dataset counted; under `salvage`, take down which are missing.

        Raises:
            DamagedInput: they are others, so the tar lost or gained samples after it was written; under `salvage`, none
                is left.
        """
        listed = counted.urls if counted.urls is not None else dict.fromkeys(self.members | self.lost, "")
        missing = listed.keys() - self.members.keys()
        foreign = self.members.keys() - listed.keys()
        found = len(self.members)
        wrong = [
            f"holds {found} samples, but {file} beside it counted {count}"
            for file, count in counted.counts.items()
            if count != found
        ]
        if foreign:
            wrong.append(
                f"holds {len(foreign)} samples that are not in the parquet beside it, the first {min(foreign)}"
            )
        if wrong and self.policy == "reject":
            raise DamagedInput(
                f"{tar.address} {wrong[0]}. The tar is not the one that was written, or was damaged: "
                f"download this tar again."
            )
        self.damage += wrong
        self.members = {key: members for key, members in self.members.items() if key in listed}
        reasons = {key: self.lost[key].lost if key in self.lost else "it is not in the tar" for key in sorted(missing)}
        self.lost = {key: RawSample(key, metadata={"url": listed[key]}, lost=why) for key, why in reasons.items()}
        num_known = len(self.members) + len(self.lost)
        self.num_unnamed = max([num_known, *counted.counts.values()]) - num_known
        if self.damage and not self.members:
            raise DamagedInput(f"{tar.address} {self.damage[0]}; nothing sound is left of it. Download it again.")

    def samples(self) -> Iterator[RawSample]:
        """Samples in the order of their first members, and after them those that are lost, by key."""
        with self.path.open("rb") as file:
            for key, members in self.members.items():
                sample = RawSample(key)
                for suffix, member in members.items():
                    self._add(sample, suffix, file.fileno(), member)
                yield sample
        yield from self.lost.values()

    def record(self, address: str) -> TarRecord:
        """Which tar it was, for the receipt; of a damaged one also what was lost.

        `lost` samples are among the rejects, as `lost_in_tar`; `lost_unnamed` were counted, and nothing says which
        they were.
        """
        record: TarRecord = {"address": address, "bytes": self.bytes, "sha256": self.sha256}
        if self.damage:
            damage = "; ".join(self.damage[:MOST_NAMED]) + ("; …" if len(self.damage) > MOST_NAMED else "")
            record |= {"damage": damage, "lost": len(self.lost), "lost_unnamed": self.num_unnamed}
        return record

    def _add(self, sample: RawSample, suffix: str, file: int, member: Member) -> None:
        if member.size > self.max_member_bytes:
            sample.oversized = f"{member.name}: {member.size} bytes"
            return
        if suffix == "json" and member.size > MAX_JSON_BYTES:
            return
        data = os.pread(file, member.size, member.offset)
        if len(data) != member.size:
            raise DamagedInput(f"{self.path} changed while it was read: {member.name!r} is cut short. Try again.")
        if suffix in IMAGE_SUFFIXES:
            sample.image = data
        elif suffix == "txt":
            sample.caption = data
        elif suffix == "json":
            try:  # bytes that are no UTF-8 stay recognisable, and cost no more than the text that they are in
                parsed = json.loads(data.decode("utf-8-sig", errors="surrogateescape"))
            except (ValueError, RecursionError):
                parsed = None
            if isinstance(parsed, dict):
                sample.metadata = parsed


def counted_samples(tar: InputTar) -> Counted:
    """What img2dataset's side files, `NNNNN_stats.json` and `NNNNN.parquet`, say the tar holds.

    Raises:
        DamagedInput: one of them cannot be read.
    """
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
    """Whatever the parsers of a side file's bytes raise, OSErrors too, is the file's fault.

    Raises:
        DamagedInput: it cannot be read.
    """
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError, pa.ArrowException) as error:
        raise DamagedInput(f"{name} is damaged ({type(error).__name__}: {error}). Download this tar again.") from error


def successes(data: bytes) -> list[dict[str, Any]]:
    """`key`, and `url` where there is one, of the rows of img2dataset's parquet whose picture is in the tar."""
    table = pq.ParquetFile(io.BytesIO(data))
    if table.metadata.num_rows > MAX_ROWS:
        raise ValueError(f"{table.metadata.num_rows} rows, where no more than {MAX_ROWS} are read")
    columns = [column for column in ("key", "url", "status") if column in table.schema_arrow.names]
    return [row for row in table.read(columns).to_pylist() if row["status"] == "success"]
