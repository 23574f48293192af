"""Config for `python -m precompute.download`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shards.base.config import Config
from shards.base.store import LocalPath


class ImagesConfig(Config):
    """Storage of downloaded images."""

    mode: Literal["original", "keep_ratio_largest"] = "original"
    """`original` stores images byte for byte as served. `keep_ratio_largest` re-encodes them as JPEGs in sRGB,
    with the longer side scaled down to `max_side`. A rotated image stays rotated, with its EXIF orientation."""
    max_side: PositiveInt = 1024
    """Maximum length of the longer side in pixels, for `keep_ratio_largest`."""
    jpeg_quality: Annotated[int, Field(ge=1, le=100)] = 95
    """JPEG quality, for `keep_ratio_largest`."""


class RequestsConfig(Config):
    """Limits on each request, and on the hosts that may be contacted."""

    timeout_seconds: PositiveFloat = 10.0
    """Timeout for connecting to a server, and for each read from it."""
    deadline_seconds: PositiveFloat = 30.0
    """Maximum time for a complete response, in case a server sends it slowly in small pieces."""
    max_bytes: PositiveInt = 64 * 2**20
    """Maximum response size; larger responses are aborted immediately."""
    max_redirects: NonNegativeInt = 5
    """Maximum number of redirects per image."""
    retries: NonNegativeInt = 1
    """Number of retries for an image whose download failed."""
    allow_private_hosts: bool = False
    """Allow loopback and private addresses. Use this only with a local server, never to crawl third-party URLs."""


class RobotsConfig(Config):
    """Handling of X-Robots-Tag response headers."""

    user_agent_token: str = "latentmill"
    """Name of this crawler, in the user agent and in directives addressed to a specific robot."""
    disallowed_directives: tuple[str, ...] = ("noai", "noimageai", "noindex", "noimageindex")
    """Responses with any of these directives are not stored. `none` counts as `noindex`."""


class DownloadConfig(Config):
    """Selected rows → webdataset tars, downloaded with img2dataset."""

    input: LocalPath
    """Parquet file, or folder of parquet files, with URL and TEXT columns, such as the output of
    `precompute.select`."""
    output: LocalPath
    """Folder for the tars: 00000.tar, 00000.parquet, 00000_stats.json and so on, and download_report.json."""
    rows_per_shard: PositiveInt = 10_000
    """Rows per tar. It cannot change once the download has started, because it determines each row's key."""
    extra_columns: list[str] | None = None
    """Columns stored in each sample's JSON besides url and caption; default: all other columns."""
    processes: PositiveInt = 2
    """Number of tars that are downloaded in parallel, each in its own process."""
    threads: PositiveInt = 64
    """Number of connections per process."""
    shard_attempts: PositiveInt = 2
    """Maximum number of attempts per tar within one run."""
    min_success_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Minimum share of successful rows. A tar below this share is not published, because the network was probably
    down."""
    verify: bool = True
    """Reject an image whose bytes do not match its row's `md5` or `sha256`, if these columns are stored."""
    recheck: bool = False
    """Reread and hash the tars from earlier runs, instead of only comparing their sizes."""
    images: ImagesConfig = ImagesConfig()
    requests: RequestsConfig = RequestsConfig()
    robots: RobotsConfig = RobotsConfig()
