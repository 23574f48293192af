"""What a download may be asked for."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shards.base.config import Config


class ImagesConfig(Config):
    """What is stored of a picture."""

    mode: Literal["original", "keep_ratio_largest"] = "original"
    """`original`: the bytes as served. `keep_ratio_largest`: JPEG again, the longer side at most `max_side`."""
    max_side: PositiveInt = 1024
    """Longest side in pixels under keep_ratio_largest."""
    jpeg_quality: Annotated[int, Field(ge=1, le=100)] = 95
    """JPEG quality under keep_ratio_largest."""


class RequestsConfig(Config):
    """How one picture is asked for, and where we refuse to ask."""

    timeout_seconds: PositiveFloat = 10.0
    """Longest wait for a connection, or for the next bytes."""
    deadline_seconds: PositiveFloat = 30.0
    """Longest time for one response: ends servers that trickle."""
    max_bytes: PositiveInt = 64 * 2**20
    """Longest response; a longer one is given up at once."""
    max_redirects: NonNegativeInt = 5
    """Redirects followed for one picture."""
    retries: NonNegativeInt = 1
    """Further tries of a picture that failed."""
    allow_private_hosts: bool = False
    """Open loopback and private addresses (a local server; never for a crawl of others' URLs)."""


class RobotsConfig(Config):
    """What a site says in its X-Robots-Tag header is respected."""

    user_agent_token: str = "latentmill"
    """Our name, in the user agent and in directives meant for one robot."""
    disallowed_directives: tuple[str, ...] = ("noai", "noimageai", "noindex", "noimageindex")
    """A response that carries one of these is not stored."""


class DownloadConfig(Config):
    """Selected rows → webdataset tars, by img2dataset."""

    input: Path
    """A parquet file, or a folder of them: what `precompute.select` wrote, or any with a URL and a TEXT column."""
    output: Path
    """Folder of the tars: 00000.tar, 00000.parquet, 00000_stats.json, and so on, with download_report.json."""
    rows_per_shard: PositiveInt = 10_000
    """Rows of one tar. Fixed for the life of `output`, since it decides which row gets which key."""
    extra_columns: list[str] | None = None
    """Columns carried into each sample's JSON beside url and caption; unset: every other column."""
    processes: PositiveInt = 2
    """Shards downloaded at the same time."""
    threads: PositiveInt = 64
    """Connections per process."""
    shard_attempts: PositiveInt = 2
    """Tries of a shard within one run."""
    min_success_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    """A shard with a smaller share of successes failed (the network was out), and is not published."""
    recheck: bool = False
    """Read and hash the tars of earlier runs again, instead of comparing their sizes."""
    images: ImagesConfig = ImagesConfig()
    requests: RequestsConfig = RequestsConfig()
    robots: RobotsConfig = RobotsConfig()
