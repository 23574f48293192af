"""Scores: numbers from a sample's metadata. They are stored with the sample, and training can filter samples by them.

Stage 1's setting `scores` names the scores of a new root, which records these names. A score is read from the field of
its own name in a sample's JSON, or from a field listed in `OTHER_NAMES`.
"""

import numpy as np
from pydantic import model_validator

from shards.base.config import Config

LAION_SCORES = ("aesthetic", "similarity", "punsafe", "pwatermark")
"""Scores of LAION's releases, which are the default of `scores`."""
OTHER_NAMES = {"aesthetic": ("AESTHETIC_SCORE", "aesthetic_score")}
"""Score → other fields of a sample's JSON that may hold it in LAION's releases."""


class Range(Config):
    """A lower bound, an upper bound or both. Bounds are inclusive. Values are compared in float32, in which scores are
    stored."""

    min: float | None = None
    """Lower bound."""
    max: float | None = None
    """Upper bound."""

    @model_validator(mode="after")
    def _check(self) -> "Range":
        if self.min is None and self.max is None:
            raise ValueError("set min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is greater than max {self.max:g}; lower min or raise max")
        return self

    @property
    def rules(self) -> list[tuple[np.ufunc, float, str]]:
        """Each bound that is set, as (comparison, limit, text such as `≥ 5`)."""
        both = ((np.greater_equal, self.min, "≥"), (np.less_equal, self.max, "≤"))
        return [(compare, limit, f"{sign} {limit:g}") for compare, limit, sign in both if limit is not None]
