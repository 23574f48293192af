"""The demo's web server."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from examples.shapes.serve import serve


def test_serves_a_folder_while_open(tmp_path: Path) -> None:
    (tmp_path / "000").mkdir()
    (tmp_path / "000" / "a.jpg").write_bytes(b"bytes of a picture")
    with serve(tmp_path) as address:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{address}/000/a.jpg") as response:
            assert response.read() == b"bytes of a picture"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/000/missing.jpg")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}/000/a.jpg", timeout=2)


def test_two_servers_use_different_ports(tmp_path: Path) -> None:
    with serve(tmp_path) as one, serve(tmp_path) as other:
        assert one != other
