"""Opt-outs: entries that name a site or an image's URL, and the URLs that they cover.

Ambiguous entries get the broader reading: dropping a URL needlessly costs one sample, but keeping an opted-out URL
breaks a promise to its owner.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import ip_address

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shards.base.urls import AUTHORITY, comparable_host, comparable_url, hosts_of

# Fast path, which matches nearly every URL: a dotted ASCII host name without user info or escapes. Its last label
# begins with a letter, so it cannot be an obfuscated address. All other URLs are parsed one by one.
PLAIN_HOST = r"(?i)^https?://(?:[a-z0-9_-]+\.)+[a-z][a-z0-9-]*\.?(?::\d*)?(?:[/?#]|$)"
_HOST_AND_PORT = re.compile(r"(?P<host>\[[^\]]*\]|[^:]*)(?::(?P<port>\d*))?")


@dataclass
class OptOuts:
    """A batch of opt-out entries in canonical form."""

    hosts: set[str] = field(default_factory=set)
    """Opted-out hosts; each includes its subdomains."""
    urls: list[str] = field(default_factory=list)


def parse_entry(entry: str, found: OptOuts) -> None:
    """Add one entry to `found`: a host (with its subdomains), or a URL with or without a scheme.

    Raises:
        ValueError: The entry is neither a host nor a URL. The message completes a sentence that starts with the entry.
    """
    if blank := re.search(r"[\s\x00-\x1f\x7f]", entry):
        raise ValueError(f"contains {blank[0]!r}; write one entry per line, and spaces in URLs as %20")
    try:
        address = ip_address(entry.strip("[]"))  # checked first, because the colons of IPv6 look like a port
    except ValueError:
        pass
    else:
        found.hosts.add(comparable_host(str(address)))
        return
    with_scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):[/\\]{2}", entry)
    if with_scheme and with_scheme[1].lower() not in ("http", "https"):
        raise ValueError(f"has the scheme {with_scheme[1]}, but only http and https URLs are downloaded")
    parts = AUTHORITY.fullmatch(entry)
    assert parts is not None, "the pattern matches any text"
    authority, rest = parts["authority"], parts["rest"]
    _, at, host_and_port = authority.rpartition("@")
    if at and not with_scheme:
        raise ValueError("looks like an e-mail address; write a host or URL instead")
    named = _HOST_AND_PORT.fullmatch(host_and_port)
    if named is None or (named["port"] and int(named["port"]) > 65535):
        raise ValueError(f"has an invalid port in {host_and_port!r}")
    host = _listed_host(named["host"])
    if rest.partition("#")[0] in ("", "/", "/*"):  # the root path is not an image, so the entry means the whole site
        found.hosts.add(host)
    elif "*" in named["host"]:
        raise ValueError("has both a * in its host and a path; write the host alone, or complete URLs")
    elif "*" in rest.partition("?")[0].rpartition("/")[2] and rest.endswith("*"):
        raise ValueError("ends with a *, but path prefixes are not supported; write the host, or complete URLs")
    elif not with_scheme and re.fullmatch(r"/\d{1,3}", rest) and _is_address(host):
        raise ValueError("is an address range, which is not supported; list each address or host name instead")
    else:
        found.urls.append(comparable_url(f"http://{host_and_port}{rest}"))


def _listed_host(text: str) -> str:
    """Canonicalise the host of an entry. A leading `*.` or `.` is optional, except for single-label names.

    Raises:
        ValueError: `text` is not a valid host.
    """
    name = re.sub(r"^(?:\*?\.)", "", text)
    host = comparable_host(name)
    if _is_address(host):
        if "." in name and not re.fullmatch(r"(?:\d+\.){3}\d+", name):
            raise ValueError(f"{text!r} is an incomplete address; write all four numbers")
        return host
    labels = host.split(".")
    if "*" in host:
        raise ValueError("has a * inside its host; * is supported only at the start, as in *.example.com")
    if not host or not all(re.fullmatch(r"[a-z0-9_-]{1,63}", label) for label in labels) or len(host) > 253:
        raise ValueError(f"{text!r} is not a valid host")
    if labels[-1].isdigit():
        raise ValueError(f"{text!r} is neither a host name nor an IP address")
    if len(labels) == 1 and name == text:
        raise ValueError(f"{text!r} is a single label; to opt out this domain and its subdomains, write *.{text}")
    return host


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def matching_hosts(urls: pa.Array, hosts: Collection[str]) -> pa.Array:
    """Return, for each URL in `urls` (no nulls, valid UTF-8), the entry in `hosts` that is the URL's host or a parent
    domain of it, or null if there is no such entry.

    Args:
        hosts: hosts in the canonical form that `comparable_host` returns.
    """
    hosts = frozenset(hosts)
    plain = np.asarray(pc.match_substring_regex(urls, PLAIN_HOST)) & ~np.asarray(
        pc.match_substring(urls, "xn--", ignore_case=True)
    )
    names = pc.struct_field(pc.extract_regex(urls.filter(pa.array(plain)), r"^[A-Za-z]+://(?P<host>[^/?#:]*)"), "host")
    encoded = pc.dictionary_encode(names)  # a few hosts serve most images, so match each distinct name once
    listed = [_at_or_above(name.lower().rstrip("."), hosts) for name in encoded.dictionary.to_pylist()]
    found = np.full(len(urls), None, object)
    found[plain] = np.array(listed, object)[np.asarray(encoded.indices)] if listed else None
    for index in np.flatnonzero(~plain):
        candidates = (_at_or_above(comparable_host(host), hosts) for host in hosts_of(urls[int(index)].as_py()))
        found[index] = next(filter(None, candidates), None)
    return pa.array(found, pa.string())


def _at_or_above(host: str, hosts: frozenset[str]) -> str | None:
    """Return `host` if it is in `hosts`, or else its closest parent domain in `hosts`, or None."""
    while host and host not in hosts:
        host = host.partition(".")[2]
    return host or None
