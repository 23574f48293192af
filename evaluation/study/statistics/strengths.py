"""Strengths of three and more models from votes over pairs of them: Bradley and Terry's model, ties as halves.

P(i is preferred to j) = 1 / (1 + exp(θⱼ − θᵢ)), with Σθ = 0. Each pair has PRIOR of a vote for either side on top of
its votes, so that a model which lost every vote has a strength too; for two models that is Haldane and Anscombe's
correction of the log odds.
"""

from dataclasses import dataclass

import numpy as np

from evaluation.metrics.intervals import COVERAGE

PRIOR = 0.5
REPLICATES = 2000
TOLERANCE, MOST_STEPS, MOST_STEP = 1e-10, 200, 1.0


@dataclass(frozen=True)
class Strengths:
    """Of K models: each (K,)."""

    value: np.ndarray
    """θ, in log odds."""
    low: np.ndarray
    high: np.ndarray
    share: np.ndarray
    """The mean probability to be preferred to another model."""
    share_low: np.ndarray
    share_high: np.ndarray


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """(…, K, K) votes for the row's model against the column's → (…, K) strengths.

    By Newton's steps up the concave log likelihood, each at most MOST_STEP long: for θᵢ the slope is
    Σⱼ wᵢⱼ − nᵢⱼ·pᵢⱼ, and the curvature −Σⱼ nᵢⱼ·pᵢⱼ·pⱼᵢ.
    """
    count = wins.shape[-1]
    wins = (wins + PRIOR) * (1 - np.eye(count))
    games, theta = wins + np.swapaxes(wins, -1, -2), np.zeros(wins.shape[:-1])
    for _ in range(MOST_STEPS):
        share = 1 / (1 + np.exp(theta[..., None, :] - theta[..., :, None]))
        slope = (wins - games * share).sum(-1)
        bend = games * share * np.swapaxes(share, -1, -2)
        # all alike may be added to θ: where that is held at 0, the curvature has an inverse
        scale = bend.mean((-1, -2), keepdims=True)
        curvature = np.eye(count) * bend.sum(-1)[..., None] - bend + scale
        step = np.linalg.solve(curvature, slope[..., None])[..., 0]
        theta = theta + np.clip(step, -MOST_STEP, MOST_STEP)
        if np.abs(step).max() < TOLERANCE:
            break
    centred: np.ndarray = theta - theta.mean(-1, keepdims=True)
    return centred


def strengths(
    scores: np.ndarray,
    pairs: np.ndarray,
    prompts: np.ndarray,
    raters: np.ndarray,
    num_models: int,
    seed: int,
    replicates: int = REPLICATES,
) -> Strengths:
    """With percentile intervals over prompts and raters, both drawn again with replacement.

    A vote counts as often as its prompt was drawn times as often as its rater was (Owen, "The pigeonhole bootstrap",
    Annals of Applied Statistics 1, 2007, which shows that this errs to the side of too wide intervals).

    Args:
        scores: (N,) 1, 0 or 0.5 for the first model of the pair.
        pairs: (N, 2) numbers of models.
        prompts: (N,) any ids.
        raters: (N,) any ids.
    """
    _, prompt_of = np.unique(prompts, return_inverse=True)
    _, rater_of = np.unique(raters, return_inverse=True)
    votes = np.zeros((len(scores), num_models, num_models))
    rows = np.arange(len(scores))
    votes[rows, pairs[:, 0], pairs[:, 1]] = scores
    votes[rows, pairs[:, 1], pairs[:, 0]] = 1 - scores
    flat = votes.reshape(len(scores), -1)
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(replicates):
        weights = _drawn_again(rng, prompt_of) * _drawn_again(rng, rater_of)
        drawn.append(weights @ flat)
    thetas = bradley_terry(np.array(drawn).reshape(-1, num_models, num_models))
    value = bradley_terry(votes.sum(0))
    ends = [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2]
    low, high = np.quantile(thetas, ends, axis=0)
    share_low, share_high = np.quantile(shares(thetas), ends, axis=0)
    return Strengths(value, low, high, shares(value), share_low, share_high)


def shares(theta: np.ndarray) -> np.ndarray:
    """(…, K) → (…, K) each model's mean probability to be preferred to another one."""
    count = theta.shape[-1]
    wins = 1 / (1 + np.exp(theta[..., None, :] - theta[..., :, None]))
    found: np.ndarray = (wins.sum(-1) - 0.5) / (count - 1)
    return found


def _drawn_again(rng: np.random.Generator, clusters: np.ndarray) -> np.ndarray:
    """(N,) clusters → (N,) how often each one's cluster was drawn."""
    count = int(clusters.max()) + 1
    return np.bincount(rng.integers(count, size=count), minlength=count)[clusters].astype(float)
