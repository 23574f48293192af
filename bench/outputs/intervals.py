"""How often the metrics' 95 % intervals hold what they are said to hold: `python -m bench.outputs.intervals`.

Features are drawn from known distributions that are far apart, close, or equal, and each interval is computed as
`python -m evaluation score` computes it. The true value comes from elsewhere: a closed form, kernels over samples that
are all independent, or, where the estimand is a mean over draws, the mean of other draws.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch

from bench.kit.common import machine
from evaluation.metrics.frechet import Moments, frechet_at_n, frechet_distance, frechet_infinity
from evaluation.metrics.intervals import Estimate, mean_interval
from evaluation.metrics.kernels import CMMD_SCALE, Kernel, cmmd, cubic, gaussian, kid
from evaluation.metrics.manifold import precision, recall

FIXED_SEED, OTHER_SEEDS = 10**6, 2 * 10**6
"""Of what an estimand holds fixed; the first one of the draws that say what the estimand is."""
INDEPENDENT, ROUNDS = 4096, 64
"""Samples of a side, and how often, for a kernel's means."""


@dataclass(frozen=True)
class Evaluation:
    """How many features are drawn, of how many dimensions, and how many of each prompt."""

    dimensions: int
    count: int
    per_prompt: int

    @property
    def scales(self) -> np.ndarray:
        """(dimensions,) deviations of features."""
        return np.arange(1, self.dimensions + 1) ** -0.5

    @property
    def clusters(self) -> np.ndarray:
        """(count,) prompts."""
        return np.arange(self.count) // self.per_prompt

    def noise(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """(count, dimensions) of mean 0 and variance 1, skewed as ReLU's averages are."""
        shape = 4.0
        values: np.ndarray = (rng.gamma(shape, size=(count, self.dimensions)) - shape) / shape**0.5
        return values

    def reference(self, rng: np.random.Generator, count: int | None = None) -> np.ndarray:
        """(count, dimensions) of the reference's distribution."""
        return self.noise(rng, count or self.count) * self.scales

    @property
    def fixed_reference(self) -> np.ndarray:
        """One reference for all draws."""
        return self.reference(np.random.default_rng(FIXED_SEED))


@dataclass(frozen=True)
class World:
    """A model's distribution beside that of the reference: both skewed, the model's moved and widened."""

    name: str
    shift: float
    width: float

    def draw(self, rng: np.random.Generator, of: Evaluation) -> np.ndarray:
        """(count, dimensions), where a prompt's samples share half of their variance."""
        shared = np.repeat(of.noise(rng, -(-of.count // of.per_prompt)), of.per_prompt, axis=0)[: of.count]
        return self.place((of.noise(rng, of.count) + shared) / 2**0.5, of)

    def draw_apart(self, rng: np.random.Generator, of: Evaluation, count: int) -> np.ndarray:
        """(count, dimensions), each of a prompt of its own."""
        return self.place((of.noise(rng, count) + of.noise(rng, count)) / 2**0.5, of)

    def place(self, noise: np.ndarray, of: Evaluation) -> np.ndarray:
        """Moved and widened."""
        return (noise * self.width + self.shift) * of.scales

    def distance(self, of: Evaluation) -> float:
        """The Fréchet distance from the reference's distribution, in closed form."""
        return float(((self.shift**2 + (self.width - 1) ** 2) * of.scales**2).sum())

    def discrepancy(self, of: Evaluation, kernel: Kernel) -> float:
        """MMD², by means of a kernel over samples of which no two depend on each other."""
        rng, found = np.random.default_rng(OTHER_SEEDS), []
        for _ in range(ROUNDS):
            x, x2 = (torch.from_numpy(self.draw_apart(rng, of, INDEPENDENT)) for _ in range(2))
            y, y2 = (torch.from_numpy(of.reference(rng, INDEPENDENT)) for _ in range(2))
            found.append(float(kernel(x, x2).mean() + kernel(y, y2).mean() - 2 * kernel(x, y).mean()))
        return float(np.mean(found))


WORLDS = (World("far", 0.6, 1.3), World("near", 0.2, 1.1), World("equal", 0.0, 1.0))
Simulation = Callable[[World, Evaluation, np.random.Generator], Estimate]


def fid(world: World, of: Evaluation, rng: np.random.Generator) -> Estimate:
    """Against one reference for all draws."""
    return frechet_at_n(world.draw(rng, of), of.clusters, Moments.of(of.fixed_reference))


def precision_at_reference(world: World, of: Evaluation, rng: np.random.Generator) -> Estimate:
    """Against one reference for all draws."""
    return precision(world.draw(rng, of), of.clusters, of.fixed_reference)


def recall_of_samples(world: World, of: Evaluation, rng: np.random.Generator) -> Estimate:
    """Of the same samples in all draws."""
    return recall(world.draw(np.random.default_rng(FIXED_SEED), of), of.clusters, of.reference(rng))


SIMULATIONS: dict[str, Simulation] = {
    "fid": fid,
    "fid_infinity": lambda world, of, rng: frechet_infinity(world.draw(rng, of), of.clusters, of.reference(rng)),
    "kid": lambda world, of, rng: kid(world.draw(rng, of), of.clusters, of.reference(rng)),
    "cmmd": lambda world, of, rng: cmmd(world.draw(rng, of), of.clusters, of.reference(rng)),
    "precision": precision_at_reference,
    "recall": recall_of_samples,
    "clip_score": lambda world, of, rng: mean_interval(world.draw(rng, of)[:, 0], of.clusters, ""),
}


def one(seed: int, name: str, world: World, of: Evaluation) -> tuple[float, float, float]:
    """Value and interval of one simulated evaluation."""
    torch.set_num_threads(1)
    found = SIMULATIONS[name](world, of, np.random.default_rng(seed))
    return found.value, found.low, found.high


def value(seed: int, name: str, world: World, of: Evaluation) -> float:
    """Without its interval, of metrics whose estimand is a mean over draws."""
    if name == "fid":
        drawn = world.draw(np.random.default_rng(seed), of)
        return frechet_distance(Moments.of(drawn), Moments.of(of.fixed_reference))
    return one(seed, name, world, of)[0]


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.outputs.intervals", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SIMULATIONS))
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dimensions", type=int, default=32)
    parser.add_argument("--count", type=int, default=1024, help="samples of a draw, and pictures of the reference")
    parser.add_argument("--per_prompt", type=int, default=2)
    options = parser.parse_args()
    of = Evaluation(options.dimensions, options.count, options.per_prompt)
    print(f"## Intervals\n\n{of}, {options.draws} draws; {machine()}.\n")
    print("| metric | model | what is estimated | mean estimate | deviation | mean half-width | holds it |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with get_context("spawn").Pool(options.processes) as pool:
        for name in options.names:
            for world in WORLDS:
                others = range(OTHER_SEEDS, OTHER_SEEDS + options.draws)
                kernels = {"kid": (1.0, cubic), "cmmd": (CMMD_SCALE, gaussian)}
                if name == "fid_infinity":
                    truth = world.distance(of)
                elif name == "clip_score":
                    truth = world.shift
                elif name in kernels:
                    scale, kernel = kernels[name]
                    truth = scale * world.discrepancy(of, kernel)
                else:
                    truth = float(np.mean(pool.map(partial(value, name=name, world=world, of=of), others, chunksize=5)))
                found = pool.map(partial(one, name=name, world=world, of=of), range(options.draws), chunksize=5)
                values, low, high = np.array(found).T
                holds = ((low <= truth) & (truth <= high)).mean()
                half = ((high - low) / 2).mean()
                figures = f"{truth:.5g} | {values.mean():.5g} | {values.std():.3g} | {half:.3g}"
                print(f"| {name} | {world.name} | {figures} | {holds:.1%} |", flush=True)


if __name__ == "__main__":
    main()
