"""Config for the raters' server: its address and rate limits."""

from pydantic import Field

from shards.base.config import Config


class ServeConfig(Config):
    """Address and rate limits of the raters' page."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all of the machine's addresses."""
    port: int = Field(8770, ge=0, le=65535)
    """Port to listen on."""
    origin: str | None = Field(None, pattern=r"^https?://[^/]+$")
    """Public origin of the page, such as https://study.example.org; null: the host named in each request."""
    proxies: int = Field(0, ge=0)
    """Number of reverse proxies in front of the server, each of which appends to X-Forwarded-For."""
    rater_rate: float = Field(5.0, gt=0)
    """Requests per second from one rater, in bursts of up to 60."""
    address_rate: float = Field(200.0, gt=0)
    """Requests per second from one IP address, which a whole office may share, in bursts of up to 1,000."""
    entry_rate: float = Field(0.5, gt=0)
    """Invitation tokens per second that one IP address may try, in bursts of up to 60."""
