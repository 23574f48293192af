"""Operations that eager torch would launch on a GPU, and the FLOPs of each class."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bench.roofline.kernels import Kernel, kind_of

NO_KERNEL = ("device", "empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view", "alias")


class Operations(TorchDispatchMode):
    """Recorder of all operations except views."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.flops: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name, returns = function._overloadpacket.__name__, function._schema.returns
        is_view = bool(returns) and all(of.alias_info is not None and not of.alias_info.is_write for of in returns)
        if is_view or name in NO_KERNEL:
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        kind = kind_of(name)
        kind = "pointwise" if kind == "other" else kind
        planes = [tensor for tensor in given if tensor.dim() == 4 and tensor.shape[1] > 1 and tensor.shape[2] > 1]
        others = [tensor for tensor in planes if not tensor.is_contiguous(memory_format=torch.channels_last)]
        moved = sum(map(num_bytes, given + made))
        self.kernels.append(Kernel(kind, moved, len(others) if kind == "convolution" else 0))
        if function._overloadpacket in flop_registry:
            self.flops[kind] += flop_registry[function._overloadpacket](*args, **kwargs, out_val=result)
        return result


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory behind a tensor, counting expanded dimensions once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def operations(call: Callable[[], Tensor], training: bool) -> Operations:
    """Record a forward pass and, if `training`, the backward pass. Must be called under `fake_tensors`."""
    watch = Operations()
    with torch.set_grad_enabled(training), watch:
        answer = call()
        if training:
            answer.sum().backward()
    return watch
