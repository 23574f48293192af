"""Config for `python -m evaluation.study`."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, HttpUrl, ValidationError

from evaluation.study.protocol import ProtocolConfig
from evaluation.study.statistics.power import PowerConfig
from shards.base.config import Config
from shards.base.store import LocalPath, Place


def normalize_origin(origin: str) -> str:
    """Write an origin as browsers send it: in lower case, in Punycode, and without the scheme's default port.

    Raises:
        ValueError: the host or the port is invalid.
    """
    try:
        return str(HttpUrl(origin)).removesuffix("/")
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None


Origin = Annotated[str, Field(pattern=r"^https?://[^/?#@]+$"), AfterValidator(normalize_origin)]


class ServeConfig(Config):
    """Address and rate limits of the raters' page."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all of the machine's addresses."""
    port: int = Field(8770, ge=0, le=65535)
    """Port to listen on."""
    origin: Origin | None = None
    """Public origin of the page, such as https://study.example.org. null: the origin is taken from each request."""
    proxies: int = Field(0, ge=0)
    """Number of reverse proxies in front of the server, each of which appends to X-Forwarded-For."""
    rater_rate: float = Field(5.0, gt=0)
    """Maximum number of requests per second from one rater, with bursts of up to 60."""
    address_rate: float = Field(200.0, gt=0)
    """Maximum number of requests per second from one IP address, which a whole office may share, with bursts of up to
    1,000."""
    entry_rate: float = Field(0.5, gt=0)
    """Maximum number of invitation tokens per second that one IP address may try, with bursts of up to 60."""


class StudyConfig(Config):
    """A blind study of two or more models, given by their sample sets."""

    output: LocalPath = Path("runs/study")
    """Folder, on a local disk, for the study's images, protocol, votes and results."""
    sets: list[Place] = Field([])
    """Sample sets drawn by `evaluation sample` with the same prompts, seed and size. They become models A, B and so
    on."""
    protocol: ProtocolConfig = ProtocolConfig()
    serve: ServeConfig = ServeConfig()
    power: PowerConfig = PowerConfig()
    partial: bool = False
    """Let `analyse` accept an incomplete study and mark the result as partial."""
