"""One optimizer step on one rank's share of a global batch: tensors in, tensors out.

`TrainStep` needs no run folder, launcher or log, so it also works in a notebook, a benchmark or a test.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shards.base.device import SAFE_KERNELS, AttentionKernel, Precision, choose_attention, is_accelerator
from train.data.batch import Batch
from train.data.draws import Draws
from train.model.channels_last import keep_channels_last
from train.model.config import Sharding
from train.model.ema import Ema
from train.model.norms import use_low_precision_norms
from train.model.optimizer import Optimizer
from train.model.recompute import recompute_blocks
from train.model.sharding import send_weights, shard_weights, sharded_modules
from train.objective.alignment import Aligned
from train.objective.loss import DiffusionLoss, Losses, NoisyBatch
from train.objective.sums import LossSums
from train.run.checkpoints.snapshot import Snapshot, average_files, take_snapshot
from train.run.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """The result of a step on this rank. Its tensors are on the device, and the host has not waited for them."""

    grad_norm: Tensor
    """() gradient norm over all ranks, before clipping."""
    skipped: Tensor
    """() 1 if the step was skipped because the gradient was not finite, otherwise 0. It is the same on all ranks."""
    sums: LossSums
    """This rank's losses, summed by quarter of the time axis."""
    alignment: Tensor | None
    """() sum of this rank's alignment losses (REPA); None: no layer is aligned."""


@dataclass
class TrainStep:
    """One optimizer step: forward and backward passes over microbatches, the update, and the moving averages."""

    accelerator: Accelerator
    network: Any
    """The diffusers network to train. Its parameters have the names that checkpoints and exports use."""
    loss: DiffusionLoss
    optimizer: Optimizer
    microbatch_size: int
    """Number of samples per forward pass, at most this rank's share of the global batch."""
    seed: int = 0
    model: Any = None
    """`network`, or `loss.aligned`, which contains it, after wrapping by accelerate; None: `network` itself."""
    averages: dict[str, Ema] = field(default_factory=dict)
    """Moving averages by their folder in a checkpoint. `ema` is the run's own average; from the others, an average of
    any width can be rebuilt later."""
    compiled: bool = False
    """Whether the network is compiled. If so, all microbatches are padded to the same size, so that they share a
    graph."""
    weight_casts: AbstractContextManager[object] | None = None
    """Context around all microbatches of a step. The default is a disabled autocast, inside which torch caches the
    casts of the weights, so that each weight is cast once per step instead of once per microbatch."""

    mesh: DeviceMesh | None = None
    """The mesh of the sharded weights; None: they are not sharded, or across all processes."""

    def __post_init__(self) -> None:
        if self.model is None:
            self.model = self.network
        self.sharded = sharded_modules(self.model)
        if self.weight_casts is None:
            self.weight_casts = torch.autocast(self.accelerator.device.type, enabled=False)

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Train on this rank's share of the global batch for step `step`, counted from 0.

        Args:
            batch: this rank's share, on any device, with one or more captions per sample.
        """
        assert self.weight_casts is not None
        noisy = self.add_noise(batch, step)
        microbatches = list(noisy.microbatches(self.microbatch_size, filled=self.compiled))
        losses: list[Losses] = []
        with self.weight_casts:
            for microbatch in microbatches:
                # gradients are averaged once, on the last microbatch; those of sharded weights are averaged within a
                # group of processes on every microbatch, and across groups on the last one
                is_last = microbatch is microbatches[-1]
                for module in self.sharded:
                    module.set_requires_all_reduce(is_last, recurse=False)
                with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                    microbatch_losses = self.loss(self.model, microbatch)
                    self.accelerator.backward(microbatch_losses.total.sum() / len(batch))
                losses.append(microbatch_losses)
        sums, alignment = self._sum_losses(losses, noisy.timesteps)
        grad_norm, skipped = self.optimizer.step(self.model, step, self._keeps_gradients(microbatches))
        for average in self.averages.values():
            average.update(self.network.named_parameters(), step + 1)
        return StepResult(grad_norm, skipped, sums, alignment)

    def add_noise(self, batch: Batch, step: int) -> NoisyBatch:
        """Choose one caption per sample, move the batch to the device, and add the noise for step `step`."""
        # captions are chosen on the CPU, so that only the chosen ones are copied to the device
        batch = batch.draw_captions(Draws(self.seed, step, batch.slots)).to(self.accelerator.device)
        return self.loss.add_noise(batch, Draws(self.seed, step, batch.slots, fused=self.compiled))

    def _sum_losses(self, losses: list[Losses], timesteps: Tensor) -> tuple[LossSums, Tensor | None]:
        """Sum the losses and the alignment losses (None if no layer is aligned) of all microbatches."""
        per_sample = torch.cat([each.per_sample.detach() for each in losses])
        sums = LossSums.of(per_sample, timesteps, self.loss.path.num_train_timesteps, self.microbatch_size)
        aligned = [each.aligned.detach().sum() for each in losses if each.aligned is not None]
        return sums, sum(aligned[1:], aligned[0]) if aligned else None

    def settle_gradient_order(self, batch: Batch, step: int) -> None:
        """Run a backward pass and discard its gradients, so that DDP settles the order of its gradient buckets.

        DDP reorders its buckets once, after the first backward pass. With three or more processes, the order of the
        buckets affects the rounding of summed gradients, so without this pass, the first step after a resume would
        differ from the same step in an uninterrupted run. Call this before the first step of a launch.
        """
        assert self.weight_casts is not None
        if self.uses_ddp:
            microbatches = list(self.add_noise(batch, step).microbatches(self.microbatch_size, filled=self.compiled))
            with self.weight_casts:
                self.loss(self.model, microbatches[0]).total.sum().backward()
            self.optimizer.forget_gradients(self._keeps_gradients(microbatches))

    def _keeps_gradients(self, microbatches: Sequence[NoisyBatch]) -> bool:
        """Return whether gradients are set to zero after a step rather than freed.

        DDP never frees its gradient buckets, and gradients are views of them after an all-reduce. If they were freed,
        all microbatches but the last one would accumulate new gradients outside the buckets, which takes another 4
        bytes per parameter. A single microbatch does not accumulate, and is faster without the zeros.
        """
        return self.uses_ddp and len(microbatches) > 1

    @property
    def uses_ddp(self) -> bool:
        """Whether the network is replicated in several processes by DDP."""
        # `_orig_mod`: accelerate may have compiled the DDP wrapper
        return isinstance(getattr(self.model, "_orig_mod", self.model), DistributedDataParallel)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of this process, other than the default group."""
        return [] if self.mesh is None else self.mesh.get_all_groups()

    @property
    def aligned(self) -> Aligned | None:
        """The network together with its projection head, if a layer is aligned (REPA)."""
        return self.loss.aligned

    @property
    def ema(self) -> Ema | None:
        """The run's own moving average."""
        return self.averages.get("ema")

    def snapshot(self, state: TrainState, lines: Mapping[str, int]) -> Snapshot:
        """Return the contents of a checkpoint after the last step. No tensors are copied yet.

        Args:
            lines: name of each log file in the run folder → its size in bytes up to this step.
        """
        if self.accelerator.scaler is not None:
            state.scaler = self.accelerator.scaler.state_dict()
        head = self.aligned.head if self.aligned is not None else None
        return take_snapshot(state, self.network, self.optimizer.torch_optimizer, self.averages, head, lines)

    def snapshot_averages(self, state: TrainState) -> Snapshot | None:
        """Return a snapshot of the averages from which an average of any width can be rebuilt, or None without them."""
        averages = {name: average for name, average in self.averages.items() if name != "ema"}
        if not averages or any(average.average is None for average in averages.values()):
            return None
        dtype = getattr(torch, self.averages["ema"].config.snapshot_dtype)
        return Snapshot(deepcopy(state), average_files(self.network, averages, dtype))


def place_network(
    network: nn.Module,
    device: torch.device,
    *,
    channels_last: bool | None = None,
    low_precision_norms: bool = False,
    gradient_checkpointing: float = 0.0,
    sharding: Sharding = "none",
    precision: Precision = "float32",
    mesh: DeviceMesh | None = None,
    attention: Collection[AttentionKernel] = SAFE_KERNELS,
) -> None:
    """Move a network to the device in place, and apply the memory format, norms, checkpointing and sharding.

    Call it before building an optimizer, because it replaces the parameters. With several processes, all receive the
    main process's weights, so the others can pass a network without weights.

    Args:
        channels_last: whether to use the channels-last memory format; None: only on GPUs.
        gradient_checkpointing: share of the blocks to recompute.
        sharding: modes other than `none` need a process group.
        precision: data type in which sharded weights are gathered.
        mesh: see `shard_weights`.
        attention: kernels that torch may choose from, on GPUs.
    """
    if gradient_checkpointing:
        recompute_blocks(network, gradient_checkpointing)
    if low_precision_norms:
        use_low_precision_norms(network)
    is_sharded = sharding != "none"
    if dist.is_initialized():
        shard = partial(shard_weights, network, sharding, precision, mesh) if is_sharded else None
        send_weights(network, device, shard)
    else:
        network.to(device)
    # fully_shard accepts only contiguous weights
    if not is_sharded and (is_accelerator(device) if channels_last is None else channels_last):
        keep_channels_last(network)
    choose_attention(device, attention)
