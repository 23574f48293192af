"""A local server that misbehaves like the Internet: it answers late, wrongly, or not at all."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

JPEG = b"\xff\xd8\xff\xe0" + bytes(range(256)) * 4
PNG = b"\x89PNG\r\n\x1a\n" + bytes(500)
HTML = b"<!doctype html><title>gone</title>"


ANSWERS: dict[str, tuple[bytes, int, dict[str, str]]] = {
    "png": (PNG, 200, {"Content_Type": "image/png"}),
    "html": (HTML, 200, {"Content_Type": "text/html"}),
    "empty": (b"", 200, {}),
    "error": (HTML, 500, {}),
    "forbidden": (HTML, 403, {}),
    "to_file": (b"", 302, {"Location": "file:///etc/hostname"}),
    "to_ftp": (b"", 302, {"Location": "ftp://127.0.0.1/x"}),
    "cut": (JPEG, 200, {"Content_Length": str(len(JPEG) + 100)}),
    "noai": (JPEG, 200, {"X_Robots_Tag": "noai, max-image-preview:large"}),
    "noai_for_us": (JPEG, 200, {"X_Robots_Tag": "latentmill: noai"}),
    "noai_for_another": (JPEG, 200, {"X_Robots_Tag": "otherbot: noai"}),
}
"""First part of the path → body, status and headers of the answer. Other paths have a method of the handler."""


class BadServer(ThreadingHTTPServer):
    """HTTP server that counts the requests for each path."""

    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: Counter[str] = Counter()
        self.ended = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BadServer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self.server.requests[self.path] += 1
        self.close_connection = True
        kind = self.path.strip("/").partition("/")[0].replace("-", "_")
        if kind in ANSWERS:
            body, status, headers = ANSWERS[kind]
            self._answer(body, status, **headers)
        else:
            getattr(self, f"_{kind}", self._missing)()

    def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body)), "Content_Type": "image/jpeg"} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _missing(self) -> None:
        self._answer(HTML, 404)

    def _jpeg(self) -> None:
        self._answer(JPEG + self.path.encode())

    def _flaky(self) -> None:
        self._answer(JPEG, 503 if self.server.requests[self.path] == 1 else 200)

    def _redirect(self) -> None:
        self._answer(b"", 302, Location=f"{self.server.address}/jpeg/redirected")

    def _hops(self) -> None:
        left = int(self.path.rpartition("/")[2])
        self._answer(b"", 301, Location=f"/hops/{left - 1}" if left > 1 else "/jpeg/after-hops")

    def _chunked(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        body = JPEG + self.path.encode()
        self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")

    def _cut_chunked(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"400\r\n" + JPEG[:100])

    def _huge(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(10**13))
        self.end_headers()
        self.wfile.write(JPEG)

    def _endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        self._write_while_read(bytes(2**16), pause=0)

    def _trickle(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self._write_while_read(b"\xff", pause=0.05)

    def _trickling_header(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        self._write_while_read(b"a", pause=0.05)

    def _silent(self) -> None:
        self.server.ended.wait(20)

    def _slow(self) -> None:
        time.sleep(0.3)
        self._jpeg()

    def _write_while_read(self, data: bytes, pause: float) -> None:
        try:
            while not self.server.ended.wait(pause):
                self.wfile.write(data)
        except OSError:
            return  # the client closed the connection


@contextmanager
def serve() -> Iterator[BadServer]:
    """Run the server inside the block."""
    server = BadServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
