"""Where the page is served, and how often one may ask."""

from pydantic import Field

from shards.base.config import Config


class ServeConfig(Config):
    """Where raters reach the page."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is every one of this machine."""
    port: int = Field(8770, ge=0, le=65535)
    """Port to listen at."""
    origin: str | None = Field(None, pattern=r"^https?://[^/]+$")
    """How raters' browsers call it, as https://study.example.org; null: by whatever host they ask for."""
    proxies: int = Field(0, ge=0)
    """How many reverse proxies stand in front; each adds the address that it was asked from to X-Forwarded-For."""
    rater_rate: float = Field(5.0, gt=0)
    """Requests per second of one rater; sixty at once."""
    address_rate: float = Field(200.0, gt=0)
    """Requests per second of one address, behind which there may be a whole office; a thousand at once."""
    entry_rate: float = Field(0.5, gt=0)
    """Tokens per second that one address may try; sixty at once."""
