"""Which URLs name a host on the public Internet, by their text alone: no name is resolved here."""

import re
import socket
import unicodedata
import urllib.parse
from collections.abc import Callable
from ipaddress import ip_address

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# A dotted ASCII name whose last label begins with a letter, so no number in disguise, and neither user nor escapes
# before it: nearly every URL. All others are parsed one by one.
PLAIN_HOST = r"(?i)^https?://(?:[a-z0-9_-]+\.)+[a-z][a-z0-9-]*\.?(?::\d*)?(?:[/?#]|$)"
# Names that no public server may have (RFC 6761, 6762, 8375, and ICANN's .internal).
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")
PRIVATE_NAME = rf"(?i)^https?://[^/?#]*(?:{'|'.join(map(re.escape, PRIVATE_SUFFIXES))})\.?(?::\d*)?(?:[/?#]|$)"


def is_public_address(literal: str) -> bool:
    """Whether an IPv4 or IPv6 address is one of the public Internet, also when it is IPv4 wrapped in IPv6.

    Raises:
        ValueError: not an address.
    """
    address = ip_address(literal)
    if address.version == 6:
        address = address.ipv4_mapped or address.sixtofour or address
    return address.is_global and not address.is_multicast


def is_private_host(host: str) -> bool:
    """Whether `host` is a literal outside the public Internet, or a name that none there has.

    Addresses are read as the C library reads them: `127.1`, `0x7f000001`, `2130706433` and `①②⑦.0.0.1` are loopback.
    """
    host = unicodedata.normalize("NFKC", urllib.parse.unquote(host)).lower().rstrip(".").strip("[]").partition("%")[0]
    if ":" in host:
        return not _is_public(host)
    try:
        return not _is_public(socket.inet_ntoa(socket.inet_aton(host)))
    except OSError:
        pass  # a name, then
    return "." not in host or host.endswith(PRIVATE_SUFFIXES)


def _is_public(literal: str) -> bool:
    try:
        return is_public_address(literal)
    except ValueError:
        return False


def host_of(url: str) -> str | None:
    """The host of an http or https URL; None where it is another kind of URL, or none at all."""
    try:
        parts = urllib.parse.urlsplit(url)
        return (parts.hostname or None) if parts.scheme in ("http", "https") else None
    except ValueError:
        return None


def are_http(urls: pa.Array) -> np.ndarray:
    """Mask over `urls` (no nulls, whole UTF-8): http or https, and with a host."""
    return _judge(urls, PLAIN_HOST, lambda host: host is not None)


def are_private(urls: pa.Array) -> np.ndarray:
    """Mask over `urls` (no nulls, whole UTF-8): http or https, and the host is private."""
    public = _judge(urls, PLAIN_HOST, lambda host: host is None or not is_private_host(host))
    return ~public | np.asarray(pc.match_substring_regex(urls, PRIVATE_NAME))


def _judge(urls: pa.Array, pattern: str, judge: Callable[[str | None], bool]) -> np.ndarray:
    """True where `pattern` matches, which is fast; elsewhere what `judge` says of the host."""
    mask = np.array(pc.match_substring_regex(urls, pattern))
    for index in np.flatnonzero(~mask):
        mask[index] = judge(host_of(urls[int(index)].as_py()))
    return mask


def is_listed(urls: pa.Array, hosts: pa.Array) -> np.ndarray:
    """Whether the host of each URL is one of `hosts` (lower case) or below one of them."""
    names = pc.struct_field(pc.extract_regex(urls, r"^[A-Za-z]+://(?:[^/?#@]*@)?(?P<host>[^/?#:]*)"), "host")
    names = pc.utf8_lower(pc.fill_null(names, ""))
    listed = np.asarray(pc.is_in(names, hosts))
    while pc.any(pc.match_substring(names, ".")).as_py():
        names = pc.replace_substring_regex(names, r"^[^.]*\.?", "")
        listed = listed | np.asarray(pc.is_in(names, hosts))
    return listed
