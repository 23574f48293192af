"""One rank of FSDP2 that records the bytes of all live storages, which FSDP resizes in place."""

import json
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.kit.roots import encoding_record
from train.model.backbone import BackboneConfig
from train.model.config import Sharding
from train.model.fit import dry_call
from train.model.memory import StepSettings, run_passes, step_memory
from train.model.network import build_network
from train.model.sharding import shard_weights

HW = (8, 8)
ENCODING = encoding_record(8, 64)
BACKBONE = BackboneConfig().resolved(ENCODING.texts)


class LiveStorages(TorchDispatchMode):
    """Recorder of the peak total of the current sizes of all storages seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args, kwargs)):
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            if isinstance(local, Tensor):
                storage = local.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage)
        alive = [storage for storage in (reference() for reference in self.seen.values()) if storage is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return result


def record(arguments: list[str]) -> None:
    """Write the peak in bytes and its estimate, by kind of sharding, to a file. Weights outweigh activations."""
    (path,) = arguments
    dist.init_process_group("gloo")
    fields = {
        "_class_name": "PixArtTransformer2DModel",
        "num_attention_heads": 4,
        "attention_head_dim": 64,
        "cross_attention_dim": 256,
        "caption_channels": 64,
        "num_layers": 6,
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "use_additional_conditions": False,
        "patch_size": 2,
    }
    config = Path(f"{path}.{dist.get_rank()}.json")
    config.write_text(json.dumps(fields))
    kinds: tuple[Sharding, ...] = ("full", "grad_op")
    network = build_network(config, 0)
    peaks = {sharding: peak(network, sharding) for sharding in kinds}
    if dist.get_rank() == 0:
        found = {sharding: (peaks[sharding], estimate(network, sharding)) for sharding in kinds}
        Path(path).write_text(json.dumps(found))


def peak(network: Any, sharding: Sharding) -> int:
    """Run two steps, and return the peak in bytes."""
    real, call = dry_call(network, BACKBONE, ENCODING, HW, 1, "cpu")
    real.to_empty(device="cpu")
    real.load_state_dict(network.state_dict())
    shard_weights(real, sharding, "float32")
    run_passes(call, "float32")
    with LiveStorages() as live:
        run_passes(call, "float32")
        run_passes(call, "float32")
    return live.peak


def estimate(network: Any, sharding: Sharding) -> int:
    """Return the bytes of which `peak` records the maximum."""
    settings = StepSettings("float32", 1, 1, 8, 0, sharding=sharding, num_processes=2)
    found = step_memory(network, BACKBONE, ENCODING, HW, settings)
    return found.weights + found.gradients + found.activations
