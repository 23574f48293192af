"""Measure the coverage of the metrics' 95 % intervals in simulations: `python -m bench.intervals`.

Features are drawn from known distributions that are far apart, close or equal, and intervals are computed as in
`python -m evaluation score`. The true value is obtained independently: in closed form, from kernels over independent
samples, or, if the estimand is a mean over draws, as the mean of other draws.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
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
"""Seed of samples that an estimand holds fixed, and the first seed of the draws that determine an estimand."""
INDEPENDENT, ROUNDS = 4096, 64
"""Samples per side and repetitions for a kernel's means."""


@dataclass(frozen=True)
class SimulatedSet:
    """Size of a simulated sample set: dimensions of features, number of samples, and samples per prompt."""

    dimensions: int
    count: int
    per_prompt: int

    @property
    def scales(self) -> np.ndarray:
        """(dimensions,) standard deviations of the features."""
        return np.arange(1, self.dimensions + 1) ** -0.5

    @property
    def clusters(self) -> np.ndarray:
        """(count,) index of each sample's prompt."""
        return np.arange(self.count) // self.per_prompt

    def noise(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw (count, dimensions) with mean 0 and variance 1, skewed like averages of ReLU outputs."""
        shape = 4.0
        values: np.ndarray = (rng.gamma(shape, size=(count, self.dimensions)) - shape) / shape**0.5
        return values

    def reference(self, rng: np.random.Generator) -> np.ndarray:
        """Draw (count, dimensions) from the reference's distribution."""
        return self.noise(rng, self.count) * self.scales

    @property
    def fixed_reference(self) -> np.ndarray:
        """The reference shared by all draws."""
        return self.reference(np.random.default_rng(FIXED_SEED))


@dataclass(frozen=True)
class SimulatedModel:
    """A model's distribution: the reference's, shifted and widened."""

    name: str
    shift: float
    width: float

    def draw(self, rng: np.random.Generator, of: SimulatedSet) -> np.ndarray:
        """Draw (count, dimensions). Samples of a prompt share half of their variance."""
        shared = np.repeat(of.noise(rng, -(-of.count // of.per_prompt)), of.per_prompt, axis=0)[: of.count]
        noise = (of.noise(rng, of.count) + shared) / 2**0.5
        return (noise * self.width + self.shift) * of.scales

    def distance(self, of: SimulatedSet) -> float:
        """Return the Fréchet distance from the reference's distribution, in closed form."""
        return float(((self.shift**2 + (self.width - 1) ** 2) * of.scales**2).sum())

    def discrepancy(self, of: SimulatedSet, kernel: Kernel) -> float:
        """Estimate MMD² from kernel means over independent samples."""
        rng, found, apart = np.random.default_rng(OTHER_SEEDS), [], replace(of, count=INDEPENDENT, per_prompt=1)
        for _ in range(ROUNDS):
            x, x2 = (torch.from_numpy(self.draw(rng, apart)) for _ in range(2))
            y, y2 = (torch.from_numpy(apart.reference(rng)) for _ in range(2))
            found.append(float(kernel(x, x2).mean() + kernel(y, y2).mean() - 2 * kernel(x, y).mean()))
        return float(np.mean(found))


MODELS = (SimulatedModel("far", 0.6, 1.3), SimulatedModel("near", 0.2, 1.1), SimulatedModel("equal", 0.0, 1.0))
Simulation = Callable[[SimulatedModel, SimulatedSet, np.random.Generator], Estimate]


def fid(model: SimulatedModel, of: SimulatedSet, rng: np.random.Generator) -> Estimate:
    """Compute FID against one reference for all draws."""
    return frechet_at_n(model.draw(rng, of), of.clusters, Moments.of(of.fixed_reference))


def precision_at_reference(model: SimulatedModel, of: SimulatedSet, rng: np.random.Generator) -> Estimate:
    """Compute precision against one reference for all draws."""
    return precision(model.draw(rng, of), of.clusters, of.fixed_reference)


def recall_of_samples(model: SimulatedModel, of: SimulatedSet, rng: np.random.Generator) -> Estimate:
    """Compute recall for the same samples in all draws, against varying references."""
    return recall(model.draw(np.random.default_rng(FIXED_SEED), of), of.clusters, of.reference(rng))


SIMULATIONS: dict[str, Simulation] = {
    "fid": fid,
    "fid_infinity": lambda model, of, rng: frechet_infinity(model.draw(rng, of), of.clusters, of.reference(rng)),
    "kid": lambda model, of, rng: kid(model.draw(rng, of), of.clusters, of.reference(rng)),
    "cmmd": lambda model, of, rng: cmmd(model.draw(rng, of), of.clusters, of.reference(rng)),
    "precision": precision_at_reference,
    "recall": recall_of_samples,
    "clip_score": lambda model, of, rng: mean_interval(model.draw(rng, of)[:, 0], of.clusters, ""),
}


def estimate(seed: int, name: str, model: SimulatedModel, of: SimulatedSet) -> tuple[float, float, float]:
    """Simulate one evaluation, and return its value and interval."""
    torch.set_num_threads(1)
    found = SIMULATIONS[name](model, of, np.random.default_rng(seed))
    return found.value, found.low, found.high


def value(seed: int, name: str, model: SimulatedModel, of: SimulatedSet) -> float:
    """Simulate one evaluation without its interval, for metrics whose estimand is a mean over draws."""
    if name == "fid":
        drawn = model.draw(np.random.default_rng(seed), of)
        return frechet_distance(Moments.of(drawn), Moments.of(of.fixed_reference))
    return estimate(seed, name, model, of)[0]


def main() -> None:
    """Simulate all metrics and print a table."""
    parser = argparse.ArgumentParser(prog="bench.intervals", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SIMULATIONS))
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dimensions", type=int, default=32)
    parser.add_argument("--count", type=int, default=1024, help="samples of a draw, and images of the reference")
    parser.add_argument("--per_prompt", type=int, default=2)
    options = parser.parse_args()
    of = SimulatedSet(options.dimensions, options.count, options.per_prompt)
    print(f"## Intervals\n\n{of}, {options.draws} draws; {machine()}.\n")
    print("| metric | model | true value | mean estimate | deviation | mean half-width | coverage |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with get_context("spawn").Pool(options.processes) as pool:
        for name in options.names:
            for model in MODELS:
                others = range(OTHER_SEEDS, OTHER_SEEDS + options.draws)
                kernels = {"kid": (1.0, cubic), "cmmd": (CMMD_SCALE, gaussian)}
                if name == "fid_infinity":
                    truth = model.distance(of)
                elif name == "clip_score":
                    truth = model.shift
                elif name in kernels:
                    scale, kernel = kernels[name]
                    truth = scale * model.discrepancy(of, kernel)
                else:
                    truth = float(np.mean(pool.map(partial(value, name=name, model=model, of=of), others, chunksize=5)))
                found = pool.map(partial(estimate, name=name, model=model, of=of), range(options.draws), chunksize=5)
                values, low, high = np.array(found).T
                holds = ((low <= truth) & (truth <= high)).mean()
                half = ((high - low) / 2).mean()
                figures = f"{truth:.5g} | {values.mean():.5g} | {values.std():.3g} | {half:.3g}"
                print(f"| {name} | {model.name} | {figures} | {holds:.1%} |", flush=True)


if __name__ == "__main__":
    main()
