"""Timesteps of flow matching, their shift and weights: against diffusers' training utilities, and in float64."""

import math

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.train.specs import CHANNELS, TOKENS, WIDTH, Answer, make_batch, spec
from train.data.draws import Draws, Purpose
from train.export.scheduler import sampler
from train.objective.config import ObjectiveConfig, ShiftConfig, ValidationConfig
from train.objective.loss import DiffusionLoss
from train.objective.paths import cosmap, mode, noise_path, shifted
from train.objective.validation import PLACES

DRAWN = Draws(3, 1, torch.arange(20_000))


def config(**fields: object) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate({"prediction": "flow_matching", "caption_dropout": 0.0} | fields)


def times(**fields: object) -> torch.Tensor:
    """Draw 20,000 times in float64, as shares of the time axis."""
    return noise_path(config(**fields), torch.device("cpu")).timesteps(DRAWN).double() / 1000


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.8, 1.29, 2 / (math.pi - 2)])
def test_mode_is_diffusers_map_of_uniforms(scale: float) -> None:
    theirs = compute_density_for_timestep_sampling("mode", 5000, mode_scale=scale, generator=torch.manual_seed(7))
    u = torch.rand(5000, generator=torch.manual_seed(7))
    torch.testing.assert_close(mode(u, scale), theirs, rtol=1e-5, atol=1e-6)
    falls = mode(torch.linspace(1e-4, 1 - 1e-4, 500), scale).diff()
    assert falls.max() < 1e-6  # the mapping from draws to times is one to one


@pytest.mark.parametrize(
    ("fields", "scheme"),
    [
        ({"timestep_sampling": "logit_normal", "logit_mean": 0.4, "logit_std": 0.7}, "logit_normal"),
        ({"timestep_sampling": "mode", "mode_scale": 1.1}, "mode"),
        ({"timestep_sampling": "uniform"}, "none"),
    ],
)
def test_drawn_times_have_diffusers_distribution(fields: dict[str, object], scheme: str) -> None:
    """A two-sample test of the keyed draws against 20,000 draws of diffusers."""
    theirs = compute_density_for_timestep_sampling(
        scheme, 20_000, logit_mean=0.4, logit_std=0.7, mode_scale=1.1, generator=torch.manual_seed(2)
    )
    assert stats.ks_2samp(times(**fields).numpy(), theirs.numpy()).pvalue > 0.01
    assert (
        stats.ks_2samp(times(timestep_sampling="cosmap").numpy(), theirs.numpy()).pvalue < 1e-9
    )  # the test can tell distributions apart


def test_cosmap_has_the_density_that_diffusers_weighs_uniforms_by() -> None:
    t = torch.linspace(0.001, 0.999, 999, dtype=torch.float64, requires_grad=True)
    # the inverse of the map is the cumulative distribution, and its slope is the density
    distribution = 2 / math.pi * torch.atan(t / (1 - t))
    density = torch.autograd.grad(distribution.sum(), t)[0]
    torch.testing.assert_close(density.float(), compute_loss_weighting_for_sd3("cosmap", t.detach()).float())
    torch.testing.assert_close(cosmap(distribution.detach()), t.detach(), rtol=1e-9, atol=1e-12)
    drawn = times(timestep_sampling="cosmap").numpy()
    assert stats.kstest(drawn, lambda x: 2 / math.pi * torch.atan(torch.tensor(x / (1 - x))).numpy()).pvalue > 0.01
    # equals the cosine schedule's log-SNR at u
    u = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    snr = ((1 - cosmap(u)) / cosmap(u)) ** 2
    torch.testing.assert_close(snr, 1 / torch.tan(math.pi / 2 * u) ** 2)


@pytest.mark.parametrize("map_of", [cosmap, lambda u: mode(u, 1.29), lambda u: mode(u, -1.0)])
def test_the_ends_of_the_uniforms_stay_within_the_time_axis(map_of: object) -> None:
    ends = torch.tensor([2.0**-33, 2.0**-24, 1 - 2.0**-24, 1.0])
    found = map_of(ends)  # type: ignore[operator]
    assert found.min() > 0 and found.max() <= 1


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_weights_are_diffusers(weighting: str) -> None:
    t = torch.rand(100, generator=torch.manual_seed(0)) * 0.99 + 0.01
    found = noise_path(config(weighting=weighting), torch.device("cpu")).weight(1000 * t)
    found = torch.ones(100) if found is None else found
    torch.testing.assert_close(found, compute_loss_weighting_for_sd3(weighting, t), rtol=1e-4, atol=0)


@pytest.mark.parametrize("timestep_sampling", ["uniform", "mode", "cosmap", "logit_normal"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_weights_of_sigma_sqrt_have_a_finite_mean(timestep_sampling: str, shift: float) -> None:
    """t^−2 has an infinite mean over times near 0. The smallest time in diffusers' training scripts is 1/T."""
    path = noise_path(
        config(weighting="sigma_sqrt", timestep_sampling=timestep_sampling, shift={"factor": shift}),
        torch.device("cpu"),
    )
    smallest = torch.tensor([2.0**-33, 1e-6, 0.999e-3, 1e-3, 2e-3, 1.0]) * 1000
    found = path.weight(smallest)
    assert found is not None
    scheduler = FlowMatchEulerDiscreteScheduler()
    limit = compute_loss_weighting_for_sd3("sigma_sqrt", scheduler.sigmas[-1:])
    torch.testing.assert_close(found, torch.cat([limit.repeat(4), torch.tensor([2.5e5, 1.0])]), rtol=1e-4, atol=0)
    drawn = path.weight(path.shifted(path.timesteps(DRAWN), (8, 8)))
    assert drawn is not None and drawn.isfinite().all() and drawn.max() <= 1.001e6


@given(st.floats(2**-33, 1), st.floats(0.05, 50))
def test_a_shift_is_equation_23(t: float, alpha: float) -> None:
    found = float(shifted(torch.tensor(t, dtype=torch.float64), alpha))
    assert found == pytest.approx(alpha * t / (1 + (alpha - 1) * t), rel=1e-9)
    assert 0 < found <= 1 and float(shifted(torch.tensor(1.0), alpha)) == 1.0


@pytest.mark.parametrize("hw", [(32, 32), (64, 64), (128, 128), (96, 160)])
def test_log_linear_is_fluxs_dynamic_shift(hw: tuple[int, int]) -> None:
    mu = calculate_shift(hw[0] * hw[1] // 4)
    t = torch.linspace(0.01, 1, 100, dtype=torch.float64)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    theirs = scheduler.time_shift(mu, 1.0, t)
    torch.testing.assert_close(shifted(t, ShiftConfig(kind="log_linear").alpha(hw)), theirs, rtol=1e-12, atol=0)


def test_a_constant_shift_is_sd3s_and_the_square_root_is_of_equation_23() -> None:
    t = torch.from_numpy(FlowMatchEulerDiscreteScheduler(shift=1.0).sigmas.double().numpy())[:-1]
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas[:-1]
    torch.testing.assert_close(shifted(t, ShiftConfig(factor=3.0).alpha((1, 1))).float(), theirs)
    root = ShiftConfig(kind="square_root", base_tokens=1024)
    assert root.alpha((64, 64)) == 1.0 and root.alpha((128, 128)) == 2.0
    assert root.model_copy(update={"factor": 3.0}).alpha((128, 128)) == 6.0
    assert root.model_copy(update={"patch": 1}).alpha((32, 32)) == 1.0


@pytest.mark.parametrize("shift", [{"factor": 3.0}, {"kind": "log_linear", "base_tokens": 16}])
def test_a_loss_at_shifted_times(shift: dict[str, object]) -> None:
    """The equations in float64, sample by sample, for latents of 8 by 12, which are 24 tokens."""
    objective = config(shift=shift, weighting="cosmap")
    loss = DiffusionLoss(objective, spec(posterior="mean"), torch.device("cpu"))
    stored, slots = torch.randn(6, CHANNELS, 8, 12).half(), torch.arange(6)
    data = make_batch(list("abcdef"), slots, stored, torch.randn(6, TOKENS, WIDTH).half())
    seen = []

    def half(noisy: torch.Tensor, timestep: torch.Tensor, *_: object, **__: object) -> object:
        seen.append(timestep)
        return Answer((0.5 * noisy,))

    draws = Draws(3, 11, slots)
    noised = loss.add_noise(data, draws)
    result = loss(half, noised)  # type: ignore[arg-type]
    words = draws.words(Purpose.TIMESTEP, 1)[:, 0].double()
    noise = draws.normal(Purpose.NOISE, (CHANNELS, 8, 12)).double()
    mu = calculate_shift(24, base_seq_len=16)
    for i in range(6):
        drawn = float((words[i] + 0.5) / 2**32)
        alpha = 3.0 if "factor" in shift else math.exp(mu)
        t = alpha * drawn / (1 + (alpha - 1) * drawn)
        assert float(seen[0][i]) == pytest.approx(1000 * t, rel=1e-5) == pytest.approx(float(noised.timesteps[i]))
        latents = stored[i].double() * 0.7
        error = ((0.5 * ((1 - t) * latents + t * noise[i]) - (noise[i] - latents)) ** 2).mean()
        weight = 2 / (math.pi * (1 - 2 * t + 2 * t * t))
        assert float(result.per_sample[i]) == pytest.approx(float(weight * error), rel=1e-4)


def test_without_a_shift_times_are_bit_by_bit_what_was_drawn() -> None:
    path = noise_path(config(), torch.device("cpu"))
    drawn = path.timesteps(DRAWN)
    assert path.shifted(drawn, (64, 64)) is drawn


@pytest.mark.parametrize("shift", [{}, {"factor": 3.0}, {"kind": "log_linear"}])
def test_the_exported_sampler_steps_where_training_was_shifted_to(shift: dict[str, object]) -> None:
    objective = config(shift=shift)
    exported, plain = sampler(objective, (128, 128)), sampler(config(), (128, 128))
    assert isinstance(exported, DPMSolverMultistepScheduler)
    for scheduler in (exported, plain):
        scheduler.set_timesteps(20)
    expected = shifted(plain.sigmas[:-1].double(), objective.shift.alpha((128, 128)))
    torch.testing.assert_close(exported.sigmas[:-1].double(), expected, rtol=1e-5, atol=1e-6)
    assert plain.config.flow_shift == 1.0


@pytest.mark.parametrize("shift", [{"factor": 3.0}, {"kind": "square_root"}, {"kind": "log_linear", "base_shift": 0.4}])
@pytest.mark.parametrize("hw", [(64, 64), (128, 96)])
def test_flow_match_eulers_settings_are_the_shift(shift: dict[str, object], hw: tuple[int, int]) -> None:
    """FluxPipeline sets its timesteps with a μ that depends on the image size."""
    config = ShiftConfig.model_validate(shift)
    scheduler = FlowMatchEulerDiscreteScheduler(**config.scheduler_settings(hw, dynamic=True))
    sigmas, own = np.linspace(1.0, 1 / 20, 20), scheduler.config
    mu = calculate_shift(
        hw[0] * hw[1] // 4, own.base_image_seq_len, own.max_image_seq_len, own.base_shift, own.max_shift
    )
    scheduler.set_timesteps(sigmas=sigmas, mu=mu)
    expected = shifted(torch.from_numpy(sigmas), config.alpha(hw))
    torch.testing.assert_close(scheduler.sigmas[:-1].double(), expected, rtol=1e-5, atol=1e-6)
    assert config.scheduler_settings(hw, dynamic=False) == {"shift": config.alpha(hw)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero_terminal_snr": True}, "set `prediction` to v_prediction"),
        *(
            ({"prediction": "flow_matching", name: value}, f"{name} does not apply to prediction flow_matching")
            for name, value in (("min_snr_gamma", 5.0), ("zero_terminal_snr", True), ("offset_noise", 0.1))
        ),
        ({"timestep_sampling": "cosmap"}, "timestep_sampling cosmap applies only to prediction flow_matching"),
        ({"weighting": "cosmap"}, "weighting cosmap applies only to prediction flow_matching"),
        ({"shift": {"factor": 3}}, "shift.kind constant applies only to prediction flow_matching"),
        ({"prediction": "flow_matching", "mode_scale": 2}, "less than or equal to 1.75"),
        *(
            (
                {"prediction": "flow_matching", "shift": {"kind": "log_linear", "max_tokens": most}},
                f"max_tokens {most} must be greater than base_tokens 256",
            )
            for most in (9, 256)
        ),
    ],
)
def test_conflicting_fields(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig.model_validate(fields)


def test_mlperfs_validation_times_are_the_starts() -> None:
    path = noise_path(config(), torch.device("cpu"))
    assert path.fixed_timesteps(8, PLACES["starts"]) == [1000 * k / 8 for k in range(8)]
    ddpm = noise_path(ObjectiveConfig(), torch.device("cpu"))
    assert ddpm.fixed_timesteps(8, PLACES["starts"]) == [0, 125, 250, 375, 500, 625, 750, 875]
    with pytest.raises(ValueError, match="samples must be at least 8, but samples is 7"):
        ValidationConfig(samples=7, dealt=True)
    ValidationConfig(samples=8, dealt=True)
