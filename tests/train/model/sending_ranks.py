"""One rank that receives a network's weights from the main process, and measures its memory."""

import ctypes
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights

from train.model.network import build_network
from train.model.sharding import gather, group_mesh, named_tensors, send_weights, shard_weights

MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD."""


def send(arguments: list[str]) -> None:
    """Receive the weights, and write to FOLDER/RANK.json:

    - whether all weights, gathered again, are those of an unsharded start, and all are trainable
    - in bytes, this process's peak memory until it had its weights, its share of them, and all weights
    """
    sharding: Any
    sharding, group, config, folder = arguments
    dist.init_process_group("gloo")
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    mesh = group_mesh(int(group), ranks, "cpu") if sharding != "none" else None
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**16)  # free memory at once, as that of a large network's weights
    dist.broadcast(torch.zeros(2**20), src=0)  # allocates gloo's buffers
    before = memory(reset=True)
    with nullcontext() if rank == 0 else init_empty_weights(include_buffers=False):
        network = build_network(Path(config), 3)
    shard = None if sharding == "none" else partial(shard_weights, network, sharding, "float32", mesh)
    send_weights(network, device, shard)
    peak = memory() - before
    shares = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for _, tensor in named_tensors(network)]
    whole = {name: gather(tensor) for name, tensor in named_tensors(network)}
    is_checked = sharding == "none" or rank % int(group) == 0  # the other ranks of a group gather the same weights
    expected = dict(named_tensors(build_network(Path(config), 3))) if is_checked else whole
    found = {
        "same": whole.keys() == expected.keys() and all(torch.equal(whole[name], expected[name]) for name in whole),
        "trainable": all(parameter.requires_grad for parameter in network.parameters()),
        "peak": peak,
        "share": sum(tensor.nbytes for tensor in shares),
        "all": sum(tensor.nbytes for tensor in whole.values()),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def memory(reset: bool = False) -> int:
    """Return the peak of this process's resident memory in bytes; with `reset`, the peak starts again from here."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
