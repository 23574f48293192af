"""Weights, gradients and optimizer state over the processes: whole on each (DDP), or spread (FSDP2).

Checkpoints never show which.

The trainer calls `fully_shard` itself, on gloo as on NCCL, so that what is tested on CPUs is what runs on GPUs:
accelerate's own FSDP2 plugin does nothing on a CPU.
"""

import os

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shards.base.device import Precision
from shards.base.errors import RequestError
from train.model.blocks import find_blocks
from train.model.config import Sharding


def launched_sharding() -> Sharding | None:
    """What accelerate's launcher was told of FSDP (`configs/accelerate/fsdp2_*.yaml`); None where nothing.

    The request is taken out of the environment: accelerate is to start plain processes.

    Raises:
        RequestError: FSDP on a CPU, where accelerate ignores it silently, or a kind that this trainer does not do.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if not torch.cuda.is_available():
        raise RequestError(
            "The launcher asks for FSDP, which is for GPUs, and there is none. Launch with "
            "configs/accelerate/ddp.yaml. "
            "`--sharding full` and `--sharding grad_op`, the trainer's own, do work on CPUs."
        )
    version, offload = os.environ.get("FSDP_VERSION", "1"), os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower()
    if version != "2" or offload == "true":
        raise RequestError(
            f"The launcher asks for FSDP version {version} with parameter offload {offload}; this trainer does version "
            f"2 without offload. Launch with configs/accelerate/fsdp2_full_shard.yaml or fsdp2_grad_op.yaml."
        )
    os.environ["ACCELERATE_USE_FSDP"] = "false"
    return "full" if os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true" else "grad_op"


def split_weights(unet: nn.Module, sharding: Sharding, precision: Precision) -> None:
    """Leave to each process its share of every weight, in place; all of them must hold the same whole ones before.

    Blocks are gathered one by one; with `grad_op` they stay whole from the forward pass to
    the end of the backward pass. Gradients are averaged in float32 after each microbatch: none is to be held whole.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bfloat16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # autocast does
    )
    for module in find_blocks(unet).values():
        fully_shard(module, mp_policy=policy, reshard_after_forward=sharding == "full")
    fully_shard(unet, mp_policy=policy, reshard_after_forward=sharding == "full")


def reshard(unet: nn.Module) -> None:
    """After a forward pass without a backward pass, which leaves weights whole: back to the shares."""
    for module in unet.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The tensor that all processes hold shares of, or `tensor` where it is whole; every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_like(tensor: Tensor, model: Tensor) -> Tensor:
    """This process's share of a whole tensor that all have, cut as `model` is; `tensor` where `model` is whole."""
    if not isinstance(model, DTensor) or tensor.shape != model.shape:
        return tensor
    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)
