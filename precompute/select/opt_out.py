"""Read an opt-out list into hosts and URLs in canonical form."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.select.metadata import BATCH_ROWS, find_columns
from shards.base.errors import RequestError
from shards.base.opt_outs import OptOuts, parse_entry
from shards.base.urls import COMPARABLE

MAX_LISTED = 5


def read_opt_outs(path: Path) -> Iterator[OptOuts]:
    """Yield the entries of an opt-out list in batches. Raises RequestError if the file cannot be read or, after the
    last batch, if it has invalid entries; the message lists the first few of them."""
    if not path.exists():
        raise RequestError(f"The opt-out file {path} does not exist. Set urls.opt_out to an existing file.")
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
        count = "1 invalid entry" if num_invalid == 1 else f"{num_invalid} invalid entries"
        raise RequestError(
            f"The opt-out file {path} has {count}, which would not match any URL:{listed}{more}\n"
            "Correct or remove invalid entries, and start comment lines with #. Nothing was selected."
        )


def read_hosts(path: Path) -> tuple[list[str], int]:
    """Return the sorted hosts on an opt-out list, and the number of URLs on it."""
    hosts: set[str] = set()
    num_urls = 0
    for batch in read_opt_outs(path):
        hosts |= batch.hosts
        num_urls += len(batch.urls)
    return sorted(hosts), num_urls


def read_urls(path: Path) -> Iterator[pa.Array]:
    """Yield the URLs on an opt-out list, in the canonical form of `comparable_url`."""
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
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"The opt-out file {path} cannot be read as parquet: {error}. Replace the file.") from None


def _text_entries(path: Path) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """Yield batches of line numbers (from 1) and entries, skipping blank lines and comments."""
    try:
        with path.open(encoding="utf-8-sig") as file:  # Windows editors add a byte order mark
            stripped = (re.sub(r"(?:^|\s)#.*", "", line.rstrip("\n")).strip() for line in file)
            numbered = ((number, entry) for number, entry in enumerate(stripped, 1) if entry)
            while batch := list(islice(numbered, BATCH_ROWS)):
                numbers, entries = zip(*batch, strict=True)
                yield np.array(numbers), pa.array(entries, pa.string())
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The opt-out file {path} is not UTF-8 text: {error}. Convert it to UTF-8, or use parquet."
        ) from None
