"""Each kind of model input, compared with arithmetic by hand and with diffusers."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, SanaTransformer2DModel
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from bench.gpu_check.families import SMALL
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from shards.format.buckets import Bucket
from tests.train.specs import make_batch, spec
from train.data.draws import Draws
from train.model.backbone import BackboneConfig, pack, unpack
from train.model.inputs import Conditioning, Guidance, InputContext, Pooled, Positions, Sizes, States, TextConditioning
from train.objective.config import ObjectiveConfig
from train.objective.loss import DiffusionLoss

N = 3


def conditioning(**texts: tuple[int, int, bool]) -> Conditioning:
    """Return random text conditioning of towers given as (tokens, width, masked); pooled outputs have width + 1."""
    towers = {
        name: TextConditioning(
            torch.randn(N, tokens, width),
            (torch.rand(N, tokens) < 0.5).float() if masked else None,
            torch.randn(N, width + 1),
        )
        for name, (tokens, width, masked) in texts.items()
    }
    return Conditioning(towers, torch.ones(N, 4), (64, 64))


def present(value: Tensor | None) -> Tensor:
    """Assert that the value is a tensor, and return it."""
    assert value is not None
    return value


def test_states_stand_beside_and_behind_each_other() -> None:
    told = conditioning(a=(4, 3, False), b=(4, 5, False), c=(2, 10, True))
    item = States(towers=[["a", "b"], ["c"]], mask="mask")
    made = item.arguments("states", InputContext(told, (8, 8), {}))
    states, mask = made["states"], made["mask"]
    assert states is not None and mask is not None
    a, b, c = (told.texts[name].states for name in "abc")
    assert a is not None and b is not None and c is not None
    assert states.shape == (N, 8, 10)
    assert states[:, :4, :3].equal(a) and states[:, :4, 3:8].equal(b) and not states[:, :4, 8:].any()
    assert states[:, 4:6].equal(c) and not states[:, 6:].any()
    assert mask[:, :4].all() and torch.equal(mask[:, 4:6], present(told.texts["c"].mask))
    assert mask.shape == (N, 8) and not mask[:, 6:].any()


def test_masked_states_are_padded_without_changing_the_prediction() -> None:
    fields = json.loads(Path("configs/sana/backbone.json").read_text()) | SMALL["sana"]
    torch.manual_seed(0)
    network = SanaTransformer2DModel.from_config(fields).eval()
    told = conditioning(a=(13, fields["caption_channels"], True))
    states, mask = present(told.texts["a"].states), present(told.texts["a"].mask)
    latents, times = torch.randn(N, fields["in_channels"], 4, 4), torch.full((N,), 500)
    inputs = {"encoder_hidden_states": States(towers=[["a"]], mask="encoder_attention_mask")}
    with torch.no_grad():
        found = BackboneConfig(inputs=inputs).predict(network, latents, times, told)
        expected = network(latents, states, times, encoder_attention_mask=mask).sample
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_pooled_outputs_stand_beside_each_other() -> None:
    told = conditioning(a=(4, 3, False), b=(4, 5, False))
    made = Pooled(kind="pooled", towers=["b", "a"]).arguments("p", InputContext(told, (8, 8), {}))["p"]
    assert made is not None and made.shape == (N, 10)
    a, b = (present(told.texts[name].pooled) for name in "ab")
    assert made[:, :6].equal(b) and made[:, 6:].equal(a)


def test_positions_are_diffusers() -> None:
    told = conditioning(a=(7, 3, False))
    made = {"states": told.texts["a"].states, "mask": None, "pooled": torch.ones(N, 9)}
    image = Positions(kind="positions", of="image").arguments("ids", InputContext(told, (3, 5), made))["ids"]
    assert image is not None and image.equal(FluxPipeline._prepare_latent_image_ids(N, 3, 5, "cpu", torch.float32))
    text = Positions(kind="positions", of="text").arguments("ids", InputContext(told, (3, 5), made))["ids"]
    assert text is not None and text.equal(torch.zeros(7, 3))


def test_guidance_is_one_number() -> None:
    made = Guidance(kind="guidance", scale=3.5).arguments("g", InputContext(conditioning(), (8, 8), {}))["g"]
    assert made is not None and made.equal(torch.full((N,), 3.5))


@pytest.mark.parametrize("hw", [(4, 6), (8, 2)])
def test_packing_is_diffusers(hw: tuple[int, int]) -> None:
    latents = torch.randn(N, 5, *hw)
    packed = FluxPipeline._pack_latents(latents, N, 5, *hw)
    assert pack(latents, 2).equal(packed)
    assert unpack(packed, 2, (hw[0] // 2, hw[1] // 2)).equal(latents)
    larger = torch.randn(N, 5, 6, 9)
    assert pack(larger, 3).shape == (N, 6, 45) and unpack(pack(larger, 3), 3, (2, 3)).equal(larger)


@given(st.integers(64, 400), st.integers(96, 400))
def test_crops_are_where_the_bucket_lies_on_the_scaled_picture(width: int, height: int) -> None:
    """Crops are stored in pixels of the original and converted to the scaled image that stage 1 cropped."""
    file, bucket = io.BytesIO(), Bucket(64, 96)
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "PNG")
    corner = decode(file.getvalue(), [bucket], PixelsConfig(), LimitsConfig()).corners[bucket]
    told = replace(conditioning(), sizes=torch.tensor([[width, height, *corner]] * N), target=(96, 64))
    made = Sizes(kind="sizes").arguments("ids", InputContext(told, (12, 8), {}))["ids"]
    scale = max(64 / width, 96 / height)
    scaled = [max(96, int(height * scale + 0.5)), max(64, int(width * scale + 0.5))]
    expected = [height, width, (scaled[0] - 96) // 2, (scaled[1] - 64) // 2, 96, 64]
    assert made is not None and made[0].tolist() == expected


def test_sizes_are_dropped_and_jittered_by_keyed_draws() -> None:
    batch = make_batch(["k"] * 400, torch.arange(400), torch.zeros(400, 8, 8, 8), torch.zeros(400, 16, 12))
    batch.columns["size"] = torch.tensor([[640, 480, 0, 80]] * 400)

    def told(**fields: float) -> Tensor:
        backbone = BackboneConfig(**fields).resolved(data.texts)
        loss = DiffusionLoss(ObjectiveConfig(), data, torch.device("cpu"), backbone)
        return loss.add_noise(batch, Draws(1, 2, batch.slots)).batch.columns["size"]

    data = spec()
    assert told() is batch.columns["size"]
    dropped = told(size_dropout=0.25)
    share = (dropped[:, 0] == 0).float().mean()
    assert 0.18 < share < 0.32 and (dropped[dropped[:, 0] > 0] == batch.columns["size"][0]).all()
    jittered = told(size_jitter=0.2)
    assert jittered.equal(told(size_jitter=0.2))
    factors = (jittered[:, 0] / 640).log()
    assert abs(float(factors.mean())) < 0.04 and 0.17 < float(factors.std()) < 0.23
    assert ((jittered[:, 1] - jittered[:, 0] * 0.75).abs() <= 1).all()
    conditions = Conditioning({}, dropped, (64, 64))
    made = Sizes(kind="sizes").arguments("ids", InputContext(conditions, (8, 8), {}))["ids"]
    assert made is not None and torch.isfinite(made).all() and not made[dropped[:, 0] == 0].any()


def test_time_is_told_as_the_config_says() -> None:
    """Timesteps are divided and reversed and the output is negated, as for Lumina 2."""

    class Network(torch.nn.Module):
        def forward(self, noisy: Tensor, timestep: Tensor, return_dict: bool, **rest: Tensor) -> tuple[Tensor]:
            return (timestep[:, None, None, None] * noisy,)

    told = conditioning(a=(4, 3, False))
    config = BackboneConfig(
        inputs={"states": States(towers=[["a"]])}, time_divisor=1000, time_reversed=True, output_negated=True
    )
    noisy = torch.randn(N, 4, 2, 2)
    found = config.predict(Network(), noisy, torch.full((N,), 250.0), told)
    torch.testing.assert_close(found, -0.75 * noisy)
