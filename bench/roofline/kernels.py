"""A device's work: kernels by class, with their bytes and FLOPs, and the time that they take."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from train.model.config import AdamWConfig

MATRIX = ("convolution", "product", "attention")
"""Classes limited by arithmetic as well as by bytes."""
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
"""Class, and a pattern for names of its kernels or operators (aten, Inductor). The first match counts. Norms and
softmax are reductions, and a type conversion is a copy if it is a separate kernel."""
ASSUMED_EFFICIENCY = 0.52
"""Share of a large product's rate that a network reaches, roughly estimated from NVIDIA's MLPerf record."""


@dataclass(frozen=True)
class Kernel:
    """One kernel launch or library call."""

    kind: str
    """A class of `CLASSES`, or `other`."""
    bytes: int
    """Bytes read and written, counting each tensor once."""
    other_layout: int = 0
    """Number of a convolution's tensors that are not channels last and must be copied by cuDNN."""


@dataclass(frozen=True)
class KernelClass:
    """All kernels of one class."""

    kernels: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class DeviceWork:
    """The work of a training step, or of an encoder on a batch."""

    images: int
    classes: dict[str, KernelClass]
    saved_bytes: int = 0
    """Activations saved for the backward pass."""
    other_layouts: int = 0
    """Number of convolution tensors that are not channels last."""

    @property
    def bytes(self) -> int:
        """Bytes of all classes."""
        return sum(part.bytes for part in self.classes.values())

    @property
    def flops(self) -> int:
        """FLOPs of all classes."""
        return sum(part.flops for part in self.classes.values())

    @property
    def kernels(self) -> int:
        """Number of kernels of all classes."""
        return sum(part.kernels for part in self.classes.values())

    def step_of(self, images: int, num_parameters: int) -> "DeviceWork":
        """Scale this microbatch to a step of `images`, and add the optimizer's memory traffic."""
        times = images / self.images
        scaled = {
            kind: KernelClass(*(round(times * of) for of in (part.kernels, part.bytes, part.flops)))
            for kind, part in self.classes.items()
        }
        optimizer = KernelClass(0, num_parameters * AdamWConfig.step_bytes(), 0)
        return DeviceWork(images, {**scaled, "optimizer": optimizer}, self.saved_bytes, self.other_layouts)


@dataclass(frozen=True)
class DeviceRates:
    """Rates that a device reaches."""

    tflops: float
    """TFLOP/s of a large bfloat16 matrix product."""
    efficiency: float
    """Share of that rate which a network's products and convolutions reach; determined by calibration."""
    terabytes: float
    """Memory bandwidth in TB/s."""

    def seconds_of(self, part: KernelClass) -> float:
        """Return the time of a class: that of its arithmetic or of its bytes, whichever is longer."""
        return max(part.flops / (self.tflops * 1e12 * self.efficiency), part.bytes / (self.terabytes * 1e12))

    def seconds(self, work: DeviceWork) -> float:
        """Return the sum of the times of all classes."""
        return sum(map(self.seconds_of, work.classes.values()))

    def images_per_second(self, work: DeviceWork) -> float:
        """Return the images per second on one device."""
        return work.images / self.seconds(work)


def add_up(images: int, kernels: Iterable[Kernel], flops: dict[str, int], saved_bytes: int = 0) -> DeviceWork:
    """Add up kernels by class.

    Args:
        flops: FLOPs of each class of `MATRIX`.
    """
    found = list(kernels)
    kinds = dict.fromkeys([*MATRIX, *(kernel.kind for kernel in found)])
    classes = {
        kind: KernelClass(
            sum(kernel.kind == kind for kernel in found),
            sum(kernel.bytes for kernel in found if kernel.kind == kind),
            flops.get(kind, 0),
        )
        for kind in kinds
    }
    return DeviceWork(images, classes, saved_bytes, sum(kernel.other_layout for kernel in found))


def kind_of(name: str) -> str:
    """Return the class of a kernel or operator by its name."""
    bare = name.lower().removeprefix("aten::").removeprefix("aten.").removesuffix(".default")
    return next((kind for kind, pattern in CLASSES if re.search(pattern, bare)), "other")
