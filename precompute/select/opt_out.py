"""Parse the opt-out list into hosts and URLs in canonical form.

Ambiguous entries get the broader reading: dropping a URL needlessly costs one sample, but keeping an opted-out one
breaks a promise to its owner.
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

from precompute.select.metadata import BATCH_ROWS, find_columns
from shards.base.errors import RequestError
from shards.base.urls import AUTHORITY, COMPARABLE, comparable_host, comparable_url

MAX_LISTED = 5
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
        ValueError: The entry is neither. The message completes a sentence that starts with the entry.
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
        raise ValueError("looks like an e-mail address; write the host or URL to opt out")
    named = _HOST_AND_PORT.fullmatch(host_and_port)
    if named is None or (named["port"] and int(named["port"]) > 65535):
        raise ValueError(f"has an invalid port in {host_and_port!r}")
    host = _listed_host(named["host"])
    if rest.partition("#")[0] in ("", "/", "/*"):  # the root is not an image, so this means the whole site
        found.hosts.add(host)
    elif "*" in named["host"]:
        raise ValueError("has both a * in its host and a path; write the host alone, or complete URLs")
    elif "*" in rest.partition("?")[0].rpartition("/")[2] and rest.endswith("*"):
        raise ValueError("ends with a *, but path prefixes are not supported; write the host, or complete URLs")
    elif re.fullmatch(r"/\d{1,3}", rest) and _is_address(host):
        raise ValueError("is an address range, which is not supported; write each address, or the host names")
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
        raise ValueError("has a * in its host, which is only supported as a leading *.")
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


def read_opt_outs(path: Path) -> Iterator[OptOuts]:
    """Yield the entries of an opt-out list in batches.

    Raises:
        RequestError: The file is missing, is not UTF-8 (or not parquet, or lacks a URL column), or has invalid
            entries. The message lists the first few, with line numbers.
    """
    invalid: list[str] = []
    num_invalid = 0
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
                num_invalid += 1
                if len(invalid) < MAX_LISTED:
                    invalid.append(f"{'row' if is_parquet else 'line'} {numbers[index]}, {texts[index]!r}: {error}")
        yield found
    if invalid:
        more = f"\n  and {num_invalid - len(invalid)} more" if num_invalid > len(invalid) else ""
        listed = "".join(f"\n  {line}" for line in invalid)
        raise RequestError(
            f"The opt-out file {path} has {num_invalid} invalid entries, which would not match any URL:{listed}{more}\n"
            "Correct them, or start comment lines with #. Nothing was selected."
        )


def read_hosts(path: Path) -> tuple[list[str], int]:
    """Return the sorted hosts on an opt-out list, and the number of URLs on it.

    Raises:
        RequestError: The list is invalid; see `read_opt_outs`.
    """
    hosts: set[str] = set()
    num_urls = 0
    for batch in read_opt_outs(path):
        hosts |= batch.hosts
        num_urls += len(batch.urls)
    return sorted(hosts), num_urls


def read_urls(path: Path) -> Iterator[pa.Array]:
    """Yield the URLs on an opt-out list, in the canonical form of `comparable_url`.

    Raises:
        RequestError: The list is invalid; see `read_opt_outs`.
    """
    for batch in read_opt_outs(path):
        yield pa.array(batch.urls, pa.string())


def _parquet_entries(path: Path) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """Yield batches of row numbers (from 0) and entries, skipping nulls and blank values."""
    start = 0
    try:
        with pq.ParquetFile(path) as file:
            column = find_columns(file.schema_arrow, str(path)).get("URL")
            if column is None:
                names = ", ".join(file.schema_arrow.names)
                raise RequestError(f"The opt-out file {path} has no URL column. Its columns are {names}.")
            for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
                entries = batch.column(0).cast(pa.string())
                entries.validate(full=True)
                entries = pc.utf8_trim_whitespace(entries)
                present = np.asarray(pc.fill_null(pc.not_equal(entries, ""), False))
                yield start + np.flatnonzero(present), entries.filter(pa.array(present))
                start += len(batch)
    except FileNotFoundError:
        raise RequestError(f"The opt-out file {path} does not exist. Correct urls.opt_out.") from None
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"The opt-out file {path} cannot be read as parquet: {error}. Replace it.") from None


def _text_entries(path: Path) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """Yield batches of line numbers (from 1) and entries, skipping blank lines and comments."""
    lines = _lines(path)
    while batch := list(islice(lines, BATCH_ROWS)):
        numbers, entries = zip(*batch, strict=True)
        yield np.array(numbers), pa.array(entries, pa.string())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:  # Windows editors add a byte order mark
            for number, line in enumerate(file, 1):
                if entry := re.sub(r"(?:^|\s)#.*", "", line.rstrip("\n")).strip():
                    yield number, entry
    except FileNotFoundError:
        raise RequestError(f"The opt-out file {path} does not exist. Correct urls.opt_out.") from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The opt-out file {path} is not UTF-8 text: {error}. Convert it to UTF-8, or use parquet."
        ) from None
