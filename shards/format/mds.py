"""The files of a bucket as its index.json lists them, in compact arrays, and single samples read from them.

The format is mosaicml-streaming's, and any StreamingDataset reads it. A file is

    uint32 samples | uint32 begin of each sample, and end of the last | JSON of the columns | samples

and a sample is the uint32 sizes of its columns of varying size, then the columns. (streaming's own reader holds an
index as a tree of Python objects, reads the offsets again for every sample, and parses the types of its columns each
time.)
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shards.base.durable import DamagedFile
from shards.base.errors import RequestError

HASH = "xxh3_64"
ARRAYS = ("names", "sizes", "samples", "hashes", "parts")
DTYPES = ("float16", "float32", "int32", "int8", "uint8")


@dataclass(frozen=True)
class Column:
    name: str
    encoding: str
    """`str`; `ndarray:float16:8,32,32`; or `ndarray:float16`, where each sample's array says its own shape."""
    size: int | None
    """Bytes; None where it varies, and each sample says."""

    @classmethod
    def of(cls, name: str, encoding: str) -> "Column":
        """With the size that follows from its type.

        Raises:
            RequestError: it is no type that stage 1 writes.
        """
        dtype, shape = array_type(encoding)
        return cls(name, encoding, None if dtype is None or shape is None else math.prod(shape) * dtype.itemsize)


def array_type(encoding: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """dtype and shape of a column's arrays: no shape where each sample has its own, neither for a `str`.

    Raises:
        RequestError: it is no type that stage 1 writes.
    """
    match encoding.split(":"):
        case ["str"]:
            return None, None
        case ["ndarray", dtype] if dtype in DTYPES:
            return np.dtype(dtype), None
        case ["ndarray", dtype, shape] if dtype in DTYPES:
            return np.dtype(dtype), tuple(map(int, shape.split(",")))
    raise RequestError(f"A column of type {encoding!r} is none that stage 1 writes. Do not use this root.")


def part_type(folder: int = 1, name: int = 1) -> np.dtype[np.void]:
    """Of a part: folder below the bucket's, `00042.g0`, samples, and SHA-256 of samples.parquet; it is empty where the
    receipt has to be asked. Strings have this many bytes at most."""
    return np.dtype([("folder", f"S{folder}"), ("name", f"S{name}"), ("samples", np.int64), ("table", "S64")])


@dataclass(frozen=True, eq=False)
class MdsIndex:
    """The files of one bucket, in the index's order; a few dozen bytes for each."""

    names: NDArray[np.bytes_]
    """(files,) paths below the bucket's folder, such as 00042/shard.00000.mds."""
    sizes: NDArray[np.int64]
    """(files,) bytes."""
    samples: NDArray[np.int64]
    """(files,)."""
    hashes: NDArray[np.uint64]
    """(files,) xxh3_64."""
    columns: tuple[Column, ...]
    parts: NDArray[np.void]
    """(parts,) of `part_type`, in the same order: each part's files stand together."""

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """The path of a file below the bucket's folder."""
        return bytes(self.names[index]).decode()

    @property
    def num_samples(self) -> int:
        return int(self.samples.sum())

    def save(self, folder: Path) -> None:
        """Into a folder that is there, all but the columns."""
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def mapped(cls, folder: Path, columns: tuple[Column, ...]) -> "MdsIndex":
        """One that was saved; in memory that all share who map it."""
        return cls(columns=columns, **{name: mapped(folder, name) for name in ARRAYS})


def mapped(folder: Path, name: str) -> NDArray[Any]:
    """An array of a folder, NAME.npy; all who map it share its memory."""
    array: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return array


def parse_index(data: bytes, where: str) -> MdsIndex:
    """The bytes of BUCKET/index.json → its files.

    Args:
        data: the bytes.
        where: the index's own path or address, for people.

    Raises:
        RequestError: it is no index, or not one that stage 1 writes, or it names a file outside its folder.
    """
    known: dict[str, tuple[Column, ...]] = {}

    def compact(value: dict[str, Any]) -> Any:
        # every file's entry as soon as it is read, so that the index is never in memory as Python objects
        if "raw_data" not in value:
            return value
        if value["format"] != "mds" or value["compression"] is not None:
            raise RequestError(f"{where} lists {value['format']} files, compression {value['compression']}: not ours.")
        fields = (value["column_names"], value["column_encodings"], value["column_sizes"])
        columns = known.setdefault(repr(fields), tuple(Column(*column) for column in zip(*fields, strict=True)))
        file = value["raw_data"]
        return file["basename"].encode(), file["bytes"], value["samples"], int(file["hashes"][HASH], 16), columns

    try:
        index = json.loads(data, object_hook=compact)
        entries = index["shards"]
        names, sizes, samples, hashes, columns = zip(*entries, strict=True) if entries else ((),) * 5
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"{where} is not an index that stage 1 wrote ({type(error).__name__}: {error}). Write it anew with `python "
            f"-m shards index ROOT`."
        ) from error
    if len(set(columns)) > 1:
        raise RequestError(f"{where} lists files with different columns. Do not use this root.")
    for name in names:
        path = PurePosixPath(name.decode())
        if path.is_absolute() or ".." in path.parts:
            raise RequestError(f"{where} names a file outside its folder, {name.decode()!r}. Do not use this root.")
    return MdsIndex(
        names=np.array(names, np.bytes_),
        sizes=np.array(sizes, np.int64),
        samples=np.array(samples, np.int64),
        hashes=np.array(hashes, np.uint64),
        columns=columns[0] if columns else (),
        parts=_parts_of(names, samples),
    )


def _parts_of(names: Sequence[bytes], samples: Sequence[int]) -> NDArray[np.void]:
    """The parts of files, by their folders, in the order of the index."""
    totals: dict[bytes, int] = {}
    for name, count in zip(names, samples, strict=True):
        folder = name.rpartition(b"/")[0]
        totals[folder] = totals.get(folder, 0) + count
    longest = max(map(len, totals), default=1)
    rows = [(folder, folder + b".g0", count, b"") for folder, count in totals.items()]
    return np.array(rows, part_type(longest, longest + 3))


def hash_file(path: str) -> int:
    """xxh3_64 of a file's bytes."""
    with open(path, "rb", buffering=0) as file:
        digest: Any = hashlib.file_digest(file, xxhash.xxh3_64)  # type: ignore[arg-type]  # it lacks what is not asked of it
    return digest.intdigest()


def read_offsets(descriptor: int, num_samples: int, path: str) -> NDArray[np.uint32]:
    """(samples + 1,) where each sample begins, and where the last one ends.

    Raises:
        DamagedFile: the file's header does not hold `num_samples` samples.
    """
    return parse_offsets(os.pread(descriptor, header_size(num_samples), 0), num_samples, path)


def header_size(num_samples: int) -> int:
    """Size in bytes of the offsets at the start of a file with this many samples."""
    return 4 * (num_samples + 2)


def parse_offsets(data: bytes, num_samples: int, path: str) -> NDArray[np.uint32]:
    """Parse the first `header_size` bytes of a file; returns the same as `read_offsets`.

    Raises:
        DamagedFile: the header does not hold `num_samples` samples.
    """
    if len(data) != header_size(num_samples) or struct.unpack_from("<I", data)[0] != num_samples:
        raise DamagedFile(f"{path} is damaged: its header does not hold the {num_samples} samples that its index says.")
    return np.frombuffer(data, np.uint32)[1:]


def read_sample(descriptor: int, offsets: NDArray[np.uint32], row: int, path: str) -> bytes:
    """The bytes of one sample of a file with these offsets.

    Raises:
        DamagedFile: the file ends before the sample does.
    """
    begin, end = offsets[row : row + 2].tolist()
    data = os.pread(descriptor, end - begin, begin)
    if len(data) != end - begin:
        raise DamagedFile(f"{path} was cut short while it was read. Restore the file from its copy.")
    return data


class Decoder:
    """Bytes of a sample → its columns; arrays are views of the bytes."""

    def __init__(self, columns: Sequence[Column]):
        """Raises RequestError where a column is of no type that stage 1 writes."""
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
    """What stands before an array that says its own shape: axes × 4 + log2 of the bytes of each side, and the sides."""
    width = next(i for i in range(3) if max(shape) < 1 << (8 << i))
    return bytes([len(shape) << 2 | width]) + np.array(shape, f"<u{1 << width}").tobytes()


def _array_with_shape(dtype: np.dtype[Any], data: bytes, position: int) -> NDArray[Any]:
    axes, width = data[position] >> 2, 1 << (data[position] & 3)
    shape = np.ndarray(axes, f"<u{width}", data, position + 1).tolist()
    return np.ndarray(shape, dtype, data, position + 1 + axes * width)
