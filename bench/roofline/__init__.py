"""A model of the device's work: bytes, arithmetic and kernels of a training step and of the encoders, without a GPU.

Inside: a GPU that is pretended, kernels as Inductor fuses them for it or as eager torch would start them, times.
In: network configs, and published throughputs to calibrate on.
Out: a section of Markdown, and a file that `make plan` reads as modelled.
"""
