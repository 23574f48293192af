"""The loss agrees with diffusers' own components on random input."""

from dataclasses import replace

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import compute_snr

from shards.format.image import dequantise as dequantise_image
from shards.format.image import quantise as quantise_image
from shards.format.text import quantise
from tests.train.specs import CHANNELS, TOKENS, WIDTH, make_batch, spec
from train.data.batch import Batch
from train.data.draws import Draws, Purpose
from train.objective.config import ObjectiveConfig
from train.objective.loss import DiffusionLoss
from train.objective.paths import noise_path, noise_scheduler
from train.objective.sums import LossSums

N, SIDE = 6, 8


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
    return make_batch(**(fields | changes))  # type: ignore[arg-type]


class Recorder(torch.nn.Module):
    """A fake U-Net that records its inputs and predicts half of the noisy latents."""

    def forward(self, noisy: torch.Tensor, *, return_dict: bool, **given: torch.Tensor) -> tuple[torch.Tensor]:
        assert not return_dict
        self.seen = noisy, given["timestep"], given["encoder_hidden_states"], given["encoder_attention_mask"]
        return (0.5 * noisy,)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_loss_is_diffusers(prediction: str) -> None:
    loss = DiffusionLoss(ObjectiveConfig(prediction=prediction, caption_dropout=0), spec(), torch.device("cpu"))
    unet, data, draws = Recorder(), batch(), Draws(3, 11, torch.arange(N))
    result = loss(unet, loss.add_noise(data, draws)).per_sample

    scheduler = DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear", prediction_type=prediction)
    posterior = DiagonalGaussianDistribution(data.columns["image_latents"].double())
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
    torch.testing.assert_close(unet.seen[2], data.columns["text_latents.text"].float())
    assert unet.seen[3] is None


@pytest.mark.parametrize("posterior", ["mean", "deterministic"])
def test_means_are_shifted_and_scaled_per_channel_and_nothing_else(posterior: str) -> None:
    """FluxPipeline's (latents - shift) × scale, with separate values per channel as in Wan."""
    scale, shift = (0.7, 0.1, 2.0, 1.0), (0.0, 0.1, -1.0, 3.0)
    data_spec = spec(posterior=posterior).image.model_copy(update={"scale": scale, "shift": shift})
    loss = DiffusionLoss(ObjectiveConfig(), replace(spec(), image=data_spec), torch.device("cpu"))
    stored = torch.randn(N, CHANNELS, SIDE, SIDE).half()
    found = loss.latents.sample(batch(image_latents=stored), None)
    for channel in range(CHANNELS):
        expected = (stored[:, channel].double() - shift[channel]) * scale[channel]
        torch.testing.assert_close(found[:, channel].double(), expected, rtol=1e-5, atol=1e-6)


def test_int8_latents_are_dequantised() -> None:
    latents = torch.randn(N, 2 * CHANNELS, SIDE, SIDE)
    codes, scales = quantise_image(latents, CHANNELS)
    data = batch(image_latents=codes)
    data.columns["image_scales"] = scales
    loss = DiffusionLoss(ObjectiveConfig(), spec(), torch.device("cpu"))
    normals = torch.randn(N, CHANNELS, SIDE, SIDE)
    found = loss.latents.sample(data, normals)
    exact = loss.latents.sample(batch(image_latents=dequantise_image(codes, scales)), normals)
    torch.testing.assert_close(found, exact, rtol=0, atol=0)


def test_dropped_captions_become_the_empty_one() -> None:
    data_spec = spec(trim=True)
    uncond = data_spec.uncond["text"]
    assert uncond.states is not None
    loss = DiffusionLoss(ObjectiveConfig(caption_dropout=0.5), data_spec, torch.device("cpu"))
    draws, data = Draws(3, 11, torch.arange(N)), batch()
    dropped = draws.bernoulli(Purpose.CAPTION_DROPOUT, 0.5, 1)[:, 0]
    assert 0 < dropped.sum() < N
    text = loss.latents.conditioning(data, dropped).texts["text"]
    assert text.mask is not None and text.states is not None
    for i in range(N):
        expected = uncond.states.float() if dropped[i] else data.columns["text_latents.text"][i].float()
        torch.testing.assert_close(text.states[i], expected)
        assert int(text.mask[i].sum()) == (2 if dropped[i] else int(data.columns["num_tokens.text"][i]))
        assert text.mask[i].sort(descending=True).values.equal(text.mask[i])


def test_codes_are_decoded() -> None:
    exact = torch.randn(N, TOKENS, WIDTH)
    codes, scales = quantise(exact)
    loss = DiffusionLoss(ObjectiveConfig(caption_dropout=0), spec(), torch.device("cpu"))
    data = batch(text_latents=codes, text_scales=scales)
    states = loss.latents.conditioning(data, torch.zeros(N, dtype=torch.bool)).texts["text"].states
    assert states is not None
    assert (states - exact).norm() / exact.norm() < 0.03


def test_microbatches_are_slices() -> None:
    loss = DiffusionLoss(ObjectiveConfig(min_snr_gamma=5.0), spec(), torch.device("cpu"))
    noised = loss.add_noise(batch(), Draws(3, 11, torch.arange(N)))
    parts = list(noised.microbatches(4))
    assert [len(part) for part in parts] == [4, 2]
    for name in ("latents", "target", "timesteps", "weight"):
        assert torch.cat([getattr(part, name) for part in parts]).equal(getattr(noised, name))
    told = [loss.latents.conditioning(one.batch, one.dropped).texts["text"].states for one in (noised, *parts)]
    states, *of_parts = (states for states in told if states is not None)
    assert torch.cat(of_parts).equal(states) and len(of_parts) == 2
    stored = [part.batch.columns["image_latents"] for part in parts]
    assert torch.cat(stored).equal(batch().columns["image_latents"])
    assert [key for part in parts for key in part.batch.keys] == batch().keys
    assert "text_scales.text" not in parts[1].batch.columns


def test_padding_of_the_last_microbatch_does_not_count() -> None:
    loss = DiffusionLoss(ObjectiveConfig(min_snr_gamma=5.0), spec(), torch.device("cpu"))
    noised, unet = loss.add_noise(batch(), Draws(3, 11, torch.arange(N))), Recorder()
    whole = loss(unet, noised)
    first, last = noised.microbatches(4, filled=True)
    assert len(first) == len(last) == 4 and first.num_real is None
    assert last.latents.equal(noised.latents[[4, 5, 4, 5]])  # padding repeats the slice's own samples
    found = loss(unet, last)
    assert len(unet.seen[0]) == 4
    assert found.per_sample.equal(whole.per_sample[4:])


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_min_snr_weighs_the_error_in_the_latents(prediction: str) -> None:
    """For every prediction type, the weighted loss is min(SNR, γ) times the squared error of the implied latents."""
    config = ObjectiveConfig(prediction=prediction, caption_dropout=0, min_snr_gamma=5.0)
    loss = DiffusionLoss(config, spec(posterior="mean"), torch.device("cpu"))
    data = batch(image_latents=torch.randn(N, CHANNELS, SIDE, SIDE).half())
    unet, draws = Recorder(), Draws(3, 12, torch.arange(N))
    result = loss(unet, loss.add_noise(data, draws)).per_sample
    noisy, timesteps = unet.seen[0].double(), unet.seen[1]
    latents = data.columns["image_latents"].double() * 0.7
    for i in range(N):
        alpha = noise_scheduler(config).alphas_cumprod[timesteps[i]].double()
        a, s = alpha.sqrt(), (1 - alpha).sqrt()
        output = 0.5 * noisy[i]
        implied = {
            "epsilon": (noisy[i] - s * output) / a,
            "v_prediction": a * noisy[i] - s * output,
            "sample": output,
        }[prediction]
        expected = min(float(a**2 / s**2), 5.0) * ((implied - latents[i]) ** 2).mean()
        torch.testing.assert_close(result[i].double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_is_that_of_diffusers_training_script(prediction: str) -> None:
    """train_text_to_image.py uses min(SNR, γ) over SNR, or over SNR + 1 for a velocity."""
    config, timesteps = ObjectiveConfig(prediction=prediction, min_snr_gamma=5.0), torch.arange(1000)
    snr = compute_snr(noise_scheduler(config), timesteps)
    expected = torch.stack([snr, torch.full_like(snr, 5.0)], dim=1).min(dim=1)[0]
    expected = expected / (snr if prediction == "epsilon" else snr + 1)
    found = noise_path(config, torch.device("cpu")).weight(timesteps)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_min_snr_is_one_where_the_noise_is_so_strong_that_snr_is_rounded_to_zero() -> None:
    config = ObjectiveConfig(min_snr_gamma=5.0, beta_schedule="linear", beta_end=0.5)
    weight = noise_path(config, torch.device("cpu")).weight(torch.arange(1000))
    assert weight is not None
    assert noise_scheduler(config).alphas_cumprod[-1] == 0 and weight[-1] == 1 and weight.isfinite().all()


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
def test_min_snr_trains_every_timestep_of_a_schedule_that_ends_in_pure_noise(prediction: str) -> None:
    """In terms of the latents the weight is min(SNR + 1, γ). min(SNR, γ) would be 0 at the step where sampling
    starts."""
    config = ObjectiveConfig(prediction=prediction, min_snr_gamma=5.0, zero_terminal_snr=True)
    timesteps = torch.arange(1000)
    weight = noise_path(config, torch.device("cpu")).weight(timesteps)
    assert weight is not None
    snr = compute_snr(noise_scheduler(config), timesteps).double()
    expected = (snr + 1).clamp(max=5.0) / (snr + 1 if prediction == "v_prediction" else 1.0)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=0)
    assert float(weight[-1]) == pytest.approx(1.0) and weight.min() > 0


def test_offset_noise_is_one_number_per_channel() -> None:
    plain = DiffusionLoss(ObjectiveConfig(), spec(), torch.device("cpu"))
    offset = DiffusionLoss(ObjectiveConfig(offset_noise=0.1), spec(), torch.device("cpu"))
    draws = Draws(1, 1, torch.arange(N))
    difference = offset.draw(batch(), draws).noise - plain.draw(batch(), draws).noise
    expected = 0.1 * draws.normal(Purpose.OFFSET_NOISE, (CHANNELS, 1, 1))
    torch.testing.assert_close(difference, expected.expand_as(difference), rtol=0, atol=1e-6)
    assert 0.03 < expected.std() < 0.3


def flow(**changes: object) -> DiffusionLoss:
    fields = {"prediction": "flow_matching", "caption_dropout": 0.0} | changes
    return DiffusionLoss(ObjectiveConfig(**fields), spec(posterior="mean"), torch.device("cpu"))


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
def test_flow_matching_is_a_straight_line(sampling: str) -> None:
    """The equations in float64, with t from the same random words."""
    loss = flow(timestep_sampling=sampling, logit_mean=0.3, logit_std=0.8)
    data = batch(image_latents=torch.randn(N, CHANNELS, SIDE, SIDE).half())
    unet, draws = Recorder(), Draws(3, 11, torch.arange(N))
    result = loss(unet, loss.add_noise(data, draws)).per_sample
    words = draws.words(Purpose.TIMESTEP, 2).double()
    normal = (-2 * ((words[:, 0] + 0.5) / 2**32).log()).sqrt() * (2 * torch.pi * (words[:, 1] + 0.5) / 2**32).cos()
    times = {"uniform": (words[:, 0] + 0.5) / 2**32, "logit_normal": 1 / (1 + (-(0.3 + 0.8 * normal)).exp())}[sampling]
    torch.testing.assert_close(unet.seen[1].double(), 1000 * times, rtol=1e-5, atol=1e-3)
    latents, noise = (
        data.columns["image_latents"].double() * 0.7,
        draws.normal(Purpose.NOISE, (CHANNELS, SIDE, SIDE)).double(),
    )
    for i in range(N):
        noisy = (1 - times[i]) * latents[i] + times[i] * noise[i]
        torch.testing.assert_close(unet.seen[0][i].double(), noisy, rtol=1e-5, atol=1e-5)
        expected = ((0.5 * noisy - (noise[i] - latents[i])) ** 2).mean()
        torch.testing.assert_close(result[i].double(), expected, rtol=1e-5, atol=1e-6)


def test_flow_matching_adds_noise_as_diffusers_does() -> None:
    scheduler, loss = FlowMatchEulerDiscreteScheduler(), flow()
    latents, noise = torch.randn(5, CHANNELS, SIDE, SIDE), torch.randn(5, CHANNELS, SIDE, SIDE)
    timesteps = scheduler.timesteps[[0, 100, 500, 900, 999]]
    torch.testing.assert_close(
        loss.path.add_noise(latents, noise, timesteps),
        scheduler.scale_noise(latents, timesteps, noise),
        rtol=1e-6,
        atol=1e-6,
    )


def test_fixed_timesteps_are_the_middles_of_equal_parts() -> None:
    assert noise_path(ObjectiveConfig(), torch.device("cpu")).fixed_timesteps(8)[:2] == [62, 187]
    assert flow().path.fixed_timesteps(8)[:2] == [62.5, 187.5]


@pytest.mark.parametrize("prediction", ["epsilon", "flow_matching"])
def test_losses_by_quarter_add_up(prediction: str) -> None:
    path = noise_path(ObjectiveConfig(prediction=prediction), torch.device("cpu"))
    draws, losses = Draws(1, 2, torch.arange(200)), torch.rand(200)
    timesteps = path.timesteps(draws)
    found = LossSums.of(losses, timesteps, 1000)
    for quarter in range(4):
        inside = (timesteps >= 250 * quarter) & (timesteps < 250 * (quarter + 1))
        torch.testing.assert_close(found.sums[quarter], losses[inside].sum())
        assert found.counts[quarter] == inside.sum() > 0
    # microbatches and ranks hold parts of the batch
    parts = [LossSums.of(losses[i::3], timesteps[i::3], 1000) for i in range(3)]
    added = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(added.sums, found.sums)
    assert added.counts.equal(found.counts)
    torch.testing.assert_close(LossSums.of(losses, timesteps, 1000, microbatch_size=3).sums, found.sums)
    stacked = LossSums.stack(parts).steps()
    assert all(a.sums.equal(b.sums) and a.counts.equal(b.counts) for a, b in zip(stacked, parts, strict=True))
    assert found.total == pytest.approx(float(losses.sum()))
    kept = LossSums.from_json(found.to_json())
    assert kept.to_json() == found.to_json() and kept.sums.dtype == torch.float64
    assert LossSums.of(torch.ones(1), torch.tensor([1000.0]), 1000).counts.tolist() == [0, 0, 0, 1]  # pure noise
    # a non-finite loss stays in its quarter and makes the total non-finite
    losses[0] = float("nan")
    assert int(LossSums.of(losses, timesteps, 1000).sums.isnan().sum()) == 1


def test_means_by_quarter() -> None:
    sums = LossSums.from_json([2.0, 0.0, 3.0, 1.0, 4.0, 0.0, 2.0, 1.0])
    assert sums.means(1000) == {"0-249": 0.5, "250-499": None, "500-749": 1.5, "750-999": 1.0}
