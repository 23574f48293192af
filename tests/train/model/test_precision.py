"""Options that change only rounding: the loss stays the same up to rounding, and weights keep their names."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from tests.train.specs import make_batch, spec
from train.config import ObjectiveConfig
from train.data.draws import Draws
from train.model.network import build_network
from train.model.norms import LowPrecisionGroupNorm, LowPrecisionLayerNorm, use_low_precision_norms
from train.objective.loss import DiffusionLoss

UNET = Path(__file__).parents[2] / "tiny_unet.json"
BFLOAT16_EPS = 2.0**-8


@pytest.fixture
def unet() -> UNet2DConditionModel:
    return build_network(UNET, seed=3)


def loss_and_gradients(unet: UNet2DConditionModel, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return the loss of six samples, and all gradients concatenated."""
    generator = torch.Generator().manual_seed(1)
    width = json.loads(UNET.read_text())["cross_attention_dim"]
    data = make_batch(
        keys=[str(i) for i in range(6)],
        slots=torch.arange(6),
        image_latents=torch.randn(6, 8, 16, 16, generator=generator).half(),
        text_latents=torch.randn(6, 12, width, generator=generator).half(),
        text_scales=None,
        num_tokens=torch.full((6,), 12),
    )
    data_spec = spec(uncond=torch.zeros(12, width).half())
    loss = DiffusionLoss(ObjectiveConfig(), data_spec, torch.device("cpu"))
    unet.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        losses = loss(unet, loss.add_noise(data, Draws(0, 0, data.slots))).per_sample
    losses.mean().backward()
    return losses.detach(), torch.cat([p.grad.flatten() for p in unet.parameters() if p.grad is not None])


def channels_last(unet: UNet2DConditionModel) -> None:
    unet.to(memory_format=torch.channels_last)


def plain_attention(unet: UNet2DConditionModel) -> None:
    """Use diffusers' attention by plain matrix products instead of SDPA."""
    from diffusers.models.attention_processor import AttnProcessor

    unet.set_attn_processor(AttnProcessor())


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [
        pytest.param(UNet2DConditionModel.enable_gradient_checkpointing, 1e-5, id="gradient_checkpointing"),
        pytest.param(channels_last, 1e-5, id="channels_last"),
        pytest.param(plain_attention, 1e-5, id="attention_without_sdpa"),
        pytest.param(use_low_precision_norms, 1e-5, id="low_precision_norms"),
        pytest.param(UNet2DConditionModel.compile, 1e-4, id="compilation", marks=pytest.mark.slow),
    ],
)
def test_the_loss_in_float32_does_not_depend_on_how(
    unet: UNet2DConditionModel, change: Callable[[UNet2DConditionModel], None], tolerance: float
) -> None:
    expected = loss_and_gradients(unet.train())
    other = copy.deepcopy(unet)
    change(other)
    found = loss_and_gradients(other)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert (found[1] - expected[1]).norm() < tolerance * expected[1].norm()


def test_low_precision_norms_keep_within_the_rounding_of_bfloat16(unet: UNet2DConditionModel) -> None:
    exact, exact_gradients = loss_and_gradients(unet.train())
    _, plain_gradients = loss_and_gradients(unet, torch.bfloat16)
    names = list(unet.state_dict())
    use_low_precision_norms(unet)
    low, low_gradients = loss_and_gradients(unet, torch.bfloat16)
    assert list(unet.state_dict()) == names and all(p.dtype == torch.float32 for p in unet.parameters())
    assert not torch.equal(low, exact)
    torch.testing.assert_close(low, exact, rtol=4 * BFLOAT16_EPS, atol=0)
    # about as far from float32 as bfloat16 with float32 norms
    error, usual = ((found - exact_gradients).norm() for found in (low_gradients, plain_gradients))
    assert error < 2 * usual + BFLOAT16_EPS * exact_gradients.norm()


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (torch.nn.GroupNorm(4, 16), LowPrecisionGroupNorm),
        (torch.nn.GroupNorm(4, 16, affine=False), LowPrecisionGroupNorm),
        (torch.nn.LayerNorm(16), LowPrecisionLayerNorm),
    ],
    ids=["group", "group-without-weights", "layer"],
)
def test_a_norm_takes_and_gives_the_autocast_type(norm: torch.nn.Module, kind: type) -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).bfloat16().float()  # exact in bfloat16
    expected = norm(x)
    low = copy.deepcopy(norm)
    use_low_precision_norms(low)
    assert type(low) is kind and torch.equal(low(x), expected)  # without autocast, it is the plain norm
    with torch.autocast("cpu", torch.bfloat16):
        found = low(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=4 * BFLOAT16_EPS, atol=4 * BFLOAT16_EPS)


def test_every_norm_of_the_unet_is_turned(unet: UNet2DConditionModel) -> None:
    use_low_precision_norms(unet)
    kinds = {type(module).__name__ for module in unet.modules() if "Norm" in type(module).__name__}
    assert kinds == {"LowPrecisionGroupNorm", "LowPrecisionLayerNorm"}
