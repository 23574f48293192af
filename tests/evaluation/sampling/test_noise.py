"""Noise keyed by sample."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from evaluation.sampling.noise import initial_noise, key_of, step_generator

SHAPE = (4, 8, 8)
GOLDEN = [-1.6681451797485352, 1.253499984741211, -1.4484471082687378]


def test_noise_depends_on_every_part_of_the_key_and_on_nothing_else() -> None:
    names = list(product((0, 1, 2**62), ("a", "b", "1"), (0, 1)))
    drawn = {initial_noise(*name, SHAPE).numpy().tobytes() for name in names}
    assert len(drawn) == len(names)
    torch.manual_seed(5)
    np.random.seed(5)
    assert torch.equal(initial_noise(0, "a", 0, SHAPE), initial_noise(0, "a", 0, SHAPE))
    assert key_of(1, "1", 1) != key_of(11, "1", 1) != key_of(1, "11", 1)


def test_normals_match_the_formula_on_the_raw_stream() -> None:
    """The expected values are computed word by word with Python floats. An odd count drops the last normal."""
    words = [int(word) for word in np.random.Philox(key=key_of(3, "x", 7)).random_raw(6)]
    u = [((word >> 11) + 0.5) / 2**53 for word in words]
    radii = [math.sqrt(-2 * math.log(value)) for value in u[:3]]
    expected = [r * math.cos(2 * math.pi * v) for r, v in zip(radii, u[3:], strict=True)]
    expected += [r * math.sin(2 * math.pi * v) for r, v in zip(radii, u[3:], strict=True)]
    assert initial_noise(3, "x", 7, (5,)).tolist() == pytest.approx(expected[:5], rel=1e-6)


def test_golden_values() -> None:
    """Noise must never change between versions."""
    assert initial_noise(0, "a fox", 0, (3,)).tolist() == pytest.approx(GOLDEN, rel=1e-6)


def test_noise_is_normal_and_uncorrelated() -> None:
    values = np.concatenate([initial_noise(0, str(i), 0, SHAPE).numpy().ravel() for i in range(200)])
    assert kstest(values, "norm").pvalue > 1e-3
    pairs = np.stack([initial_noise(0, "a", i, (2000,)).numpy() for i in range(2)])
    assert abs(np.corrcoef(pairs)[0, 1]) < 0.08


def test_the_generator_of_stochastic_samplers_is_keyed_by_sample() -> None:
    first, again, other = (torch.randn(4, generator=step_generator(0, name, 0)) for name in ("a", "a", "b"))
    assert torch.equal(first, again) and not torch.equal(first, other)
