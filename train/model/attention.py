"""Selection of attention kernels."""

import torch


def choose_attention(device: torch.device) -> None:
    """Disable the kernels of scaled_dot_product_attention that are wrong or slow for training on this device.

    Call this before the network is compiled, because a graph keeps the kernel that was chosen when it was traced.
    """
    if device.type == "cuda":
        # torch >= 2.11 prefers cuDNN's kernel on Hopper, whose backward pass returns NaN for some sequence lengths
        # (pytorch #196678); enable it again only once the GPU check has shown it to be safe
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        # this flag also governs the CPU kernel, whose bfloat16 backward pass is 5 to 15 times slower than the plain
        # one on the short sequences that are trained on a CPU
        torch.backends.cuda.enable_flash_sdp(False)
