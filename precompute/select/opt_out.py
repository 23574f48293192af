"""The opt-out list: what its entries mean, and one spelling by which URLs of the list and of rows are compared.

Wherever an entry could mean more or less, it means more: a URL that is dropped needlessly costs one sample, one that is
kept breaks a promise to its owner.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.select.hosts import comparable_host, hosts_of
from precompute.select.metadata import BATCH_ROWS, find_columns
from shards.base.errors import RequestError

MOST_SHOWN = 5
# An escape in upper case of a byte that `comparable_url` leaves escaped, or of one that it never escapes itself.
_ESCAPE = "%(?:[089A-F][0-9A-F]|1[0-9A-F]|2[02356BF]|3[BCDEF]|5[CE]|60|7[BCDF])"
_PLAIN = r"[A-Za-z0-9!$&'()*+,./:;=?@\[\]_~-]"
# URLs that `comparable_url` only strips of their scheme, which a regular expression can do: nearly all.
COMPARABLE = rf"^https?://(?:[a-z0-9_-]+\.)+[a-z][a-z0-9-]*/(?:{_PLAIN}|{_ESCAPE})*$"
_STAY_ESCAPED = set(b' "#%&+/;<=>?\\^`{|}') | set(range(0x21)) | set(range(0x7F, 0x100))
_TO_ESCAPE = set(b' "<>\\^`{|}') | set(range(0x21)) | set(range(0x7F, 0x100))
_ANY_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})|([^A-Za-z0-9])", re.DOTALL)
_AUTHORITY = re.compile(r"(?:https?:(?=//))?(?://)?(?P<authority>[^/?#\\]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_HOST_AND_PORT = re.compile(r"(?P<host>\[[^\]]*\]|[^:]*)(?::(?P<port>\d*))?")


@dataclass
class OptOuts:
    """Some entries of a list, as they are compared with rows."""

    hosts: set[str] = field(default_factory=set)
    """Each stands for itself and for all hosts below it."""
    urls: list[str] = field(default_factory=list)


def comparable_url(url: str) -> str:
    """Spell a URL so that two that name the same picture are equal; what is not an http or https URL stays as it is.

    Scheme, user, port and fragment are dropped, the host is spelled as by `comparable_host`, dot segments are resolved,
    and only those characters are percent-encoded that would otherwise mean something else.
    """
    hosts = hosts_of(url)
    if not hosts:
        return url
    parts = _AUTHORITY.fullmatch(url.strip().translate(_REMOVED))
    assert parts is not None, "it matches every text"
    rest = parts["rest"]
    path, question_mark, query = rest.partition("#")[0].partition("?")
    path = _normalise_escapes(path.replace("\\", "/"))
    if "/." in path:
        path = _without_dot_segments(path)
    return f"{comparable_host(hosts[0])}{path or '/'}{question_mark}{_normalise_escapes(query)}"


_REMOVED = {ord(character): None for character in "\t\r\n"}  # as browsers and urllib do


def _normalise_escapes(text: str) -> str:
    def spell(match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            byte = match[2][0]
            return b"%%%02X" % byte if byte in _TO_ESCAPE else match[2]
        byte = int(match[1], 16)
        return b"%%%02X" % byte if byte in _STAY_ESCAPED else bytes([byte])

    return _ANY_ESCAPE.sub(spell, text.encode("utf-8", "surrogatepass")).decode("ascii")


def _without_dot_segments(path: str) -> str:
    """Resolve `.` and `..`, as RFC 3986 does."""
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
    """`comparable_url` of each of `urls` (no nulls, whole UTF-8)."""
    as_they_are = np.asarray(pc.match_substring_regex(urls, COMPARABLE)) & ~np.asarray(pc.match_substring(urls, "/."))
    as_they_are &= ~np.asarray(pc.match_substring(urls, "xn--"))
    stripped = pc.replace_substring_regex(urls, "^https?://", "")
    if as_they_are.all():
        return stripped
    others = urls.filter(pa.array(~as_they_are)).to_pylist()
    return pc.replace_with_mask(stripped, pa.array(~as_they_are), pa.array(map(comparable_url, others), urls.type))


def parse_entry(entry: str, found: OptOuts) -> None:
    """Add one entry of a list to `found`: a host (and all below it), or a URL with or without its scheme.

    Raises:
        ValueError: it is neither; says why, and what to write.
    """
    if blank := re.search(r"[\s\x00-\x1f\x7f]", entry):
        raise ValueError(f"has {blank[0]!r} in it; give one entry per line, with a blank in a URL as %20")
    try:
        address = ip_address(entry.strip("[]"))  # or the colons of IPv6 would be taken for a port
    except ValueError:
        pass
    else:
        found.hosts.add(comparable_host(str(address)))
        return
    with_scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):[/\\]{2}", entry)
    if with_scheme and with_scheme[1].lower() not in ("http", "https"):
        raise ValueError(f"is of the scheme {with_scheme[1]}, and only http and https are ever downloaded")
    parts = _AUTHORITY.fullmatch(entry)
    assert parts is not None, "it matches every text"
    authority, rest = parts["authority"], parts["rest"]
    _, at, host_and_port = authority.rpartition("@")
    if at and not with_scheme:
        raise ValueError("looks like an e-mail address; give the host or the URL that is opted out")
    named = _HOST_AND_PORT.fullmatch(host_and_port)
    if named is None or (named["port"] and int(named["port"]) > 65535):
        raise ValueError(f"has no valid port in {host_and_port!r}")
    host = _listed_host(named["host"])
    if rest.partition("#")[0] in ("", "/", "/*"):  # no picture is there: the site is meant
        found.hosts.add(host)
    elif "*" in named["host"]:
        raise ValueError("has a * in its host and also a path; give the host alone, or whole URLs")
    elif "*" in rest.partition("?")[0].rpartition("/")[2] and rest.endswith("*"):
        raise ValueError("ends in a *, and folders cannot be listed; give the host, or whole URLs")
    elif re.fullmatch(r"/\d{1,3}", rest) and _is_address(host):
        raise ValueError("is a range of addresses; give each address, or the names of the hosts")
    else:
        found.urls.append(comparable_url(f"http://{host_and_port}{rest}"))


def _listed_host(text: str) -> str:
    """The host of an entry; `*.` or a dot before it change nothing, but they make a single name one.

    Raises:
        ValueError: it is not a host.
    """
    name = re.sub(r"^(?:\*?\.)", "", text)
    host = comparable_host(name)
    if _is_address(host):
        if "." in name and not re.fullmatch(r"(?:\d+\.){3}\d+", name):
            raise ValueError(f"{text!r} is not a whole address; give all four numbers")
        return host
    labels = host.split(".")
    if "*" in host:
        raise ValueError("has a * in its host; only *. at its beginning has a meaning")
    if not host or not all(re.fullmatch(r"[a-z0-9_-]{1,63}", label) for label in labels) or len(host) > 253:
        raise ValueError(f"{text!r} is not a host")
    if labels[-1].isdigit():
        raise ValueError(f"{text!r} is neither a name nor an address")
    if len(labels) == 1 and name == text:
        raise ValueError(f"{text!r} is a single name; for it and all hosts below it give *.{text}")
    return host


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def read_opt_outs(path: Path) -> Iterator[OptOuts]:
    """Read a list, a batch of entries at a time.

    Raises:
        RequestError: no such file, not UTF-8, not parquet, no URL column, or entries that mean nothing: the first ones
            are named, with their lines.
    """
    wrong: list[str] = []
    num_wrong = 0
    is_parquet = path.suffix == ".parquet"
    for numbers, entries in _parquet_entries(path) if is_parquet else _text_entries(path):
        found = OptOuts()
        texts = entries.to_pylist()
        is_url = np.asarray(pc.match_substring_regex(entries, COMPARABLE))
        is_url &= ~np.asarray(pc.match_substring_regex(entries, r"/$|[*]|/\.|xn--"))
        found.urls += pc.replace_substring_regex(entries.filter(pa.array(is_url)), "^https?://", "").to_pylist()
        for index in np.flatnonzero(~is_url):
            try:
                parse_entry(texts[index], found)
            except ValueError as error:
                num_wrong += 1
                if len(wrong) < MOST_SHOWN:
                    wrong.append(f"{'row' if is_parquet else 'line'} {numbers[index]}, {texts[index]!r}: {error}")
        yield found
    if wrong:
        more = f"\n  and {num_wrong - len(wrong)} more" if num_wrong > len(wrong) else ""
        listed = "".join(f"\n  {line}" for line in wrong)
        raise RequestError(
            f"The opt-out file {path} has {num_wrong} entries that would drop nothing:{listed}{more}\n"
            "Correct them, or begin their lines with # if they are comments. Nothing was selected."
        )


def read_hosts(path: Path) -> tuple[list[str], int]:
    """The hosts on a list, sorted, and how many URLs are on it.

    Raises:
        RequestError: see `read_opt_outs`.
    """
    hosts: set[str] = set()
    num_urls = 0
    for some in read_opt_outs(path):
        hosts |= some.hosts
        num_urls += len(some.urls)
    return sorted(hosts), num_urls


def read_urls(path: Path) -> Iterator[pa.Array]:
    """The URLs on a list, as `comparable_url` spells them.

    Raises:
        RequestError: see `read_opt_outs`.
    """
    for some in read_opt_outs(path):
        yield pa.array(some.urls, pa.string())


def _parquet_entries(path: Path) -> Iterator[tuple[np.ndarray, pa.Array]]:
    start = 0
    try:
        with pq.ParquetFile(path) as file:
            column = find_columns(file.schema_arrow, str(path)).get("URL")
            if column is None:
                names = ", ".join(file.schema_arrow.names)
                raise RequestError(f"The opt-out file {path} has no URL column; it has {names}.")
            for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
                entries = batch.column(0).cast(pa.string())
                entries.validate(full=True)
                entries = pc.utf8_trim_whitespace(entries)
                is_there = np.asarray(pc.fill_null(pc.not_equal(entries, ""), False))
                yield start + np.flatnonzero(is_there), entries.filter(pa.array(is_there))
                start += len(batch)
    except FileNotFoundError:
        raise RequestError(f"There is no opt-out file {path}.") from None
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"The opt-out file {path} cannot be read as parquet: {error}. Mend it.") from None


def _text_entries(path: Path) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """Numbers of lines, from 1, and their entries, without blank lines and comments."""
    lines = _lines(path)
    while batch := list(islice(lines, BATCH_ROWS)):
        numbers, entries = zip(*batch, strict=True)
        yield np.array(numbers), pa.array(entries, pa.string())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:  # Windows puts a byte order mark before UTF-8
            for number, line in enumerate(file, 1):
                if entry := re.sub(r"(?:^|\s)#.*", "", line.rstrip("\n")).strip():
                    yield number, entry
    except FileNotFoundError:
        raise RequestError(f"There is no opt-out file {path}.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"The opt-out file {path} is not UTF-8 text: {error}. Mend it, or give parquet.") from None
