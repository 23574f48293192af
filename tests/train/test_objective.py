"""The loss against diffusers' own pieces, on random input."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from shards.text import quantise
from train.batch import Batch
from train.config import ObjectiveConfig
from train.data import DataSpec
from train.draws import Draws, Purpose
from train.objective import DiffusionLoss

N, CHANNELS, SIDE, TOKENS, WIDTH = 6, 4, 8, 16, 12


def spec(**changes: object) -> DataSpec:
    fields = {
        "posterior": "moments",
        "latent_channels": CHANNELS,
        "scaling_factor": 0.7,
        "text_length": TOKENS,
        "text_width": WIDTH,
        "trim": False,
        "uncond": torch.randn(TOKENS, WIDTH).half(),
        "uncond_tokens": 2,
        "streams": (),
        "steps_per_epoch": 1,
    }
    return DataSpec(**(fields | changes))  # type: ignore[arg-type]


def batch(**changes: object) -> Batch:
    generator = torch.Generator().manual_seed(5)
    fields = {
        "keys": [str(i) for i in range(N)],
        "slots": torch.arange(N),
        "image_latents": torch.randn(N, 2 * CHANNELS, SIDE, SIDE, generator=generator).half(),
        "text_latents": torch.randn(N, TOKENS, WIDTH, generator=generator).half(),
        "text_scales": None,
        "num_tokens": torch.tensor([16, 3, 4, 5, 6, 7]),
    }
    return Batch(**(fields | changes))  # type: ignore[arg-type]


class Recorder(torch.nn.Module):
    """Stands for a U-Net: remembers its inputs, predicts half of the noisy latents."""

    def forward(
        self, noisy: torch.Tensor, timesteps: torch.Tensor, states: torch.Tensor, encoder_attention_mask: object
    ) -> object:
        self.seen = noisy, timesteps, states, encoder_attention_mask
        return SimpleNamespace(sample=0.5 * noisy)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_loss_is_diffusers(prediction: str) -> None:
    loss = DiffusionLoss(ObjectiveConfig(prediction=prediction, caption_dropout=0), spec(), torch.device("cpu"))  # type: ignore[arg-type]
    unet, data, draws = Recorder(), batch(), Draws(3, 11, torch.arange(N))
    result = loss(unet, data, draws)

    scheduler = DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear", prediction_type=prediction)
    posterior = DiagonalGaussianDistribution(data.image_latents.double())
    latents = (posterior.mean + posterior.std * draws.normal(Purpose.POSTERIOR, (CHANNELS, SIDE, SIDE)).double()) * 0.7
    noise, timesteps = (
        draws.normal(Purpose.NOISE, (CHANNELS, SIDE, SIDE)).double(),
        draws.integers(Purpose.TIMESTEP, 1000),
    )
    for i in range(N):
        alpha = scheduler.alphas_cumprod[timesteps[i]].double()
        noisy = alpha.sqrt() * latents[i] + (1 - alpha).sqrt() * noise[i]
        velocity = alpha.sqrt() * noise[i] - (1 - alpha).sqrt() * latents[i]
        target = {"epsilon": noise[i], "v_prediction": velocity, "sample": latents[i]}[prediction]
        torch.testing.assert_close(unet.seen[0][i].double(), noisy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result[i].double(), ((0.5 * noisy - target) ** 2).mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(unet.seen[2], data.text_latents.float())
    assert unet.seen[3] is None


def test_means_are_scaled_and_nothing_else() -> None:
    loss = DiffusionLoss(ObjectiveConfig(), spec(posterior="mean"), torch.device("cpu"))
    stored = torch.randn(N, CHANNELS, SIDE, SIDE).half()
    torch.testing.assert_close(loss.sample_latents(stored, Draws(0, 0, torch.arange(N))), stored.float() * 0.7)


def test_dropped_captions_become_the_empty_one() -> None:
    data_spec = spec(trim=True)
    loss = DiffusionLoss(ObjectiveConfig(caption_dropout=0.5), data_spec, torch.device("cpu"))
    draws, data = Draws(3, 11, torch.arange(N)), batch()
    dropped = draws.chance(Purpose.CAPTION_DROPOUT, 0.5)
    assert 0 < dropped.sum() < N
    text = loss.conditioning(data, dropped)
    assert text.mask is not None
    for i in range(N):
        expected = data_spec.uncond.float() if dropped[i] else data.text_latents[i].float()
        torch.testing.assert_close(text.states[i], expected)
        assert int(text.mask[i].sum()) == (2 if dropped[i] else int(data.num_tokens[i]))
        assert text.mask[i].sort(descending=True).values.equal(text.mask[i])


def test_codes_are_decoded() -> None:
    exact = torch.randn(N, TOKENS, WIDTH)
    codes, scales = quantise(exact)
    loss = DiffusionLoss(ObjectiveConfig(caption_dropout=0), spec(), torch.device("cpu"))
    states = loss.conditioning(batch(text_latents=codes, text_scales=scales), torch.zeros(N, dtype=torch.bool)).states
    assert (states - exact).norm() / exact.norm() < 0.03


def test_microbatches_are_slices() -> None:
    parts = list(batch().microbatches(4))
    assert [len(part) for part in parts] == [4, 2]
    assert torch.cat([part.image_latents for part in parts]).equal(batch().image_latents)
    assert [key for part in parts for key in part.keys] == batch().keys and parts[1].text_scales is None


def test_a_batch_on_paper(tmp_path: Path) -> None:
    """Two ranks' draws, by slot, are the one rank's."""
    loss = DiffusionLoss(ObjectiveConfig(), spec(), torch.device("cpu"))
    whole = loss(Recorder(), batch(), Draws(3, 11, torch.arange(N)))
    for part in batch().microbatches(4):
        torch.testing.assert_close(loss(Recorder(), part, Draws(3, 11, part.slots)), whole[part.slots])


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_min_snr_weighs_the_error_in_the_latents(prediction: str) -> None:
    """Whatever is predicted, the weighted loss is min(SNR, γ) times the squared error of the latents it implies."""
    config = ObjectiveConfig(prediction=prediction, caption_dropout=0, min_snr_gamma=5.0)  # type: ignore[arg-type]
    loss = DiffusionLoss(config, spec(posterior="mean"), torch.device("cpu"))
    data = batch(image_latents=torch.randn(N, CHANNELS, SIDE, SIDE).half())
    unet, draws = Recorder(), Draws(3, 12, torch.arange(N))
    result = loss(unet, data, draws)
    noisy, timesteps = unet.seen[0].double(), unet.seen[1]
    latents = data.image_latents.double() * 0.7
    for i in range(N):
        alpha = loss.scheduler.alphas_cumprod[timesteps[i]].double()
        a, s = alpha.sqrt(), (1 - alpha).sqrt()
        output = 0.5 * noisy[i]
        implied = {
            "epsilon": (noisy[i] - s * output) / a,
            "v_prediction": a * noisy[i] - s * output,
            "sample": output,
        }[prediction]
        expected = min(float(a**2 / s**2), 5.0) * ((implied - latents[i]) ** 2).mean()
        torch.testing.assert_close(result[i].double(), expected, rtol=1e-3, atol=1e-6)


def test_offset_noise_is_one_number_per_channel() -> None:
    plain = DiffusionLoss(ObjectiveConfig(), spec(), torch.device("cpu"))
    offset = DiffusionLoss(ObjectiveConfig(offset_noise=0.1), spec(), torch.device("cpu"))
    draws = Draws(1, 1, torch.arange(N))
    difference = offset.noise((4, 8, 8), draws) - plain.noise((4, 8, 8), draws)
    torch.testing.assert_close(difference, difference[:, :, :1, :1].expand_as(difference), rtol=0, atol=1e-6)
    assert 0.03 < difference[:, :, 0, 0].std() < 0.3


def test_zero_terminal_snr() -> None:
    config = ObjectiveConfig(prediction="v_prediction", zero_terminal_snr=True)
    assert DiffusionLoss(config, spec(), torch.device("cpu")).scheduler.alphas_cumprod[-1] < 1e-7
    with pytest.raises(ValueError, match="use v_prediction"):
        ObjectiveConfig(zero_terminal_snr=True)
