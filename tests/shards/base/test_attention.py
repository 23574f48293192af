"""The attention kernels that are switched off, by device."""

from collections.abc import Iterator

import pytest
import torch

from shards.base.device import choose_attention


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Every kernel on, as torch begins; and afterwards as it was."""
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    cuda.enable_flash_sdp(True)
    yield
    cuda.enable_cudnn_sdp(before[0])
    cuda.enable_flash_sdp(before[1])


def test_a_gpu_trains_without_cudnn_attention() -> None:
    """Its backward pass returns NaN for some lengths on Hopper."""
    choose_attention(torch.device("cuda", 0))
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_a_cpu_trains_without_flash_attention() -> None:
    choose_attention(torch.device("cpu"))
    assert not torch.backends.cuda.flash_sdp_enabled()
