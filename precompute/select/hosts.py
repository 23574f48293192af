"""Which URLs name a host on the public Internet, by their text alone: no name is resolved here."""

import re
import socket
import unicodedata
import urllib.parse
from collections.abc import Callable, Collection
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


def hosts_of(url: str) -> list[str]:
    """The hosts that clients may take an http or https URL to name: mostly one, none of another kind of URL.

    They disagree about backslashes, which browsers read as slashes.
    """
    first = host_of(url)
    second = host_of(url.replace("\\", "/")) if "\\" in url else None
    return list(dict.fromkeys(host for host in (first, second) if host))


# Characters that names ignore (Unicode's Default_Ignorable_Code_Point, as far as UTS 46 drops them).
_IGNORED = re.compile("[\u00ad\u034f\u180b-\u180f\u200b-\u200d\u2060\u2064\ufe00-\ufe0f\ufeff]")
_DOTS = re.compile("[\u3002\uff0e\uff61]")


def comparable_host(host: str) -> str:
    """Spell a host so that two spellings of one are equal: for comparison, not to be resolved.

    Case, the trailing dot, percent-encoding, international names in Unicode or Punycode and unusual spellings of
    addresses do not matter. Both versions of IDNA give one result: `straße.de` is `strasse.de`, as the downloader
    resolves it, and `xn--strae-oqa.de`, as browsers do.
    """
    host = urllib.parse.unquote(host).strip("[]").partition("%")[0]
    host = _fold(_DOTS.sub(".", host)).strip(".")
    try:
        address = ip_address(host if ":" in host else socket.inet_ntoa(socket.inet_aton(host)))
    except (OSError, ValueError):
        return ".".join(map(_comparable_label, host.split(".")))
    mapped = address.ipv4_mapped if address.version == 6 else None
    return str(mapped or address)


def _comparable_label(label: str) -> str:
    if label.startswith("xn--"):
        try:
            label = _fold(label[4:].encode().decode("punycode"))
        except UnicodeError:
            return label
    return label if label.isascii() else f"xn--{label.encode('punycode').decode()}"


def _fold(text: str) -> str:
    """Unicode's NFKC_Casefold, on which names of hosts are based."""
    text = _IGNORED.sub("", text)
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def is_listed(urls: pa.Array, hosts: Collection[str]) -> np.ndarray:
    """Mask over `urls` (no nulls, whole UTF-8): the host is one of `hosts`, or below one of them.

    Args:
        hosts: as `comparable_host` spells them.
    """
    hosts = frozenset(hosts)
    mask = np.zeros(len(urls), bool)
    plain = np.asarray(pc.match_substring_regex(urls, PLAIN_HOST)) & ~np.asarray(
        pc.match_substring(urls, "xn--", ignore_case=True)
    )
    names = pc.struct_field(pc.extract_regex(urls.filter(pa.array(plain)), r"^[A-Za-z]+://(?P<host>[^/?#:]*)"), "host")
    encoded = pc.dictionary_encode(names)  # few hosts serve most pictures
    listed = [_is_at_or_below(name.lower().rstrip("."), hosts) for name in encoded.dictionary.to_pylist()]
    mask[plain] = np.array(listed, bool)[np.asarray(encoded.indices)] if listed else False
    for index in np.flatnonzero(~plain):
        named = hosts_of(urls[int(index)].as_py())
        mask[index] = any(_is_at_or_below(comparable_host(host), hosts) for host in named)
    return mask


def _is_at_or_below(host: str, hosts: frozenset[str]) -> bool:
    while host not in hosts:
        _, dot, host = host.partition(".")
        if not dot:
            return False
    return True
