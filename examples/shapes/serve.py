"""Serve a folder over HTTP on the loopback interface."""

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PORT = 8350
"""Port to use if it is free, so that URLs, and therefore the latents' records, are the same in every run."""


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because one line per image would bury the demo's output."""


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256  # downloaders open many connections at once; a rejected one is tried again after seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect in the middle of an image, which happens after a timeout."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve `folder` within the context, on `PORT` or else on any free port, and yield its URL without a trailing
    slash."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    try:
        server = _Server(("127.0.0.1", PORT), handler)
    except OSError:
        server = _Server(("127.0.0.1", 0), handler)
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
