"""A restricted urllib opener for img2dataset's requests: public hosts only, with size and time limits, and no images
that their server disallows.

img2dataset calls `urllib.request.urlopen`, which also opens `file://` URLs and private addresses, follows redirects to
them, and reads responses of any length. In the calling process, `install` replaces the opener that this function uses.
"""

import hashlib
import io
import re
import ssl
import string
import time
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any

from precompute.download.config import RequestsConfig, RobotsConfig
from precompute.select.hosts import is_private_host, is_public_address

HEADER_BYTES = 2**16
"""Number of bytes allowed for a response's headers, in addition to `max_bytes` for its body."""
ADDRESSED = re.compile(r"(?!max-|unavailable_after)([a-z*][^\s:]*)\s*:(.*)", re.DOTALL)
"""A robot's name and the first of the directives addressed to it. `max-image-preview` and `unavailable_after` are
directives with a value, and the colons in a date follow a digit or a space."""


def too_large(config: RequestsConfig) -> "RefusedResponse":
    """Build the error for a response that exceeds `config.max_bytes`."""
    return RefusedResponse(f"too large: more than the {config.max_bytes} bytes allowed")


class RefusedResponse(OSError):
    """Raised when a request is not sent, or a response is not read further, because it violates the limits or its
    server disallows its use."""


Hashes = Mapping[str, Collection[tuple[str, str]]]
"""URL → (algorithm, digest in hexadecimal) of its image: `md5` or `sha256`. If there are several, one has to match."""


def install(config: RequestsConfig, robots: RobotsConfig, hashes: Hashes | None = None) -> None:
    """Apply these limits to all later calls to `urllib.request.urlopen` in this process.

    Args:
        hashes: hashes that the images must have. An image with other bytes fails like one that cannot be downloaded.
    """
    urllib.request.install_opener(build_opener(config, robots, hashes))


class _Opener(urllib.request.OpenerDirector):
    """Opener that refuses disallowed images, and knows the hashes of images. Responses check them when they are
    read."""

    def __init__(self, robots: RobotsConfig, hashes: Hashes):
        super().__init__()
        self.robots, self.hashes = robots, hashes

    def open(self, fullurl: Any, *args: Any, **kwargs: Any) -> Any:
        request = urllib.request.Request(fullurl) if isinstance(fullurl, str) else fullurl
        url = request.full_url
        request.full_url = to_ascii(url)
        response = super().open(request, *args, **kwargs)
        if is_disallowed(response.headers.get_all("X-Robots-Tag", []), self.robots):
            response.close()
            raise RefusedResponse("Use of image disallowed by X-Robots-Tag directive")
        if isinstance(response, _LimitedResponse):
            # a redirect's call is nested in that of the row's own address, whose hashes are therefore set last
            response.hashes = self.hashes.get(url, ())
        return response


def is_disallowed(headers: Iterable[str], config: RobotsConfig) -> bool:
    """Return whether the X-Robots-Tag headers of a response contain a disallowed directive for all robots or for this
    one. `none` means `noindex, nofollow`.

    img2dataset's own check takes everything before the first colon of a header to be the name of a robot, so it misses
    the opt-out in `noai, max-image-preview:large`.

    Args:
        headers: the value of each header, such as `noai, max-image-preview:large` or `latentmill: noindex`.
    """
    disallowed = {directive.strip().lower() for directive in config.disallowed_directives}
    if "noindex" in disallowed:
        disallowed.add("none")
    robots = {"*", config.user_agent_token.strip().lower()}
    return any(
        robot in robots and directive in disallowed for header in headers for robot, directive in _directives(header)
    )


def _directives(header: str) -> Iterator[tuple[str, str]]:
    """Yield (robot, directive) for each directive in a header. The robot is `*` if the header names none."""
    robot = "*"
    for item in header.lower().split(","):
        directive = item.strip()
        if match := ADDRESSED.fullmatch(directive):
            robot, directive = match[1], match[2].strip()
        yield robot, directive


def to_ascii(url: str) -> str:
    """Encode a URL's host with IDNA, and percent-encode non-ASCII characters and spaces elsewhere, as browsers do.
    Escapes that are already in the URL stay as they are."""
    netloc = urllib.parse.urlsplit(url).netloc
    user, at, address = netloc.rpartition("@")
    host, colon, port = address.partition(":")
    if not host.isascii():
        url = url.replace(netloc, f"{user}{at}{host.encode('idna').decode()}{colon}{port}", 1)
    return urllib.parse.quote(url, safe=string.punctuation)


def build_opener(
    config: RequestsConfig, robots: RobotsConfig, hashes: Hashes | None = None
) -> urllib.request.OpenerDirector:
    """Build an opener that supports only http and https: no file, ftp or data URLs. See `install`."""
    redirects = type("Redirects", (urllib.request.HTTPRedirectHandler,), {"max_redirections": config.max_redirects})
    opener = _Opener(robots, hashes or {})
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        *([redirects()] if config.max_redirects else []),  # urllib follows the first one whatever the maximum is
        urllib.request.HTTPErrorProcessor(),
        _LimitedHandler(config),
    ):
        opener.add_handler(handler)
    return opener


class _LimitedHandler(urllib.request.AbstractHTTPHandler):
    """Handler that opens http and https URLs over connections that enforce the limits."""

    def __init__(self, config: RequestsConfig) -> None:
        super().__init__()
        self.tls = ssl.create_default_context()  # shared by all connections: creating it loads the CA certificates
        self.make_response = partial(_LimitedResponse, config=config)
        # such as http://proxy:3128 or proxy:3128; `no` holds no_proxy, which lists hosts that need no proxy
        addresses = (address for kind, address in urllib.request.getproxies().items() if kind != "no")
        proxies = {urllib.parse.urlsplit(a if "://" in a else f"//{a}").hostname for a in addresses}
        self.trusted_hosts = None if config.allow_private_hosts else proxies

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        host = urllib.parse.urlsplit(request.full_url).hostname
        if host and self.trusted_hosts is not None and is_private_host(host):
            raise RefusedResponse(f"private address: host {host}")
        return self.do_request_(request)

    https_request = http_request

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(self._limit, _PublicHTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(self._limit, _PublicHTTPSConnection, context=self.tls), request)

    def _limit(self, connection_class: type["_PublicHTTPConnection"], host: str, **kwargs: Any) -> HTTPConnection:
        connection = connection_class(host, **kwargs)
        connection.trusted_hosts = self.trusted_hosts
        connection.response_class = self.make_response  # type: ignore[assignment]  # http.client only calls it
        return connection


class _PublicHTTPConnection(HTTPConnection):
    """Connection that sends nothing to addresses outside the public Internet.

    It checks the address of the connected socket rather than the host name, so neither unusual spellings nor DNS
    rebinding can get around the check.
    """

    trusted_hosts: set[str | None] | None = None
    """Hosts that may have private addresses (the configured proxies); None allows all hosts."""

    def connect(self) -> None:
        super().connect()
        if self.trusted_hosts is not None and self.host.lower() not in self.trusted_hosts:
            peer = self.sock.getpeername()[0].partition("%")[0]
            if not is_public_address(peer):
                self.close()
                raise RefusedResponse(f"private address: {peer} behind host {self.host}")


class _PublicHTTPSConnection(_PublicHTTPConnection, HTTPSConnection):
    """TLS connection with the address check of `_PublicHTTPConnection`, which runs after the TLS handshake."""


class _LimitedResponse(HTTPResponse):
    """Response whose headers and body are limited in total size and time."""

    hashes: Collection[tuple[str, str]] = ()

    def __init__(self, sock: Any, *args: Any, config: RequestsConfig, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.config = config
        self.fp = io.BufferedReader(_LimitedReader(sock, self.fp.detach(), config))

    def begin(self) -> None:
        super().begin()
        if self.length is not None and self.length > self.config.max_bytes:
            raise RefusedResponse(f"too large: {self.length} bytes declared, {self.config.max_bytes} allowed")

    def read(self, amt: int | None = None) -> bytes:
        data = super().read(amt)
        if len(data) > self.config.max_bytes:  # the socket's limit includes the headers
            raise too_large(self.config)
        is_checked = amt is None and self.hashes
        if is_checked and not any(hashlib.new(name, data).hexdigest() == digest for name, digest in self.hashes):
            raise RefusedResponse("hash mismatch")  # the same text for all images, because failures are counted
        return data


class _LimitedReader(io.RawIOBase):
    """Raw socket reader that fails after the deadline or the maximum number of bytes."""

    def __init__(self, sock: Any, raw: io.RawIOBase, config: RequestsConfig) -> None:
        self.sock, self.raw, self.config = sock, raw, config
        self.end = time.monotonic() + config.deadline_seconds
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            self.sock.settimeout(max(min(self.end - time.monotonic(), self.config.timeout_seconds), 1e-3))
            count = self.raw.readinto(buffer)
        except TimeoutError:
            self._check_deadline()
            raise
        self._check_deadline()
        self.num_bytes += count or 0
        if self.num_bytes > self.config.max_bytes + HEADER_BYTES:
            raise too_large(self.config)
        return count

    def _check_deadline(self) -> None:
        if time.monotonic() >= self.end:
            raise TimeoutError(f"deadline: response not complete after {self.config.deadline_seconds:g} seconds")

    def close(self) -> None:
        if not self.closed:
            self.raw.close()
        super().close()
