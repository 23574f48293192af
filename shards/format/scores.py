"""Scores: numbers from a sample's metadata. They are stored with the sample, and training can filter samples by them.

Stage 1's setting `scores` names the scores of a new root, which records these names. `SCORES` are the scores of LAION's
releases, which spell their names in several ways. `precompute.select` has a filter for each of them.
"""

from dataclasses import dataclass

import numpy as np
from pydantic import model_validator

from shards.base.config import Config


@dataclass(frozen=True)
class Score:
    """One number per sample, or NaN if the sample does not have the score."""

    name: str
    """Name of the score, of its column in samples.parquet, and of its field in `data.filter`."""
    metadata_name: str = ""
    """Name of the score's column in the selected metadata, if it differs from `name`."""
    aliases: tuple[str, ...] = ()
    """Other names of the score in JSON files and metadata."""

    @property
    def column(self) -> str:
        """Name of the score's column in the selected metadata."""
        return self.metadata_name or self.name

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of a sample's JSON that may hold the score. The first one that holds a number is used."""
        return tuple(dict.fromkeys((self.name, self.column, *self.aliases)))


SCORES = [
    Score("aesthetic", metadata_name="AESTHETIC_SCORE", aliases=("aesthetic_score",)),
    Score("similarity"),
    Score("punsafe"),
    Score("pwatermark"),
]
LAION_SCORES = tuple(score.name for score in SCORES)
"""Names of LAION's scores. A root that does not record the names of its scores has these scores."""


def score_fields(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return, for each score, the fields of a sample's JSON that may hold it (see `Score.fields`).

    A score that is not LAION's is read from the field of its own name.
    """
    spellings = {score.name: score.fields for score in SCORES}
    return [spellings.get(name, (name,)) for name in names]


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
