"""What a device is asked to do: kernels by their class, with bytes and arithmetic."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from train.model.config import AdamWConfig

MATRIX = ("convolution", "product", "attention")
"""Classes whose arithmetic counts; the others move bytes alone."""
CLASSES = (
    ("reduction", r"^triton_(red|per)"),
    ("pointwise", r"^triton_poi"),
    ("optimizer", r"multi_tensor|adam|foreach"),
    ("copy", r"memcpy|memset|direct_copy|^(copy_?|to|_to_copy|clone|contiguous)$"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("convolution", r"conv|implicit|fprop|dgrad|wgrad|cudnn"),
    ("product", r"gemm|nvjet|cutlass|cublas|mm$|^linear|matmul|triton_tem"),
    ("reduction", r"norm|softmax|reduce|^(sum|mean)$"),
    ("pointwise", r"elementwise|^(add|mul|div|silu|gelu|sub|pow|cat|neg|exp|where|fill)_?(_backward)?$"),
)
"""Class, and what the names of its kernels hold, or of operators of aten and Inductor; the first that fits. Norms and
softmax are reductions; a change of type is a copy, where it is a kernel of its own."""
ASSUMED_EFFICIENCY = 0.52
"""Share of a large product's rate that a network's reach: what NVIDIA's record implies, on a rough count."""


@dataclass(frozen=True)
class Kernel:
    """One launch, or a library's call."""

    kind: str
    """One of `CLASSES`, or `other`."""
    bytes: int
    """Read and written, each tensor once."""
    other_layout: int = 0
    """Of a convolution: how many of its tensors are not channels last, so that cuDNN copies them."""


@dataclass(frozen=True)
class Class:
    """All kernels of one class."""

    kernels: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class Work:
    """A step, or a batch through an encoder."""

    images: int
    classes: dict[str, Class]
    saved_bytes: int = 0
    """Activations that the backward pass waits for."""
    other_layouts: int = 0
    """Convolutions' tensors that are not channels last."""

    @property
    def bytes(self) -> int:
        """Of all classes."""
        return sum(part.bytes for part in self.classes.values())

    @property
    def flops(self) -> int:
        """Of all classes."""
        return sum(part.flops for part in self.classes.values())

    @property
    def kernels(self) -> int:
        """Of all classes."""
        return sum(part.kernels for part in self.classes.values())

    def step_of(self, images: int, num_parameters: int) -> "Work":
        """So many images in microbatches such as this one, and then the optimizer's reading and writing."""
        times = images / self.images
        scaled = {
            kind: Class(*(round(times * of) for of in (part.kernels, part.bytes, part.flops)))
            for kind, part in self.classes.items()
        }
        optimizer = Class(0, num_parameters * AdamWConfig.step_bytes(), 0)
        return Work(images, {**scaled, "optimizer": optimizer}, self.saved_bytes, self.other_layouts)


@dataclass(frozen=True)
class Rates:
    """What a device reaches."""

    tflops: float
    """Of a large bfloat16 matrix product."""
    efficiency: float
    """Share of that which a network's products and convolutions reach; what is calibrated."""
    terabytes: float
    """Per second, to and from its memory."""

    def seconds_of(self, part: Class) -> float:
        """A class takes as long as the slower of its arithmetic and its bytes."""
        return max(part.flops / (self.tflops * 1e12 * self.efficiency), part.bytes / (self.terabytes * 1e12))

    def seconds(self, work: Work) -> float:
        """Classes follow each other."""
        return sum(map(self.seconds_of, work.classes.values()))

    def images_per_second(self, work: Work) -> float:
        """Of one device."""
        return work.images / self.seconds(work)


def add_up(images: int, kernels: Iterable[Kernel], flops: dict[str, int], saved_bytes: int = 0) -> Work:
    """The work of kernels, and the arithmetic of each class of `MATRIX`."""
    found = list(kernels)
    kinds = dict.fromkeys([*MATRIX, *(kernel.kind for kernel in found)])
    classes = {
        kind: Class(
            sum(kernel.kind == kind for kernel in found),
            sum(kernel.bytes for kernel in found if kernel.kind == kind),
            flops.get(kind, 0),
        )
        for kind in kinds
    }
    return Work(images, classes, saved_bytes, sum(kernel.other_layout for kernel in found))


def kind_of(name: str) -> str:
    """The class of a kernel, or of an operator, by its name."""
    bare = name.lower().removeprefix("aten::").removeprefix("aten.").removesuffix(".default")
    return next((kind for kind, pattern in CLASSES if re.search(pattern, bare)), "other")
