"""The opt-out file: URLs and hosts whose owners do not want to be trained on."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.select.metadata.columns import find_columns
from precompute.select.passes.hashes import hash_urls, write_hashes
from shards.base.errors import RequestError

BATCH_ROWS = 131_072


def read_hosts(path: Path) -> list[str]:
    """The hosts that a text file lists, lower case, sorted: its lines without a `://`. Parquet lists URLs alone.

    Raises:
        RequestError: no such file, or not UTF-8.
    """
    if path.suffix == ".parquet":
        return []
    return sorted({line.lower().strip(".") for line in _lines(path) if "://" not in line})


def hash_listed_urls(path: Path, target: Path, partitions: int) -> None:
    """Hash every URL of the file into the folder `target`, in partitions.

    Raises:
        RequestError: no such file, not UTF-8, not parquet, or no URL column.
    """
    urls = _parquet_urls(path) if path.suffix == ".parquet" else _text_urls(path)
    write_hashes(target, map(hash_urls, urls), partitions)


def _text_urls(path: Path) -> Iterator[pa.Array]:
    urls = (line for line in _lines(path) if "://" in line)
    while batch := list(islice(urls, BATCH_ROWS)):
        yield pa.array(batch, pa.string())


def _parquet_urls(path: Path) -> Iterator[pa.Array]:
    try:
        with pq.ParquetFile(path) as file:
            column = find_columns(file.schema_arrow, str(path)).get("URL")
            if column is None:
                names = ", ".join(file.schema_arrow.names)
                raise RequestError(f"The opt-out file {path} has no URL column; it has {names}.")
            for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
                yield batch.column(0).drop_null()
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"The opt-out file {path} cannot be read as parquet: {error}. Mend it.") from None


def _lines(path: Path) -> Iterator[str]:
    """The entries of a text file; blank lines and those that begin with # are none."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if (entry := line.strip()) and not entry.startswith("#"):
                    yield entry
    except FileNotFoundError:
        raise RequestError(f"There is no opt-out file {path}.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"The opt-out file {path} is not UTF-8 text: {error}. Mend it, or give parquet.") from None
