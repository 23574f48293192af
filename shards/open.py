"""Where a command opens the latents root that it was told of. Everything below takes the open `Store`."""

from pathlib import Path

from shards.base.errors import RequestError
from shards.base.store import LocalStore, Store, parse_place


def open_store(place: Path | str) -> Store:
    """The store at a path or an address such as s3://bucket/latents. Nothing is read or made yet.

    Raises:
        RequestError: no such kind of address, or the package that opens it is not installed.
    """
    parsed = parse_place(place)
    if isinstance(parsed, Path):
        return LocalStore(parsed)
    from shards.base.remote import RemoteStore  # fsspec and its file systems, where they are needed

    try:
        return RemoteStore(parsed)
    except (ImportError, ValueError) as error:
        raise RequestError(f"The address {parsed} cannot be opened: {error}.") from error
