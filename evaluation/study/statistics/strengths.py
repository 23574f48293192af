"""Strengths of three or more models, from votes on pairs of models, by the Bradley–Terry model. Ties count as halves.

P(i is preferred to j) = 1 / (1 + exp(θⱼ − θᵢ)), with Σθ = 0. PRIOR votes are added to each side of every pair, so that
a model that lost every vote still has a finite strength. For two models, this is the Haldane–Anscombe correction of
the log odds.
"""

from dataclasses import dataclass

import numpy as np

from evaluation.metrics.intervals import COVERAGE

PRIOR = 0.5
REPLICATES = 2000
TOLERANCE, MAX_STEPS, MAX_STEP = 1e-10, 200, 1.0
"""Newton's method: convergence threshold, maximum number of steps, maximum change of a strength in one step."""


@dataclass(frozen=True)
class Strengths:
    """Strengths of K models with 95 % intervals. All fields are (K,)."""

    value: np.ndarray
    """θ, in log odds."""
    low: np.ndarray
    """−∞, with `high` +∞ and shares between 0 and 1, if there is only one prompt or one rater."""
    high: np.ndarray
    share: np.ndarray
    """Mean probability of being preferred to each other model."""
    share_low: np.ndarray
    share_high: np.ndarray


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """Fit strengths by Newton's method on the concave log likelihood, with steps of at most MAX_STEP.

    With wᵢⱼ votes for i against j and nᵢⱼ votes on the pair, the gradient for θᵢ is Σⱼ wᵢⱼ − nᵢⱼ·pᵢⱼ and the curvature
    is −Σⱼ nᵢⱼ·pᵢⱼ·pⱼᵢ.

    Args:
        wins: (…, K, K) number of votes for the row's model against the column's model.

    Returns:
        (…, K) strengths.
    """
    count = wins.shape[-1]
    wins = (wins + PRIOR) * (1 - np.eye(count))
    games, theta = wins + np.swapaxes(wins, -1, -2), np.zeros(wins.shape[:-1])
    for _ in range(MAX_STEPS):
        share = 1 / (1 + np.exp(theta[..., None, :] - theta[..., :, None]))
        gradient = (wins - games * share).sum(-1)
        pairs = games * share * np.swapaxes(share, -1, -2)
        # adding a constant to all θ changes nothing, so the curvature is singular until that direction is fixed
        scale = pairs.mean((-1, -2), keepdims=True)
        curvature = np.eye(count) * pairs.sum(-1)[..., None] - pairs + scale
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        theta = theta + np.clip(step, -MAX_STEP, MAX_STEP)
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
    """Estimate strengths with percentile intervals from a bootstrap over both prompts and raters.

    A vote's weight is the number of times its prompt was drawn, times the number of times its rater was drawn. Owen
    ("The pigeonhole bootstrap", Annals of Applied Statistics 1, 2007) shows that such intervals tend to be too wide
    rather than too narrow. With two or three raters, however, they are too narrow, and one rater or one prompt says
    nothing about how others would have voted, so every share from 0 to 1 is possible.

    Args:
        scores: (N,) score of each pair's first model: 1 if it won, 0 if it lost, 0.5 for a tie.
        pairs: (N, 2) indices of the models in each pair.
        prompts: (N,) prompt ids of any type.
        raters: (N,) rater ids of any type.
    """
    _, prompt_of = np.unique(prompts, return_inverse=True)
    _, rater_of = np.unique(raters, return_inverse=True)
    votes = np.zeros((len(scores), num_models, num_models))
    rows = np.arange(len(scores))
    votes[rows, pairs[:, 0], pairs[:, 1]] = scores
    votes[rows, pairs[:, 1], pairs[:, 0]] = 1 - scores
    value = bradley_terry(votes.sum(0))
    if not (prompt_of.any() and rater_of.any()):  # one prompt or one rater
        unbounded = np.full(num_models, np.inf)
        return Strengths(value, -unbounded, unbounded, shares(value), np.zeros(num_models), np.ones(num_models))
    flat = votes.reshape(len(scores), -1)
    rng = np.random.default_rng(seed)
    resampled = []
    for _ in range(replicates):
        weights = _resampled_counts(rng, prompt_of) * _resampled_counts(rng, rater_of)
        resampled.append(weights @ flat)
    thetas = bradley_terry(np.array(resampled).reshape(-1, num_models, num_models))
    ends = [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2]
    low, high = np.quantile(thetas, ends, axis=0)
    share_low, share_high = np.quantile(shares(thetas), ends, axis=0)
    return Strengths(value, low, high, shares(value), share_low, share_high)


def shares(theta: np.ndarray) -> np.ndarray:
    """Convert (…, K) strengths into each model's mean probability of being preferred to each other model, (…, K)."""
    count = theta.shape[-1]
    wins = 1 / (1 + np.exp(theta[..., None, :] - theta[..., :, None]))
    means: np.ndarray = (wins.sum(-1) - 0.5) / (count - 1)
    return means


def _resampled_counts(rng: np.random.Generator, clusters: np.ndarray) -> np.ndarray:
    """Resample the votes' (N,) clusters with replacement, and return how often each vote's cluster was drawn, (N,)."""
    count = int(clusters.max()) + 1
    return np.bincount(rng.integers(count, size=count), minlength=count)[clusters].astype(float)
