"""Turn the path or URL of a latents root into a `Store`, which the rest of the package works on."""

from pathlib import Path

from shards.base.errors import RequestError
from shards.base.store import LocalStore, Store, parse_place


def open_store(place: Path | str) -> Store:
    """Open the store at a local path or a URL such as s3://bucket/latents, without reading or creating anything. Raises
    RequestError if `place` is empty, or its URL scheme is not supported by an installed package."""
    try:
        parsed = parse_place(place)
    except ValueError:
        raise RequestError("A location is empty. Pass a folder, or a URL such as s3://bucket/latents.") from None
    if isinstance(parsed, Path):
        return LocalStore(parsed)
    from shards.base.remote import RemoteStore  # imported late: local roots need neither fsspec nor its file systems

    try:
        return RemoteStore(parsed)
    except (ImportError, ValueError) as error:
        raise RequestError(
            f"The URL {parsed} cannot be opened: {error}. Check the URL's scheme, and install the package that "
            f"supports the scheme."
        ) from error
