"""Kernels that Inductor generates for a network on the pretended GPU.

Autograd cannot be traced on fake GPU tensors without a driver. Networks are therefore traced on fake CPU tensors, and
the graphs are moved to the GPU when they are lowered.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
import torch._inductor.debug
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx, ir, scheduler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from bench.roofline.kernels import Kernel, kind_of
from bench.roofline.pretend import cudnn_layouts, pretended_gpu

GPU = torch.device("cuda", 0)


def lowered(network: nn.Module, call: Callable[[], Tensor], training: bool) -> tuple[list[Kernel], int]:
    """Return the kernels of a forward pass and, if `training`, of the backward pass, and the bytes saved between them.

    Must be called under `fake_tensors`.

    Args:
        call: calls `network`.
    """
    kernels: list[Kernel] = []
    saved = [0]

    def compiler(is_backward: bool) -> Callable[..., Any]:
        def lower(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            original = deepcopy(graph)
            if training and not is_backward:
                saved[0] = _saved_bytes(original)
            with pretended_gpu():
                kernels.extend(_schedule(graph, inputs, is_backward, is_inference=not training))

            def run(arguments: list[Any]) -> Any:
                return original(*arguments)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return lower

    def partition(graph: torch.fx.GraphModule, inputs: Any, **named: Any) -> Any:
        compile_fx._recursive_joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **named)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=compiler(False),
            bw_compiler=compiler(True),
            inference_compiler=compiler(False),
            decompositions=select_decomp_table(),
            partition_fn=partition,
        )

    torch.compiler.reset()
    with inductor.patch(fx_graph_cache=False, compile_threads=1), cudnn_layouts(), torch.set_grad_enabled(training):
        answer = torch.compile(call, backend=backend, fullgraph=True, dynamic=False)()
        if training:
            answer.backward(torch.ones_like(answer))
    return kernels, saved[0]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make all new tensors fake, and attention flash attention, within the context."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, False, scale=scale)[0]

    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(F, "scaled_dot_product_attention", attention):
        yield


def _schedule(graph: torch.fx.GraphModule, inputs: list[Any], is_backward: bool, is_inference: bool) -> list[Kernel]:
    _move(graph)
    mode = torch._guards.detect_fake_mode(inputs)
    assert mode is not None
    with mode:
        moved = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
            if isinstance(value, Tensor)
            else value
            for value in inputs
        ]
    with V.set_fake_mode(mode), torch.no_grad():
        view_to_reshape(graph)
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
        compile_fx._recursive_post_grad_passes(graph, is_inference)
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
        layouts = GraphLowering.decide_layout_opt(graph, is_inference=is_inference)
        lowering = GraphLowering(
            graph, example_inputs=moved, is_backward=is_backward, is_inference=is_inference, layout_opt=layouts
        )
        with (
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
            V.set_debug_handler(torch._inductor.debug.DebugContext()),
        ):
            lowering.run(*moved)
            context = torch._guards.TracingContext.try_get()
            if context is not None and not is_backward:
                # the backward pass is traced with these strides, as in Inductor
                context.output_strides = list(map(_strides, lowering.graph_outputs))
            lowering._update_scheduler()
            return [_kernel(node) for node in lowering.scheduler.nodes if _is_launched(node)]


def _move(graph: torch.fx.GraphModule) -> None:
    """Replace all devices in the graph by the GPU."""

    def moved(value: Any) -> Any:
        return GPU if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args, node.kwargs = (torch.fx.node.map_aggregate(part, moved) for part in (node.args, node.kwargs))
    graph.recompile()


def _is_launched(node: Any) -> bool:
    # kernels with several outputs have an extra node for each output
    is_output = type(node.node).__name__ == "MultiOutput"
    return not isinstance(node, scheduler.NopKernelSchedulerNode) and not is_output


def _kernel(node: Any) -> Kernel:
    num_bytes = int(node.get_read_write_buffers_sizes())
    if not isinstance(node.node, ir.ExternKernel):
        is_reduction = any(getattr(part, "is_reduction", lambda: False)() for part in node.get_nodes())
        return Kernel("reduction" if is_reduction else "pointwise", num_bytes)
    made = node.node
    kind = kind_of(str(getattr(made, "python_kernel_name", None) or getattr(made, "op_overload", None) or type(made)))
    layouts = [(size, stride) for size, stride in map(_layout, made.inputs) if kind == "convolution" and len(size) == 4]
    others = [1 for size, stride in layouts if size[1] > 1 and size[2] > 1 and stride[1] != 1]
    return Kernel(kind, num_bytes, len(others))


def _layout(buffer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not hasattr(buffer, "get_size"):
        return (), ()
    return tuple(int(n) for n in buffer.get_size()), _strides(buffer) or ()


def _strides(buffer: Any) -> tuple[int, ...] | None:
    try:
        return tuple(int(n) for n in buffer.get_stride())
    except (AttributeError, NotImplementedError):  # not a tensor, such as a size
        return None


def _saved_bytes(forward: torch.fx.GraphModule) -> int:
    """Return the bytes of saved activations: outputs for the backward pass that are not inputs of the forward pass."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    handed = [node for node in output.args[0][1:] if isinstance(node, torch.fx.Node) and node.op != "placeholder"]
    values = (node.meta.get("val") for node in dict.fromkeys(handed))
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
