"""Moving averages: the recursion, the power function, and the paper's formulas for post-hoc widths."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from train.model.config import EmaConfig
from train.model.ema import Ema, correlation, make_averages, posthoc_coefficients, power_exponent


def averages(ema: Ema) -> dict[str, torch.Tensor]:
    assert ema.average is not None
    return ema.average


def test_moving_average_is_the_recursion() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, generator=generator) for _ in range(20)]
    ema = Ema(EmaConfig(decay=0.9, start_step=3))
    ema.update({"w": weights[1]}.items(), 2)
    assert ema.average is None
    expected = weights[0].double()
    for step, weight in enumerate(weights, start=3):
        ema.update({"w": weight}.items(), step)
        expected = 0.9 * expected + 0.1 * weight.double()
    torch.testing.assert_close(averages(ema)["w"].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("start", [1, 7])
def test_power_average_weighs_step_tau_by_tau_to_the_gamma(start: int) -> None:
    """Compare with the profile in float64; if it starts late, the first weights represent all earlier steps."""
    config = EmaConfig(kind="power", sigma_rel=0.1, start_step=start)
    generator = torch.Generator().manual_seed(0)
    weights = {step: torch.randn(5, generator=generator) for step in range(start, 61)}
    ema = Ema(config)
    for step in range(start, 61):
        ema.update({"w": weights[step]}.items(), step)
    gamma = power_exponent(0.1)
    # the weight of step τ among 60: (τ/60)^(γ + 1) − ((τ − 1)/60)^(γ + 1), the integral of t^γ over its step
    up_to = {step: (step / 60) ** (gamma + 1) for step in range(start - 1, 61)}
    up_to[start - 1] = 0.0
    expected = sum((up_to[step] - up_to[step - 1]) * weights[step].double() for step in range(start, 61))
    torch.testing.assert_close(averages(ema)["w"].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sigma_rel", [0.01, 0.05, 0.1, 0.15, 0.25])
def test_power_exponent_gives_the_width(sigma_rel: float) -> None:
    gamma = power_exponent(sigma_rel)
    assert math.sqrt(gamma + 1) / ((gamma + 2) * math.sqrt(gamma + 3)) == pytest.approx(sigma_rel, rel=1e-9)
    # the width itself: the standard deviation of the density (γ + 1)·t^γ on [0, 1]
    mean, square = (gamma + 1) / (gamma + 2), (gamma + 1) / (gamma + 3)
    assert math.sqrt(square - mean**2) == pytest.approx(sigma_rel, rel=1e-6)


def test_power_exponents_are_the_published_ones() -> None:
    """EDM2 states for its two averages that γ = 16.97 has a width of 5 %, and γ = 6.94 one of 10 %."""
    assert (round(power_exponent(0.05), 2), round(power_exponent(0.1), 2)) == (16.97, 6.94)


widths = st.floats(0.02, 0.25)


lengths = st.floats(10.0, 1000.0)


def profile(t: np.ndarray | float, end: float, std: float) -> np.ndarray:
    """Return the weight of time t in the average of this width that ends at `end`, by equation 121."""
    gamma = power_exponent(std)
    return np.where(np.asarray(t) <= end, (gamma + 1) * np.asarray(t) ** gamma / end ** (gamma + 1), 0.0)


@settings(max_examples=40)
@given(lengths, widths, lengths, widths)
def test_correlation_is_the_integral_of_the_product(a: float, a_std: float, b: float, b_std: float) -> None:
    expected, _ = integrate.quad(lambda t: float(profile(t, a, a_std) * profile(t, b, b_std)), 0, min(a, b), limit=200)
    found = float(correlation(*map(np.array, (a, a_std, b, b_std))))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("std", [0.06, 0.07, 0.12])
def test_coefficients_are_the_least_squares_over_the_profiles(std: float) -> None:
    """Compare with least squares by numpy over profiles of 200,000 points, and with the paper's algorithm."""
    steps, stds = [s for s in (50, 100, 150, 200) for _ in range(2)], [0.05, 0.1] * 4
    t = (np.arange(200_000) + 0.5) / 1000
    columns = np.stack([profile(t, end, width) for end, width in zip(steps, stds, strict=True)], axis=1)
    expected = np.linalg.lstsq(columns, profile(t, 200, std), rcond=None)[0]
    found = posthoc_coefficients(steps, stds, 200, std)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-2, atol=1e-3)
    assert found.sum() == pytest.approx(1.0)


def test_a_width_that_is_there_is_itself() -> None:
    found = posthoc_coefficients([100, 100, 200, 200], [0.05, 0.1, 0.05, 0.1], 200, 0.1)
    np.testing.assert_allclose(found, [0, 0, 0, 1], atol=1e-9)


@pytest.fixture(scope="module")
def simulated() -> tuple[np.ndarray, list[tuple[int, float, np.ndarray]]]:
    """The weights of a run after each of its 2000 steps, and its snapshots: (step, width, average)."""
    rng = np.random.default_rng(0)
    # decaying to a point, with the noise of the steps
    iterates = 3 * np.exp(-np.arange(1, 2001) / 700)[:, None] + np.cumsum(0.01 * rng.standard_normal((2000, 50)), 0)
    averages, snapshots = make_averages(EmaConfig(snapshot_every=100)), []
    assert [name for name, ema in averages.items() if ema.has_begun(1)] == ["ema-0.050", "ema-0.100"]
    for step, weights in enumerate(torch.from_numpy(iterates).float(), start=1):
        for name, ema in averages.items():
            ema.update({"w": weights}.items(), step)
            if step % 100 == 0 and name != "ema":
                assert ema.average is not None
                snapshots.append((step, float(name[4:]), ema.average["w"].double().numpy().copy()))
    return iterates, snapshots


@pytest.mark.parametrize(("std", "tolerance"), [(0.05, 1e-5), (0.07, 2e-3), (0.12, 1e-2), (0.2, 5e-2)])
def test_a_rebuilt_average_is_the_one_of_all_iterates(
    simulated: tuple[np.ndarray, list[tuple[int, float, np.ndarray]]], std: float, tolerance: float
) -> None:
    """Rebuild averages of the run from a snapshot every 100 steps.

    Errors are relative to the distance between raw weights and average.
    """
    iterates, snapshots = simulated
    steps, stds, values = zip(*snapshots, strict=True)
    found = posthoc_coefficients(steps, stds, 2000, std) @ np.stack(values)
    gamma = power_exponent(std)
    up_to = (np.arange(2001) / 2000) ** (gamma + 1)
    expected = np.diff(up_to) @ iterates
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(iterates[-1] - expected)


def test_a_swap_is_exact_both_ways() -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.randn(7).to(memory_format=torch.contiguous_format)}
    ema = make_averages(EmaConfig(start_step=1))["ema"]
    ema.swap(weights.items())  # there is no average yet
    ema.update(weights.items(), 1)
    for weight in weights.values():
        weight.mul_(-0.3)
    assert ema.average is not None
    before = [{name: value.clone() for name, value in held.items()} for held in (weights, ema.average)]
    ema.swap(weights.items())
    assert all(weights[name].equal(before[1][name]) and ema.average[name].equal(before[0][name]) for name in weights)
    ema.swap(weights.items())
    assert all(weights[name].equal(before[0][name]) and ema.average[name].equal(before[1][name]) for name in weights)
