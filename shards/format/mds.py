"""MDS files: a compact in-memory index of a bucket's files, and functions that read single samples.

The format is mosaicml-streaming's, and any StreamingDataset can read it. The layout of a file is

    uint32 number of samples | uint32 start of each sample, and end of the last | JSON of the columns | samples

A sample consists of the uint32 sizes of its variable-size columns, followed by the columns. streaming's own reader is
not used, because it keeps an index as a tree of Python objects, and rereads the offsets and reparses the column types
for every sample.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.base.table import counted

HASH = "xxh3_64"
ARRAYS = ("names", "sizes", "samples", "hashes", "parts")
DTYPES = ("float16", "float32", "int32", "int8", "uint8")
ReadRange = Callable[[int, int], bytes]
"""Function that reads the bytes [start, end) of a file, or fewer if the file is shorter."""


@dataclass(frozen=True)
class Column:
    """Column of an MDS file."""

    name: str
    encoding: str
    """Type of the column: `str`; `ndarray:float16:8,32,32`; or `ndarray:float16` if each sample stores its own
    shape."""
    size: int | None
    """Size in bytes, or None if it varies and each sample stores it."""

    @classmethod
    def of(cls, name: str, encoding: str) -> "Column":
        """Build a column with the size that its type implies. Raises RequestError for a type that stage 1 does not
        write."""
        dtype, shape = array_type(encoding)
        return cls(name, encoding, None if dtype is None or shape is None else math.prod(shape) * dtype.itemsize)


def array_type(encoding: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """Return the dtype and shape of a column's arrays.

    The shape is None if each sample stores its own shape. Both are None for `str`. Raises RequestError for a type that
    stage 1 does not write.
    """
    match encoding.split(":"):
        case ["str"]:
            return None, None
        case ["ndarray", dtype] if dtype in DTYPES:
            return np.dtype(dtype), None
        case ["ndarray", dtype, shape] if dtype in DTYPES:
            return np.dtype(dtype), tuple(map(int, shape.split(",")))
    raise RequestError(
        f"A column has type {encoding!r}, which stage 1 never writes. Restore the root's files from a backup. "
        f"Without a backup, do not use this root."
    )


def part_type(folder: int, name: int) -> np.dtype[np.void]:
    """Return the dtype of a part's record, whose strings have at most `folder` and `name` bytes.

    Fields: the part's folder relative to the bucket's folder, its name (`00042.g0`), its number of samples, and the
    SHA-256 of its samples.parquet.
    """
    return np.dtype([("folder", f"S{folder}"), ("name", f"S{name}"), ("samples", np.int64), ("table", "S64")])


@dataclass(frozen=True, eq=False)
class MdsIndex:
    """Compact index of one bucket's files, in order. It takes a few dozen bytes per file."""

    names: NDArray[np.bytes_]
    """(files,) Paths relative to the bucket's folder, such as 00042/shard.00000.mds."""
    sizes: NDArray[np.int64]
    """(files,) Size of each file in bytes."""
    samples: NDArray[np.int64]
    """(files,) Number of samples in each file."""
    hashes: NDArray[np.uint64]
    """(files,) xxh3_64 hash of each file."""
    columns: tuple[Column, ...]
    parts: NDArray[np.void]
    """(parts,) Records of dtype `part_type`, in the order of the files. The files of a part are adjacent."""

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return a file's path relative to the bucket's folder."""
        return bytes(self.names[index]).decode()

    @property
    def num_samples(self) -> int:
        return int(self.samples.sum())

    @classmethod
    def mapped(cls, folder: Path, columns: tuple[Column, ...]) -> "MdsIndex":
        """Memory-map a saved index, so that all processes share its memory."""
        return cls(columns=columns, **{name: mapped(folder, name) for name in ARRAYS})


def mapped(folder: Path, name: str) -> NDArray[Any]:
    """Memory-map FOLDER/NAME.npy, so that all processes share its memory."""
    array: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return array


def parse_index(data: bytes, where: str) -> list[tuple[str, int, list[Column]]]:
    """Parse the index.json of a part at the path or URL `where`; return each file's name, number of samples and
    columns. Raises RequestError if it is malformed, was not written by stage 1, or names a file outside its folder."""
    files = []
    try:
        for entry in json.loads(data)["shards"]:
            fields = (entry["column_names"], entry["column_encodings"], entry["column_sizes"])
            columns = [Column(*column) for column in zip(*fields, strict=True)]
            files.append((str(entry["raw_data"]["basename"]), int(entry["samples"]), columns))
            if entry["format"] != "mds" or entry["compression"] is not None:
                raise ValueError(f"format {entry['format']}, compression {entry['compression']}")
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{where} is not an index written by stage 1 ({type(error).__name__}: {error}). Restore the file from a "
            f"backup. Without a backup, do not use this root."
        ) from error
    for name, *_ in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise RequestError(f"{where} names a file outside its folder, {name!r}. Do not use this root.")
    return files


def hash_file(path: str) -> int:
    """Return the xxh3_64 of a file's bytes."""
    with open(path, "rb", buffering=0) as file:
        # xxhash implements only the hashlib methods that file_digest calls
        digest: Any = hashlib.file_digest(file, xxhash.xxh3_64)  # type: ignore[arg-type]
    return digest.intdigest()


def reader(descriptor: int) -> ReadRange:
    """Return a function that reads a range of an open file."""
    return lambda start, end: os.pread(descriptor, end - start, start)


def read_offsets(read: ReadRange, num_samples: int, path: str) -> NDArray[np.uint32]:
    """Read the (samples + 1,) offsets of a file: the start of each sample, and the end of the last. Raises DamagedFile
    if the header does not list `num_samples` samples."""
    size = 4 * (num_samples + 2)
    data = read(0, size)
    if len(data) == size and struct.unpack_from("<I", data)[0] == num_samples:
        offsets = np.frombuffer(data, np.uint32)[1:]
        if (offsets[:-1] <= offsets[1:]).all():
            return offsets
    raise DamagedFile(
        f"{path} is damaged: its header does not match its index ({counted(num_samples, 'sample')}). Restore the file "
        f"from a backup."
    )


def read_sample(read: ReadRange, offsets: NDArray[np.uint32], row: int, path: str) -> bytes:
    """Read the bytes of one sample, given the file's offsets. Raises DamagedFile if the file ends before the sample
    does."""
    begin, end = offsets[row : row + 2].tolist()
    data = read(begin, end)
    if len(data) != end - begin:
        raise DamagedFile(f"{path} is truncated: it ends before the end of its last sample. Restore it from a backup.")
    return data


class Decoder:
    """Decoder that converts a sample's bytes to its columns. Decoded arrays are views of the bytes."""

    def __init__(self, columns: Sequence[Column]):
        """Prepare the column types. Raises RequestError for a type that stage 1 does not write."""
        self.columns = [(column.name, column.size, *array_type(column.encoding)) for column in columns]
        self.sizes = struct.Struct(f"<{sum(column.size is None for column in columns)}I")

    def __call__(self, data: bytes) -> dict[str, Any]:
        varying = iter(self.sizes.unpack_from(data))
        position = self.sizes.size
        sample: dict[str, Any] = {}
        for name, fixed, dtype, shape in self.columns:
            size = next(varying) if fixed is None else fixed
            if dtype is None:
                sample[name] = data[position : position + size].decode()
            elif shape is not None:
                sample[name] = np.ndarray(shape, dtype, data, position)
            else:
                sample[name] = _array_with_shape(dtype, data, position)
            position += size
        return sample


def shape_header(shape: tuple[int, ...]) -> bytes:
    """Encode the shape stored before an array: one byte (number of axes × 4 + log2 of the bytes per size), then the
    size of each axis."""
    width = next(i for i in range(3) if max(shape) < 1 << (8 << i))
    return bytes([len(shape) << 2 | width]) + np.array(shape, f"<u{1 << width}").tobytes()


def _array_with_shape(dtype: np.dtype[Any], data: bytes, position: int) -> NDArray[Any]:
    axes, width = data[position] >> 2, 1 << (data[position] & 3)
    shape = np.ndarray(axes, f"<u{width}", data, position + 1).tolist()
    return np.ndarray(shape, dtype, data, position + 1 + axes * width)
