"""Fixtures of the download's tests."""

from collections.abc import Iterator

import pytest

from tests.precompute.download.bad_server import BadServer, serve


@pytest.fixture(scope="module")
def server() -> Iterator[BadServer]:
    """A server that misbehaves in many ways."""
    with serve() as server:
        yield server
