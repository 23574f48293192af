"""Sharding of weights, gradients and optimizer state across processes (FSDP2). Without sharding, each process holds
everything (DDP).

A checkpoint can be resumed with or without sharding. The trainer calls `fully_shard` itself, both with NCCL and with
gloo, because accelerate's FSDP2 plugin does nothing on CPUs, on which the tests run.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shards.base.device import Precision
from train.model.blocks import find_blocks
from train.model.config import Sharding


def group_mesh(size: int | None, num_processes: int, device_type: str) -> DeviceMesh | None:
    """Return the mesh that shards weights within groups of `size` consecutive processes and replicates them across the
    groups (HSDP), or None if one group contains all processes.

    All processes must call this. Their number must be a multiple of `size`, unless it is smaller than `size`.
    """
    if size is None or size >= num_processes:
        return None
    return init_device_mesh(device_type, (num_processes // size, size), mesh_dim_names=("replicate", "shard"))


def allocate(network: nn.Module, device: torch.device | str) -> None:
    """Replace a network's weights, which are on the meta device, with uninitialized ones on `device`, and move its
    buffers there."""
    buffers = dict(network.named_buffers())
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])


def send_weights(network: nn.Module, device: torch.device, shard: Callable[[], None] | None) -> None:
    """Move a network to the device on all processes, with the main process's weights and buffers, bit for bit.

    Only the main process has to build the weights; those of the others are ignored and may be on the meta device.
    Tensors are sent one at a time, and the main process frees each one after sending it, so at most one process needs
    memory for more than its share. All processes must call this.

    Args:
        shard: shards the network, which is on the meta device when it is called; None: each process holds all weights.
    """
    is_main = dist.get_rank() == 0
    sent = {name: tensor.detach() for name, tensor in named_tensors(network)} if is_main else {}
    network.to("meta")
    if shard is not None:
        shard()
    network.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in named_tensors(network):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if is_main:
                whole.copy_(sent.pop(name))
            dist.broadcast(whole, src=0)
            tensor.copy_(shard_like(whole, tensor))


def named_tensors(network: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and values of a network's parameters and buffers."""
    return [*network.named_parameters(), *network.named_buffers()]


def shard_weights(network: nn.Module, sharding: Sharding, precision: Precision, mesh: DeviceMesh | None = None) -> None:
    """Shard every weight across processes, in place. All processes must hold the same weights beforehand, or none
    (on the meta device).

    Weights are gathered block by block. With `grad_op`, they stay gathered from the forward pass until the end of the
    backward pass. Gradients are averaged in float32 after each microbatch, so that no process holds all gradients; with
    groups of processes, they are averaged across groups only if a module's `set_requires_all_reduce` says so.

    Args:
        mesh: from `group_mesh`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bfloat16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # autocast casts them
    )
    for module in find_blocks(network).values():
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding == "full")
    fully_shard(network, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding == "full")


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP gathers, one at a time."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(network: nn.Module) -> None:
    """Free gathered weights after a forward pass that is not followed by a backward pass."""
    for module in sharded_modules(network):
        module.reshard()


def gather(tensor: Tensor) -> Tensor:
    """Return the full (unsharded) tensor. A tensor that is not sharded is returned unchanged.

    All processes must call this.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, model: Tensor) -> Tensor:
    """Shard `tensor`, which all processes hold, in the same way as `model`, and return this process's shard.

    If `model` is not sharded or has a different shape, `tensor` is returned unchanged.
    """
    if not isinstance(model, DTensor) or tensor.shape != model.shape:
        return tensor
    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)
