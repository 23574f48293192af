"""safetensors files written tensor by tensor: what is saved is never held twice, on a device or in memory."""

import hashlib
import json
import struct
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from train.model.sharding import whole

DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""In the order in which the library lays them out."""


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor]) -> str:
    """Write the bytes that safetensors' `save_file` would; returns their SHA-256.

    Tensors of which every process holds a part are gathered one at a time, so all processes call this; those whose
    `path` is None only take part in that.

    Raises:
        OSError: the file could not be written.
    """
    order = sorted(tensors, key=lambda name: (list(DTYPES).index(tensors[name].dtype), name))
    if path is None:
        for name in order:
            whole(tensors[name].detach())
        return ""
    digest = hashlib.sha256()
    try:
        with path.open("wb") as file:
            for data in chain(
                [header({name: tensors[name] for name in order})],
                (as_bytes(whole(tensors[name].detach())) for name in order),
            ):
                digest.update(data)
                file.write(data)
    except OSError as error:  # of a write it names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """The file's head: a length, and JSON with each tensor's type, shape and place, padded to eight bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        fields[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    data = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def as_bytes(tensor: Tensor) -> bytes | memoryview:
    """A whole tensor's elements in row-major order; a copy where it lies elsewhere or otherwise."""
    return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def copied(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Copies in the CPU's memory, gathered one by one; every process calls this, and gets its own where it `keep`s."""
    copies = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor.detach())
        if keep:
            copies[name] = gathered.to("cpu", copy=True).contiguous()
    return copies
