"""Writing safetensors files tensor by tensor, without a second copy of the weights on the device or in host memory."""

import hashlib
import json
import re
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from shards.base.device import device_module, host_buffer, is_accelerator
from shards.base.errors import naming
from train.model.sharding import gather

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
"""Data types in the order in which safetensors arranges tensors in a file."""
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor], mine: Collection[str] | None = None) -> str:
    """Write the same bytes as safetensors' `save_file`, and return the SHA-256 of the file.

    Sharded tensors are gathered one at a time, so all processes must call this.

    Args:
        path: file to write; None: take part in gathering without writing a file.
        mine: names of the tensors to write; None: all.

    Raises:
        OSError: the file could not be written.
    """
    order = file_order(tensors)
    if path is None:
        for name in order:
            gather(tensors[name].detach())
        return ""
    digest = hashlib.sha256()
    gathered = ((name, gather(tensors[name].detach())) for name in order)
    with naming(path), path.open("wb") as file:
        for data in chain(
            [file_header({name: tensors[name] for name in order if mine is None or name in mine})],
            (tensor_bytes(tensor) for name, tensor in gathered if mine is None or name in mine),
        ):
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the tensor names in the order in which safetensors stores them."""
    return sorted(tensors, key=lambda name: (list(DTYPES).index(tensors[name].dtype), name))


def file_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file that contains these tensors, in this order.

    It consists of the length of the JSON, as 8 bytes, and the JSON with each tensor's dtype, shape and offsets, padded
    to a multiple of 8 bytes.
    """
    fields: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        fields[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    data = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def tensor_bytes(tensor: Tensor) -> bytes | memoryview:
    """Return a tensor's elements in row-major order, without a copy if it is contiguous and in host memory."""
    return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def assign_owners(tensors: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """Divide tensors among `count` processes, each of which writes consecutive tensors of about the same total size.

    Returns:
        Tensor name → number of the process that writes the tensor.
    """
    total, before, found = max(bytes_of(tensors), 1), 0, {}
    for name in file_order(tensors):
        found[name] = before * count // total
        before += tensors[name].numel() * tensors[name].element_size()
    return {name: min(owner, count - 1) for name, owner in found.items()}


def share_name(path: Path, number: int, count: int) -> Path:
    """Return the path of shard `number` of `path`, named as in diffusers: `x-00002-of-00004.safetensors`."""
    return path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}{path.suffix}")


def write_index(path: Path, shares: Mapping[str, str]) -> Path:
    """Write the index of a sharded file, in diffusers' format, and return the path of the index.

    Args:
        path: path that the file would have if it were not sharded.
        shares: tensor name → name of the shard that contains it.
    """
    index = path.with_name(f"{path.name}.index.json")
    content = {"metadata": {}, "weight_map": dict(sorted(shares.items()))}
    index.write_text(json.dumps(content, indent=2) + "\n")
    return index


def file_of(path: Path) -> Path:
    """Return `path` if it exists, and otherwise the path of the index of its shards."""
    return path if path.is_file() else path.with_name(f"{path.name}.index.json")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load all tensors from a safetensors file, which may be sharded. `path` may also be the index of the shards."""
    path = file_of(path)
    if path.suffix != ".json":
        return load_file(path)
    names = set(json.loads(path.read_text())["weight_map"].values())
    return {key: value for name in sorted(names) for key, value in load_file(path.with_name(name)).items()}


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the total size of the tensors in bytes, counting sharded tensors in full."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


PIECE_BYTES = 2**30
"""Size of the largest piece of page-locked memory that several tensors share; a power of two."""
ALIGNMENT = 64
"""Each copy begins at a multiple of this many bytes."""


def host_buffers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return uninitialised host memory for a contiguous copy of each tensor, page-locked if they are on a GPU.

    The copies share pieces of memory, because torch rounds each page-locked piece up to a power of two (pytorch
    #150517), which for one piece per tensor can cost half as much memory again.
    """
    devices = {tensor.device for tensor in tensors.values()}
    device = next(filter(is_accelerator, devices), torch.device("cpu"))
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    spans = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
    buffers, piece, begin, left = {}, torch.empty(0, dtype=torch.uint8), 0, sum(spans.values())
    for name, tensor in tensors.items():
        if begin + spans[name] > piece.numel():
            largest = min(PIECE_BYTES, 2 ** (left.bit_length() - 1))  # a power of two that will be filled
            piece, begin = host_buffer((max(spans[name], largest),), torch.uint8, device), 0
        buffers[name] = piece[begin : begin + sizes[name]].view(tensor.dtype).view(tensor.shape)
        begin, left = begin + spans[name], left - spans[name]
    return buffers


class HostCopies:
    """Copies of a checkpoint's tensors in host memory.

    Every save reuses the memory, because allocating and page-locking it again would take longer than the copy.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, dict[str, Tensor]] = {}
        self.devices: set[torch.device] = set()

    @property
    def bytes(self) -> int:
        """Total size of the copies."""
        return sum(map(bytes_of, self.buffers.values()))

    def take(self, file: str, tensors: Mapping[str, Tensor], mine: Collection[str]) -> dict[str, Tensor]:
        """Start copying the tensors of `file` that are named in `mine`, and return the copies.

        The copies are complete once `wait` has returned, and are overwritten by the next call for the same file.
        Sharded tensors are gathered in the same order as in `write_tensors`, which other processes may call at the same
        time.
        """
        order = file_order(tensors)
        wanted = {name: tensors[name].detach() for name in order if name in mine}
        buffers = self.buffers.get(file, {})
        if [(n, b.shape, b.dtype) for n, b in buffers.items()] != [(n, t.shape, t.dtype) for n, t in wanted.items()]:
            self.buffers[file] = buffers = host_buffers(wanted)
        for name in order:
            source = gather(tensors[name].detach())
            if name in wanted:
                buffers[name].copy_(source, non_blocking=True)
                self.devices |= {source.device} if is_accelerator(source.device) else set()
        return dict(buffers)

    def wait(self) -> None:
        """Wait until the copies from GPUs are complete."""
        for device in self.devices:
            device_module().synchronize(device)


def free_memory() -> int:
    """Return the number of bytes that this process can allocate under the limits of its machine and cgroup (v2).

    If neither limit is known, as on systems other than Linux, return a practically infinite number.
    """
    found = [2**63]
    with suppress(FileNotFoundError):
        found += [int(kilobytes) * 1024 for kilobytes in re.findall(r"MemAvailable: +(\d+)", MEMINFO.read_text())]
    with suppress(FileNotFoundError):
        limit = (CGROUP / "memory.max").read_text().strip()
        # the cgroup's usage includes page cache, which the kernel can reclaim
        inactive = re.search(r"^inactive_file (\d+)", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        if limit != "max" and inactive:
            found.append(int(limit) - int((CGROUP / "memory.current").read_text()) + int(inactive[1]))
    return min(found)
