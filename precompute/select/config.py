"""Config for `python -m precompute.select`."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from precompute.select.datasets import DatasetConfig
from shards.base.config import Config
from shards.base.store import LocalPath
from shards.format.buckets import BucketName
from shards.format.scores import Range

Probability = Annotated[float, Field(ge=0, le=1)]


class FiltersConfig(Config):
    """Filters on the metadata columns. A null filter is disabled; an enabled filter also drops rows in which its
    column has no value."""

    min_aesthetic: float | None = 4.5
    """Minimum aesthetic score (inclusive)."""
    max_punsafe: Probability | None = 0.1
    """Upper bound on the probability that the image is unsafe (exclusive)."""
    max_pwatermark: Probability | None = None
    """Upper bound on the probability of a watermark (exclusive)."""
    min_similarity: float | None = None
    """Minimum CLIP similarity between image and caption (inclusive)."""
    scores: dict[str, Range | None] = Field(default_factory=dict)
    """Bounds (inclusive) on other numeric columns, as in `{nsfw_score_gantman: {max: 0.1}}`. The columns are kept."""
    min_side: NonNegativeInt | None = 256
    """Minimum of width and height in pixels (inclusive)."""
    max_aspect_ratio: Annotated[float, Field(ge=1)] | None = None
    """Maximum ratio of the longer side to the shorter side (inclusive)."""
    languages: list[str] | None = None
    """Accepted languages."""
    min_caption: NonNegativeInt | None = 1
    """Minimum length of the caption in characters, after stripping whitespace (inclusive)."""
    max_caption: PositiveInt | None = None
    """Maximum length of the caption in characters, after stripping whitespace (inclusive)."""


class UrlsConfig(Config):
    """Filters on URLs. Rows whose URL is not http or https are always dropped."""

    allow_private_hosts: bool = False
    """Keep URLs that point to private or loopback hosts. Use this only with a local test server, never to crawl
    third-party URLs."""
    drop_duplicates: bool = True
    """Among rows whose URLs are byte-identical, keep only the first one that passes all other rules."""
    opt_out: LocalPath | None = None
    """Opt-out list of hosts and URLs to drop: a text file with one entry per line, or parquet with a URL column. The
    command fails if an entry could never match a URL."""


class SelectConfig(Config):
    """Selection of the rows of metadata to download, with a record of how many rows each rule dropped."""

    metadata: str
    """Parquet metadata: a file, a folder (searched recursively) or a glob, as a local path or an fsspec URL."""
    dataset: DatasetConfig | None = None
    """Names of the columns. null: DataComp, COYO, PD12M and PD3M are recognised, and LAION's names are used
    otherwise."""
    output: LocalPath
    """Output folder for selected-00000.parquet (and so on), funnel.json and funnel.png."""
    filters: FiltersConfig = FiltersConfig()
    urls: UrlsConfig = UrlsConfig()
    buckets: tuple[BucketName, ...] = ("256x256", "512x512")
    """Resolution buckets; the funnel reports how many selected rows are large enough for each."""
    rows_per_file: PositiveInt = 1_000_000
    """Rows per output file; the last file may have fewer."""
    processes: PositiveInt = 2
    """Number of worker processes, each of which reads one input file at a time."""
    partition_rows: PositiveInt = 2_000_000
    """Maximum average number of rows per partition in the search for duplicates. Each process needs about 100 bytes of
    memory for each row of a partition."""
