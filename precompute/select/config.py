"""What a selection may be asked for."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from shards.base.config import Config
from shards.format.buckets import BucketName

Probability = Annotated[float, Field(ge=0, le=1)]


class FiltersConfig(Config):
    """Rows that stay. Each is off where it is null; a row without a value for a filter that is on is dropped."""

    min_aesthetic: float | None = 4.5
    """AESTHETIC_SCORE at or above."""
    max_punsafe: Probability | None = 0.1
    """punsafe below."""
    max_pwatermark: Probability | None = None
    """pwatermark below."""
    min_similarity: float | None = None
    """similarity of picture and caption at or above."""
    min_side: NonNegativeInt | None = 256
    """The shorter of WIDTH and HEIGHT, in pixels, at or above."""
    max_aspect_ratio: Annotated[float, Field(ge=1)] | None = None
    """The longer side divided by the shorter, at or below."""
    languages: list[str] | None = None
    """LANGUAGE one of these."""
    min_caption: NonNegativeInt | None = 1
    """Characters of TEXT without the blanks around it, at or above."""
    max_caption: PositiveInt | None = None
    """Characters of TEXT without the blanks around it, at or below."""


class UrlsConfig(Config):
    """URLs that stay. Those that are not http or https never do."""

    allow_private_hosts: bool = False
    """Keep URLs of private and loopback hosts (a local server; never a crawl of others' URLs)."""
    drop_duplicates: bool = True
    """Of rows with the same URL, byte for byte, keep the first that passed all else."""
    opt_out: Path | None = None
    """Drop the hosts and URLs that this file lists: text with one per line, or parquet with a URL column. An entry that
    would drop nothing is refused."""


class SelectConfig(Config):
    """LAION metadata → the rows to download, and a funnel that says what was dropped and why."""

    metadata: str
    """Parquet: a file, a folder (all files below it) or a glob; a path, or any address that fsspec opens."""
    output: Path
    """Folder of the selected rows: selected-00000.parquet and so on, funnel.json, funnel.png."""
    filters: FiltersConfig = FiltersConfig()
    urls: UrlsConfig = UrlsConfig()
    buckets: tuple[BucketName, ...] = ("256x256", "512x512")
    """Resolution buckets to count the selected rows for."""
    rows_per_file: PositiveInt = 1_000_000
    """Rows of each output file; the last has the rest."""
    processes: PositiveInt = 2
    """Input files read at the same time."""
    partition_rows: PositiveInt = 2_000_000
    """Duplicates are looked for among this many rows at a time, in each process: about 100 bytes of memory a row."""
