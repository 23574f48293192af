"""Measure the error of int8 on heavy-tailed latents: `python -m bench.outputs.heavy_tails`.

The table is for docs/evidence/storage.txt. The latents are synthetic, with the shape of a 32-channel
autoencoder's at 1024 px, 32 × 32: no weights of such an autoencoder were at hand. int8 has one scale per plane (one
channel of one picture), so a plane's largest value sets the error of all of it.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch

from bench.kit.common import machine, table
from shards.format.image import dequantise, quantise

CHANNELS, SIDE = 32, 32
MEDIAN_OF_NORMAL = 0.6745
"""Median of |x| for a standard normal x: a plane's median over this estimates the deviation of its bulk."""

Sampler = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard normals."""
    return generator.standard_normal(shape)


def student(freedom: int) -> Sampler:
    """Make a sampler of Student's t."""
    return lambda generator, shape: generator.standard_t(freedom, shape)


def scaled_channels(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw normals whose channels differ in scale by up to 10,000 times."""
    return normal(generator, shape) * np.logspace(-2, 2, CHANNELS)[:, None, None]


def one_outlier(size: float) -> Sampler:
    """Make a sampler of standard normals with one value of ± `size` in each plane."""

    def sample(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = normal(generator, shape).reshape(*shape[:-2], -1)
        values[..., 0] = size * generator.choice([-1, 1], shape[:-2])
        return values.reshape(shape)

    return sample


LATENTS: dict[str, Sampler] = {
    "normal": normal,
    "normal, channel scales 0.01 to 100": scaled_channels,
    **{f"Student-t, {freedom} degrees of freedom": student(freedom) for freedom in (10, 5, 4, 3, 2)},
    **{f"normal, one value of {size} σ per channel": one_outlier(size) for size in (10, 30, 100)},
}


def rms(values: np.ndarray) -> np.ndarray:
    """Compute the root mean square of each plane."""
    return np.sqrt((values**2).mean(axis=(-2, -1)))


def row(name: str, sampler: Sampler, pictures: int) -> list[str]:
    """Measure one distribution, in float64."""
    exact = sampler(np.random.default_rng(0), (pictures, CHANNELS, SIDE, SIDE))
    given = torch.from_numpy(exact).float()
    codes, scales = quantise(given, CHANNELS)
    error = rms(dequantise(codes, scales).double().numpy() - exact)
    half = rms(given.half().double().numpy() - exact)
    relative = error / rms(exact)
    bulk = np.median(np.abs(exact), axis=(-2, -1)) / MEDIAN_OF_NORMAL
    zeros = (codes == 0).double().mean().item()
    numbers = [np.median(relative), np.quantile(relative, 0.99), relative.max(), np.median(error / bulk)]
    numbers += [np.quantile(error / bulk, 0.99), (error / bulk).max(), zeros]
    return [name, *(f"{number:.2%}" for number in numbers), f"{np.median(half / rms(exact)):.3%}"]


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}\n\n{options.pictures * CHANNELS:,} planes of {SIDE} × {SIDE} values.\n")
    head = ["latents", "error / RMS: median", "p99", "max", "error / bulk: median", "p99", "max"]
    head += ["stored as 0", "float16"]
    print(table(head, [row(name, sampler, options.pictures) for name, sampler in LATENTS.items()]))


if __name__ == "__main__":
    main()
