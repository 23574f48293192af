"""How often the metrics' 95 % intervals hold what they are said to hold: `python -m bench.outputs.intervals`.

Features are drawn from known distributions, far from each other, near, and equal; each interval is computed as
`python -m evaluate score` computes it. What it estimates is known in closed form, or is the mean of very many draws.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch

from bench.kit.common import machine
from evaluate.metrics.frechet import Moments, frechet_at_n, frechet_infinity
from evaluate.metrics.intervals import Estimate, mean_interval
from evaluate.metrics.kernels import cmmd, kid
from evaluate.metrics.manifold import precision, recall

DIMENSIONS, COUNT, PER_PROMPT = 32, 1024, 2
FIXED_SEED = 10**6
"""Of what an estimand holds fixed."""


@dataclass(frozen=True)
class World:
    """A model's distribution beside that of the reference: both skewed, the model's moved and widened."""

    name: str
    shift: float
    width: float

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """(COUNT, DIMENSIONS), two of each prompt, which share half of their variance."""
        own, shared = noise(rng, COUNT), np.repeat(noise(rng, COUNT // PER_PROMPT), PER_PROMPT, axis=0)
        return ((own + shared) / 2**0.5) * self.width * SCALES + self.shift * SCALES

    @property
    def distance(self) -> float:
        """The Fréchet distance from the reference's distribution, in closed form."""
        return float(((self.shift**2 + (self.width - 1) ** 2) * SCALES**2).sum())


SCALES = np.arange(1, DIMENSIONS + 1) ** -0.5
WORLDS = (World("far", 0.6, 1.3), World("near", 0.2, 1.1), World("equal", 0.0, 1.0))


def noise(rng: np.random.Generator, count: int) -> np.ndarray:
    """(count, DIMENSIONS) of mean 0 and variance 1, skewed as ReLU's averages are."""
    shape = 4.0
    values: np.ndarray = (rng.gamma(shape, size=(count, DIMENSIONS)) - shape) / shape**0.5
    return values


def reference(rng: np.random.Generator) -> np.ndarray:
    """(COUNT, DIMENSIONS) of the reference's distribution."""
    return noise(rng, COUNT) * SCALES


def fixed_reference() -> np.ndarray:
    """One reference for all draws."""
    return reference(np.random.default_rng(FIXED_SEED))


Simulation = Callable[[World, np.random.Generator], Estimate]
CLUSTERS = np.arange(COUNT) // PER_PROMPT
SIMULATIONS: dict[str, Simulation] = {
    "fid": lambda world, rng: frechet_at_n(world.draw(rng), CLUSTERS, Moments.of(fixed_reference())),
    "fid_infinity": lambda world, rng: frechet_infinity(world.draw(rng), CLUSTERS, reference(rng)),
    "kid": lambda world, rng: kid(world.draw(rng), CLUSTERS, reference(rng)),
    "cmmd": lambda world, rng: cmmd(world.draw(rng), CLUSTERS, reference(rng)),
    "precision": lambda world, rng: precision(world.draw(rng), CLUSTERS, fixed_reference()),
    "recall": lambda world, rng: recall(world.draw(np.random.default_rng(FIXED_SEED)), CLUSTERS, reference(rng)),
    "clip_score": lambda world, rng: mean_interval(world.draw(rng)[:, 0], CLUSTERS, ""),
}


def one(seed: int, name: str, world: World) -> tuple[float, float, float]:
    """Value and interval of one simulated evaluation."""
    torch.set_num_threads(1)
    found = SIMULATIONS[name](world, np.random.default_rng(seed))
    return found.value, found.low, found.high


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.outputs.intervals", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SIMULATIONS))
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"## Intervals\n\n`python -m bench.outputs.intervals --draws {options.draws}`, {machine()}.\n")
    print("| metric | model | what is estimated | mean estimate | deviation | mean half-width | holds it |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with get_context("spawn").Pool(options.processes) as pool:
        for name in options.names:
            for world in WORLDS:
                found = pool.map(partial(one, name=name, world=world), range(options.draws), chunksize=10)
                values, low, high = np.array(found).T
                truth = world.distance if name == "fid_infinity" else values.mean()
                truth = world.shift if name == "clip_score" else truth
                holds = ((low <= truth) & (truth <= high)).mean()
                half = ((high - low) / 2).mean()
                figures = f"{truth:.5g} | {values.mean():.5g} | {values.std():.3g} | {half:.3g}"
                print(f"| {name} | {world.name} | {figures} | {holds:.1%} |", flush=True)


if __name__ == "__main__":
    main()
