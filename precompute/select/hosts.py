"""Classify the hosts of URLs from their text alone, without DNS lookups."""

import re
from collections.abc import Callable
from ipaddress import ip_address

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shards.base.opt_outs import PLAIN_HOST
from shards.base.urls import comparable_host, host_of

# Suffixes reserved for private use (RFC 6761, 6762, 8375, and ICANN's .internal).
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")
PRIVATE_NAME = rf"(?i)^https?://[^/?#]*(?:{'|'.join(map(re.escape, PRIVATE_SUFFIXES))})\.?(?::\d*)?(?:[/?#]|$)"


def is_public_address(literal: str) -> bool:
    """Return whether an IPv4 or IPv6 address is globally routable, looking inside IPv4-mapped and 6to4 addresses.
    Raises ValueError if `literal` is not an address."""
    address = ip_address(literal)
    if address.version == 6:
        address = address.ipv4_mapped or address.sixtofour or address
    return address.is_global and not address.is_multicast


def is_private_host(host: str) -> bool:
    """Return whether `host` is a non-public address literal or a name reserved for private networks.

    Addresses are parsed as the C library parses them: `127.1`, `0x7f000001`, `2130706433` and `①②⑦.0.0.1` are loopback.
    """
    host = comparable_host(host)
    try:
        return not is_public_address(host)
    except ValueError:  # a name, or with colons an invalid address
        return ":" in host or "." not in host or host.endswith(PRIVATE_SUFFIXES)


def are_http(urls: pa.Array) -> np.ndarray:
    """Return a mask of the `urls` (no nulls, valid UTF-8) that are http or https and have a host."""
    return _mask_by_host(urls, lambda host: host is not None)


def are_private(urls: pa.Array) -> np.ndarray:
    """Return a mask of the `urls` (no nulls, valid UTF-8) that are http or https and have a private host."""
    public = _mask_by_host(urls, lambda host: host is None or not is_private_host(host))
    return ~public | np.asarray(pc.match_substring_regex(urls, PRIVATE_NAME))


def _mask_by_host(urls: pa.Array, accepts: Callable[[str | None], bool]) -> np.ndarray:
    """Return a mask of the `urls` that match `PLAIN_HOST` (the fast path) or whose host passes `accepts`."""
    mask = np.array(pc.match_substring_regex(urls, PLAIN_HOST))
    for index in np.flatnonzero(~mask):
        mask[index] = accepts(host_of(urls[int(index)].as_py()))
    return mask
