"""What a device is asked to do: kernels by their class, with bytes and arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass

MATRIX = ("convolution", "product", "attention")
"""Classes whose arithmetic counts; the others move bytes alone."""


@dataclass(frozen=True)
class Kernel:
    """One launch, or a library's call."""

    kind: str
    """Of `MATRIX`, or `pointwise`, `reduction` or `other`."""
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


@dataclass(frozen=True)
class Rates:
    """What a device reaches."""

    tflops: float
    """Of a large bfloat16 matrix product."""
    efficiency: float
    """Share of that which a network's products and convolutions reach; what is calibrated."""
    terabytes: float
    """Per second, to and from its memory."""

    def seconds(self, work: Work) -> float:
        """A class takes as long as the slower of its arithmetic and its bytes; classes follow each other."""
        flops_per_second = self.tflops * 1e12 * self.efficiency
        return sum(
            max(part.flops / flops_per_second, part.bytes / (self.terabytes * 1e12)) for part in work.classes.values()
        )

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


def kind_of(operator: str) -> str:
    """The class of an operator, by its name in aten or Inductor."""
    name = operator.lower()
    if "conv" in name:
        return "convolution"
    if "scaled_dot_product" in name or "attention" in name:
        return "attention"
    if "mm" in name:
        return "product"
    return "other"
