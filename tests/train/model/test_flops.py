"""FLOPs compared with counts by hand and with the planner's, and peaks by device name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from bench.kit.roots import encoding_record
from train.model.backbone import BackboneConfig
from train.model.fit import dry_call
from train.model.flops import TRAIN_OVER_FORWARD, count_flops, peak_tflops, training_flops

CONFIGS = Path(__file__).parents[3] / "configs" / "unet"


def unet_of(path: Path) -> UNet2DConditionModel:
    with torch.device("meta"):
        return UNet2DConditionModel.from_config(json.loads(path.read_text()))


def call(unet: UNet2DConditionModel, latent_hw: tuple[int, int], *text: int) -> Callable[[], Any]:
    encoding = encoding_record(*text)
    return dry_call(unet, BackboneConfig().resolved(encoding.texts), encoding, latent_hw)[1]


def test_counting_by_hand() -> None:
    """Count a convolution and an attention, at 2 FLOPs per multiply-add."""
    n, c_in, c_out, side, tokens, heads, width = 2, 3, 5, 8, 7, 4, 16
    with torch.device("meta"):
        convolution = torch.nn.Conv2d(c_in, c_out, 3, padding=1)
        assert count_flops(convolution, torch.empty(n, c_in, side, side)) == 2 * n * side**2 * c_out * c_in * 9
        q, k = torch.empty(n, heads, side, width), torch.empty(n, heads, tokens, width)
        attention = torch.nn.functional.scaled_dot_product_attention
        assert count_flops(attention, q, k, k) == 2 * (2 * n * heads * side * tokens * width)


def test_sd2_is_counted_as_the_plan_counts_it() -> None:
    """Compare with the number of FLOPs that tests/plan/conftest.py gives the planner."""
    found = training_flops(call(unet_of(CONFIGS / "sd2-base.json"), (32, 32), 77, 1024))
    assert found == TRAIN_OVER_FORWARD * 181_090_467_840


def test_a_training_step_is_three_forward_passes() -> None:
    """Compare an actual forward and backward pass with three times the forward pass."""
    unet = UNet2DConditionModel.from_config(json.loads((Path(__file__).parents[2] / "tiny_unet.json").read_text()))
    latents, text = torch.randn(1, 4, 8, 8), torch.randn(1, 16, 16)

    def step(latents: torch.Tensor, text: torch.Tensor) -> None:
        unet(latents, torch.tensor([5]), text).sample.sum().backward()

    assert count_flops(step, latents, text) == pytest.approx(training_flops(call(unet, (8, 8), 16, 16)), rel=0.05)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_name(name: str, expected: float | None) -> None:
    assert peak_tflops(name) == expected


def test_the_small_unet_has_its_parameters() -> None:
    """tests/families/test_configs.py counts the parameters of the families."""
    assert sum(parameter.numel() for parameter in unet_of(CONFIGS / "small.json").parameters()) == 46_895_364
