"""A model of a GPU's work (kernels, bytes and FLOPs of a step), computed without a GPU."""
