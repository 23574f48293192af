"""Names of the columns of datasets of image URLs; datasets.yaml describes those that are recognised."""

import functools
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import yaml
from pydantic import Field

from shards.base.config import Config

COLUMNS: dict[str, tuple[pa.DataType, tuple[str, ...]]] = {
    "URL": (pa.string(), ("URL", "url")),
    "TEXT": (pa.string(), ("TEXT", "text", "CAPTION", "caption")),
    "WIDTH": (pa.int32(), ("WIDTH", "width", "original_width")),
    "HEIGHT": (pa.int32(), ("HEIGHT", "height", "original_height")),
    "AESTHETIC_SCORE": (pa.float32(), ("AESTHETIC_SCORE", "aesthetic", "aesthetic_score", "AESTHETIC")),
    **{name: (pa.float32(), (name, name.upper())) for name in ("similarity", "punsafe", "pwatermark")},
    "hash": (pa.int64(), ("hash",)),
    "LANGUAGE": (pa.string(), ("LANGUAGE", "language")),
    "source_key": (pa.string(), ("key", "source_key")),  # img2dataset reserves the name `key`
    "license": (pa.string(), ("license", "LICENSE")),
    "md5": (pa.string(), ("md5",)),
    "sha256": (pa.string(), ("sha256",)),
}
"""Canonical column name → (type in the selected files, names under which the LAION releases publish the column)."""
SPELLINGS = {spelling: name for name, (_, spellings) in COLUMNS.items() for spelling in spellings}
"""LAION's names of a column → canonical name."""
SCORE_COLUMNS = ("AESTHETIC_SCORE", "similarity", "punsafe", "pwatermark")
"""Canonical names of the columns with LAION's scores."""
DATASETS = Path(__file__).with_name("datasets.yaml")


class DatasetConfig(Config):
    """Names of a dataset's columns. A column that is not named here is found under any of LAION's names for it."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Canonical name of a column → its name in the metadata, as in `{URL: link, TEXT: alt, AESTHETIC_SCORE: beauty}`.
    The canonical names are URL, TEXT, WIDTH, HEIGHT, AESTHETIC_SCORE, similarity, punsafe, pwatermark, LANGUAGE, hash,
    source_key, license, md5 and sha256."""
    keep: list[str] = Field(default_factory=list)
    """Further columns to keep under their own names."""


class KnownDataset(DatasetConfig):
    """A dataset that is recognised by its columns."""

    title: str
    recognised_by: tuple[str, ...]
    """Columns that only this dataset has."""
    advice: str = ""
    """Note for its users, which the command prints."""


LAION = KnownDataset(title="LAION", recognised_by=())


@functools.cache
def known_datasets() -> tuple[KnownDataset, ...]:
    """Return the datasets of datasets.yaml."""
    return tuple(KnownDataset.model_validate(fields) for fields in yaml.safe_load(DATASETS.read_text()).values())


def recognise(columns: Iterable[str]) -> KnownDataset:
    """Return the dataset to which metadata with these columns belongs, or `LAION` if it is none of datasets.yaml."""
    found = set(columns)
    return next((dataset for dataset in known_datasets() if found.issuperset(dataset.recognised_by)), LAION)
