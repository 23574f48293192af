"""Which attention kernels torch may choose from."""

import torch


def choose_attention(device: torch.device) -> None:
    """Switch off the kernels of scaled_dot_product_attention that are wrong or slow in training on this device.

    Must run before the network is compiled: a graph keeps the kernel that was chosen when it was traced.
    """
    if device.type == "cuda":
        # torch >= 2.11 prefers cuDNN's on Hopper, whose backward pass returns NaN for some sequence lengths
        # (pytorch #196678); switch it on again only after the GPU check has shown it to be safe
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        # the name is CUDA's, but it governs the CPU's kernel too, whose bfloat16 backward pass is 5 to 15 times slower
        # than the plain one on the short sequences that a CPU trains on
        torch.backends.cuda.enable_flash_sdp(False)
