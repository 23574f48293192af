"""Classes of GPU kernels and operators, by their names."""

import re

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
"""Class, and a pattern for names of its kernels or aten operators. The first match counts. Norms and softmax are
reductions, and a type conversion is a copy if it is a separate kernel."""


def kind_of(name: str) -> str:
    """Return the class of a kernel or operator by its name, or `other`."""
    bare = name.lower().removeprefix("aten::").removeprefix("aten.")
    return next((kind for kind, pattern in CLASSES if re.search(pattern, bare)), "other")
