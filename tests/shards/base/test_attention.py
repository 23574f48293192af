"""Attention kernels that are disabled on each device."""

from collections.abc import Iterator

import pytest
import torch

from shards.base.device import choose_attention


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Enable all kernels, as is torch's default, and restore the previous state afterwards."""
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    cuda.enable_flash_sdp(True)
    yield
    cuda.enable_cudnn_sdp(before[0])
    cuda.enable_flash_sdp(before[1])


def test_a_gpu_trains_without_cudnn_attention() -> None:
    """The backward pass of cuDNN attention returns NaN for some lengths on Hopper."""
    choose_attention(torch.device("cuda", 0))
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_a_cpu_trains_without_flash_attention() -> None:
    choose_attention(torch.device("cpu"))
    assert not torch.backends.cuda.flash_sdp_enabled()
