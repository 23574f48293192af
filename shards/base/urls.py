"""Canonical forms of hosts and URLs, for comparing URLs that are spelled differently."""

import re
import socket
import unicodedata
import urllib.parse
from ipaddress import ip_address

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Pattern for an upper-case percent escape that `comparable_url` leaves unchanged.
_ESCAPE = "%(?:[089A-F][0-9A-F]|1[0-9A-F]|2[02356BF]|3[BCDEF]|5[CE]|60|7[BCDF])"
_PLAIN = r"[A-Za-z0-9!$&'()*+,./:;=?@\[\]_~-]"
# Pattern for URLs whose canonical form is the URL without its scheme. Nearly all URLs match it and skip the parser.
COMPARABLE = rf"^https?://(?:[a-z0-9_-]+\.)+[a-z][a-z0-9-]*/(?:{_PLAIN}|{_ESCAPE})*$"
_STAY_ESCAPED = set(b' "#%&+/;<=>?\\^`{|}') | set(range(0x21)) | set(range(0x7F, 0x100))
_TO_ESCAPE = set(b' "<>\\^`{|}') | set(range(0x21)) | set(range(0x7F, 0x100))
_ANY_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})|([^A-Za-z0-9])", re.DOTALL)
AUTHORITY = re.compile(r"(?:https?:(?=//))?(?://)?(?P<authority>[^/?#\\]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)


def host_of(url: str) -> str | None:
    """Return the host of an http or https URL, or None for other schemes and unparsable URLs."""
    try:
        parts = urllib.parse.urlsplit(url)
        return (parts.hostname or None) if parts.scheme in ("http", "https") else None
    except ValueError:
        return None


def hosts_of(url: str) -> list[str]:
    """Return every host that a client might contact for an http or https URL, or an empty list for any other URL.

    Usually there is one host. There may be two if the URL contains backslashes, which browsers treat as slashes and
    other clients do not.
    """
    return [host for host in dict.fromkeys(map(host_of, (url, url.replace("\\", "/")))) if host]


# Characters ignored in host names: the part of Unicode's Default_Ignorable_Code_Point that UTS 46 drops.
_IGNORED = re.compile("[\u00ad\u034f\u180b-\u180f\u200b-\u200d\u2060\u2064\ufe00-\ufe0f\ufeff]")
_DOTS = re.compile("[\u3002\uff0e\uff61]")


def comparable_host(host: str) -> str:
    """Return the canonical form of a host, for comparison only: the result may not resolve.

    Case, a trailing dot, percent-encoding, Unicode versus Punycode, and unusual IP address notations make no
    difference. Both versions of IDNA give the same result: `straße.de` equals `strasse.de` (which the downloader
    resolves) and `xn--strae-oqa.de` (which browsers resolve).
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
    """Apply Unicode's NFKC_Casefold, the normalisation that IDNA builds on."""
    text = _IGNORED.sub("", text)
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def comparable_url(url: str) -> str:
    """Return the canonical form of an http or https URL, which is the same for all spellings of the URL.

    Any other text is returned unchanged, including a URL already in canonical form.

    Scheme, user info, port and fragment are dropped, the host is canonicalised by `comparable_host`, dot segments are
    removed, and only characters that would otherwise change the meaning stay percent-encoded.
    """
    hosts = hosts_of(url)
    if not hosts:
        return url
    parts = AUTHORITY.fullmatch(url.strip().translate(_REMOVED))
    assert parts is not None, "the pattern matches any text"
    rest = parts["rest"]
    path, question_mark, query = rest.partition("#")[0].partition("?")
    path = _normalise_escapes(path.replace("\\", "/"))
    if "/." in path:
        path = _remove_dot_segments(path)
    return f"{comparable_host(hosts[0])}{path or '/'}{question_mark}{_normalise_escapes(query)}"


_REMOVED = {ord(character): None for character in "\t\r\n"}  # browsers and urllib remove these too


def _normalise_escapes(text: str) -> str:
    def spell(match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            byte = match[2][0]
            return b"%%%02X" % byte if byte in _TO_ESCAPE else match[2]
        byte = int(match[1], 16)
        return b"%%%02X" % byte if byte in _STAY_ESCAPED else bytes([byte])

    return _ANY_ESCAPE.sub(spell, text.encode("utf-8", "surrogatepass")).decode("ascii")


def _remove_dot_segments(path: str) -> str:
    """Remove `.` and `..` segments (RFC 3986, section 5.2.4)."""
    kept: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            kept = kept[:-1]
        elif segment != ".":
            kept.append(segment)
    ends_in_folder = segments[-1] in (".", "..")
    return f"/{'/'.join(kept)}{'/' if ends_in_folder and kept else ''}"


def comparable_urls(urls: pa.Array) -> pa.Array:
    """Apply `comparable_url` to an array of URLs (no nulls, valid UTF-8)."""
    unchanged = np.asarray(pc.match_substring_regex(urls, COMPARABLE)) & ~np.asarray(pc.match_substring(urls, "/."))
    unchanged &= ~np.asarray(pc.match_substring(urls, "xn--"))
    stripped = pc.replace_substring_regex(urls, "^https?://", "")
    if unchanged.all():
        return stripped
    others = urls.filter(pa.array(~unchanged)).to_pylist()
    return pc.replace_with_mask(stripped, pa.array(~unchanged), pa.array(map(comparable_url, others), urls.type))
