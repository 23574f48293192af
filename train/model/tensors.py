"""safetensors files written tensor by tensor: what is saved is never held twice, on a device or in memory."""

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
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor], mine: Collection[str] | None = None) -> str:
    """Write the bytes that safetensors' `save_file` would, of those that are `mine`, or all; returns their SHA-256.

    Tensors of which every process holds a share are gathered one at a time, so all processes call this; those whose
    `path` is None only take part in that.

    Raises:
        OSError: the file could not be written.
    """
    order = laid_out(tensors)
    if path is None:
        for name in order:
            whole(tensors[name].detach())
        return ""
    digest = hashlib.sha256()
    gathered = ((name, whole(tensors[name].detach())) for name in order)
    try:
        with path.open("wb") as file:
            for data in chain(
                [header({name: tensors[name] for name in order if mine is None or name in mine})],
                (as_bytes(tensor) for name, tensor in gathered if mine is None or name in mine),
            ):
                digest.update(data)
                file.write(data)
    except OSError as error:  # of a write it names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()


def laid_out(tensors: Mapping[str, Tensor]) -> list[str]:
    """Their names, in the order of a file."""
    return sorted(tensors, key=lambda name: (list(DTYPES).index(tensors[name].dtype), name))


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


def owners(tensors: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """Name → which of `count` processes writes it: consecutive ones of a file, of about as many bytes for each."""
    total, before, found = max(bytes_of(tensors), 1), 0, {}
    for name in laid_out(tensors):
        found[name] = before * count // total
        before += tensors[name].numel() * tensors[name].element_size()
    return {name: min(owner, count - 1) for name, owner in found.items()}


def share_name(path: Path, number: int, count: int) -> Path:
    """`x.safetensors` => `x-00002-of-00004.safetensors`, as diffusers names files that belong together."""
    return path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}{path.suffix}")


def write_index(path: Path, shares: Mapping[str, str]) -> Path:
    """Beside the shares of `path`, which of them each tensor is in, as diffusers wants it; returns its path."""
    index = path.with_name(f"{path.name}.index.json")
    content = {"metadata": {}, "weight_map": dict(sorted(shares.items()))}
    index.write_text(json.dumps(content, indent=2) + "\n")
    return index


def file_of(path: Path) -> Path:
    """`path`, or, where it is not there, the index of its shares."""
    return path if path.is_file() else path.with_name(f"{path.name}.index.json")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of the shares that the index at `path`, or the one beside it, names."""
    path = file_of(path)
    if path.suffix != ".json":
        return load_file(path)
    names = set(json.loads(path.read_text())["weight_map"].values())
    return {key: value for name in sorted(names) for key, value in load_file(path.with_name(name)).items()}


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Of all of them, whole."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class HostCopies:
    """Room in the CPU's memory for one copy of what is saved. Every save uses it again.

    Fresh memory would cost more than the copy: the kernel finds each page, and page-locks it for copies from a GPU.
    """

    def __init__(self) -> None:
        self.rooms: dict[tuple[str, str], Tensor] = {}
        self.devices: set[torch.device] = set()

    @property
    def bytes(self) -> int:
        """That are held."""
        return sum(room.numel() * room.element_size() for room in self.rooms.values())

    def take(self, file: str, tensors: Mapping[str, Tensor], mine: Collection[str]) -> dict[str, Tensor]:
        """Copies of those of a file's tensors that are `mine`, once `wait` has returned; good until the next `take`.

        Shares are gathered as `write_tensors` does it, in its order: other processes may call that one.
        """
        copies = {}
        for name in laid_out(tensors):
            source = whole(tensors[name].detach())
            if name not in mine:
                continue
            room = self.rooms.get((file, name))
            if room is None or (room.shape, room.dtype) != (source.shape, source.dtype):
                room = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self.rooms[file, name] = room
            copies[name] = room.copy_(source, non_blocking=True)
            self.devices |= {source.device} if source.is_cuda else set()
        return copies

    def wait(self) -> None:
        """Until GPUs have done the copies that were begun."""
        for device in self.devices:
            torch.cuda.synchronize(device)


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its control group (cgroup v2), where one is set.

    Where neither is known, as off Linux, there is no bound.
    """
    found = [2**63]
    with suppress(FileNotFoundError):
        found += [int(kilobytes) * 1024 for kilobytes in re.findall(r"MemAvailable: +(\d+)", MEMINFO.read_text())]
    with suppress(FileNotFoundError):
        limit = (CGROUP / "memory.max").read_text().strip()
        # of what is counted, the page cache gives way
        inactive = re.search(r"^inactive_file (\d+)", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        if limit != "max" and inactive:
            found.append(int(limit) - int((CGROUP / "memory.current").read_text()) + int(inactive[1]))
    return min(found)
