"""Scores: numbers from a sample's metadata. They are stored with the sample, and training can filter samples by them.

Scores are declared only in `SCORES`. The list determines the JSON fields that stage 1 reads, the columns that selection
keeps, the columns of samples.parquet, the MDS column `scores`, the dataset card, and the fields of `data.filter`. A
root records the names of its scores, so changing the list affects only new roots.

To add a score, add an entry to the list. A program can also append an entry before it imports anything else from
latentmill:

    from shards.format.scores import SCORES, Score
    SCORES.append(Score("hps", "Human preference score v2"))

Ray workers do not see an entry that a program appends. They read its score from the JSON field of the same name, but do
not know its aliases.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """One number per sample, or NaN if the sample does not have the score."""

    name: str
    """Name of the score, of its column in samples.parquet, and of its field in `data.filter`."""
    description: str
    """Meaning of the score, for help texts."""
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
    Score("aesthetic", "Predicted aesthetic score", metadata_name="AESTHETIC_SCORE", aliases=("aesthetic_score",)),
    Score("similarity", "CLIP similarity between image and caption"),
    Score("punsafe", "Predicted probability that the image is unsafe"),
    Score("pwatermark", "Predicted probability of a watermark"),
]
LAION_SCORES = tuple(score.name for score in SCORES)
"""Names of LAION's scores. A root that does not record the names of its scores has these scores."""


def score_names() -> tuple[str, ...]:
    """Return the names of all declared scores. A new root stores all of them."""
    return tuple(score.name for score in SCORES)


def score_fields(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return, for each score, the fields of a sample's JSON that may hold it (see `Score.fields`).

    A score that is not declared in this process is read from the field of its own name.
    """
    declared = {score.name: score.fields for score in SCORES}
    return [declared.get(name, (name,)) for name in names]
