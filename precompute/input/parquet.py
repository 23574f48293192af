"""Parquet files with the images' bytes in a column, as Hugging Face's datasets store them.

An image is a struct {bytes, path}, or the bytes themselves. All other columns become a sample's metadata.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.spec import AbstractBufferedFile

from precompute.input.listing import Listing
from precompute.input.numbering import Found, Member, NumberedUnit
from precompute.input.unit import RawSample, Unusable, escaped
from shards.base.errors import RequestError
from shards.base.store import Store

IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")
"""Names of binary columns that are taken to be images. A struct with a field `bytes` may have any name."""
KEY_NAMES = ("key", "__key__")
ROWS_AT_ONCE = 32
BUFFER_BYTES = 4 << 20
MAX_LISTED = 5
"""Maximum number of splits that a note lists."""
CONCURRENT_FOOTERS = 16
SPLIT_FILE = re.compile(r"(.+)-\d{5}-of-\d{5}\b.*\.parquet")
"""Name of a file of a dataset's split on the Hub, such as data/train-00000-of-00010.parquet."""


class StoreFile(AbstractBufferedFile):
    """A file of a store, read in ranges."""

    def __init__(self, store: Store, name: str, size: int):
        super().__init__(None, name, cache_type="none", size=size)
        self.store = store

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.store.read_range(self.path, start, end)


def open_parquet_file(file: BinaryIO) -> pq.ParquetFile:
    """Open a parquet file such that even text that is invalid UTF-8 can be read."""
    parquet = pq.ParquetFile(file, buffer_size=BUFFER_BYTES)
    names = [
        column.name
        for column in parquet.schema_arrow
        if pa.types.is_dictionary(column.type) and plain_type(column.type) == pa.string()
    ]
    if not names:
        return parquet
    # otherwise pyarrow reads these columns as text first, whose conversion to a dictionary fails
    return pq.ParquetFile(file, metadata=parquet.metadata, read_dictionary=names, buffer_size=BUFFER_BYTES)


@dataclass(frozen=True)
class ParquetUnit(NumberedUnit):
    """Row groups of one file."""

    def read(self, member: Member, max_bytes: int) -> Iterator[RawSample]:
        file, _, group = member.name.rpartition("#")
        size = self.store.size(file)
        if size is None:
            raise FileNotFoundError("the file does not exist")
        with open_parquet_file(StoreFile(self.store, file, size)) as parquet:
            schema = parquet.schema_arrow
            counts = [parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups)]
            if counts[int(group) : int(group) + 1] != [member.samples] or not (images := image_columns(schema)):
                raise LookupError(f"the file no longer has a row group {group} with {member.samples} images")
            key = next((name for name in KEY_NAMES if name in schema.names), None)
            image = f"{images[0]}.bytes" if pa.types.is_struct(schema.field(images[0]).type) else images[0]
            columns = [image, *(column.name for column in schema if column.name == key or _is_plain(column.type))]
            batches = parquet.iter_batches(ROWS_AT_ONCE, row_groups=[int(group)], columns=columns, use_threads=False)
            rows = chain.from_iterable(map(to_rows, batches))
            for row, values in enumerate(rows):
                name = None if key is None else values.pop(key)
                name = escaped(f"{member.name}/{row}") if name is None else key_text(name)
                yield _sample(name, values.pop(images[0]), values, max_bytes)


def to_rows(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Convert a table to rows. Invalid UTF-8 stays recognisable, and affects only the text that contains it."""
    return [dict(zip(table.schema.names, row, strict=True)) for row in zip(*map(to_list, table.columns), strict=True)]


def to_list(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Convert a column to Python values, with invalid UTF-8 as in `to_rows`."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = list(map(_value, column))
    return values


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
            return _value(scalar.value)
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(value) for name, value in scalar.items()}
        if isinstance(scalar, pa.ListScalar):
            return list(map(_value, scalar.values))
        return scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")


def key_text(value: Any) -> str:
    """Return a value of a column of keys as text; bytes that are not UTF-8 are escaped."""
    return escaped(value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value))


def _sample(key: str, image: Any, values: dict[str, Any], max_bytes: int) -> RawSample:
    data = image.get("bytes") if isinstance(image, dict) else image
    sample = RawSample(key, metadata={name: value for name, value in values.items() if value is not None})
    if data is not None and len(data) > max_bytes:
        sample.oversized = f"the image of {key} has {len(data)} bytes, more than {max_bytes}"
    else:
        sample.image = data
    return sample


def image_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that may hold the images: the first one with a name from IMAGE_NAMES or, if there is none,
    all structs with a field `bytes`."""
    named = [name for name in IMAGE_NAMES if name in schema.names and _is_image(schema.field(name).type)]
    structs = [column.name for column in schema if pa.types.is_struct(column.type) and _is_image(column.type)]
    return named[:1] or structs


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_image(kind.field(place).type)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary column, `string` for any text, and any other type as it is."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return pa.string() if is_text else kind


def is_number(kind: pa.DataType) -> bool:
    """Return whether values of this type are integers or floating-point numbers."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether a column can hold captions, numbers, or lists of them."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_dictionary)
    if any(test(kind) for test in lists):
        return _is_plain(kind.value_type)
    return plain_type(kind) == pa.string() or is_number(kind)


def find_parquet(listing: Listing) -> Found | None:
    """Find the row groups of all parquet files that have a column with images. Raises RequestError if one of several
    files cannot be read, or has several columns with images, and Unusable if this is true of all of them."""
    problems: list[str] = []

    def read_footer(name: str) -> list[Member]:
        try:
            with pq.ParquetFile(StoreFile(listing.store, name, listing.files[name])) as parquet:
                columns = image_columns(parquet.schema_arrow)
                groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
                members = [Member(f"{name}#{i}", g.total_byte_size, g.num_rows) for i, g in enumerate(groups)]
        except (pa.ArrowException, OSError) as error:
            problems.append(
                f"{listing.store.where(name)} is not a readable parquet file: {' '.join(str(error).split())}. Download "
                f"it again, or move it to another folder."
            )
            return []
        if len(columns) > 1:
            problems.append(
                f"{listing.store.where(name)} has several columns with images: {', '.join(columns)}. Rename the one to "
                f"encode to `image`."
            )
        return members if len(columns) == 1 else []

    with ThreadPoolExecutor(CONCURRENT_FOOTERS) as pool:
        files = [name for name in listing.files if name.endswith(".parquet")]
        members = [member for found in pool.map(read_footer, files) for member in found if member.samples]
    if problems:
        raise (RequestError if members else Unusable)(problems[0])

    def make(name: str, members: tuple[Member, ...]) -> ParquetUnit:
        return ParquetUnit(name, listing.address, listing.store, members)

    def file_of(member: Member) -> str:
        return member.name.rpartition("#")[0]

    if not members:
        return None
    notes = tuple(_notes(dict.fromkeys(map(file_of, members))))
    return Found("parquet files with images", listing, members, make, boundary=file_of, notes=notes)


def _notes(files: Iterable[str]) -> Iterator[str]:
    """Yield a note if `files` belong to several splits."""
    splits = list(dict.fromkeys(match[1] for name in files if (match := SPLIT_FILE.fullmatch(name))))
    if len(splits) > 1:
        listed = ", ".join(splits[:MAX_LISTED]) + (" and more" if len(splits) > MAX_LISTED else "")
        yield (
            f"the input has {len(splits)} splits ({listed}), which are encoded together into one root. To encode only "
            f"one of them, set `input` to a folder that has only its files."
        )
