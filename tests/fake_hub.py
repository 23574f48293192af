"""A local model hub with the API calls that downloading a model needs, and with injected faults."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.runs import environment

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FAULTS = {
    "gone": (404, {"X-Error-Code": "RepoNotFound"}),
    "hidden": (401, {"X-Error-Message": "Invalid username or password."}),
    "gated": (403, {"X-Error-Code": "GatedRepo"}),
    "busy": (429, {"Retry-After": "0"}),
    "down": (503, {}),
}
"""Owner → the hub's response for each of its repositories. Files of the owner `half` are truncated."""


@contextmanager
def fake_hub(folder: Path, faulty: bool = True, fetched: list[str] | None = None) -> Iterator[str]:
    """Serve the files below `folder` for every repository, at commit COMMIT and on branch main; yield the hub's
    address.

    `fetched` receives the name of each file whose bytes are requested.
    """
    faults = FAULTS if faulty else {}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            found = re.fullmatch(r"(?:/api/models)?/(\w[^/]*)/([^/]+)/(revision|tree|resolve)/([^/]+)/?(.*)", path)
            if not found:
                return self.answer(404, {})
            owner, repo, what, revision, name = found.groups()
            if owner in faults:
                status, headers = faults[owner]
                return self.answer(status, headers)
            if revision not in (COMMIT, "main"):
                return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
            if what == "revision":
                siblings = [{"rfilename": file} for file in files]
                return self.answer_json({"id": f"{owner}/{repo}", "sha": COMMIT, "siblings": siblings})
            if what == "tree":
                return self.answer_json(
                    [{"type": "file", "path": n, "size": p.stat().st_size, "oid": n} for n, p in files.items()]
                )
            if name not in files:
                return self.answer(404, {"X-Error-Code": "EntryNotFound"})
            if fetched is not None and self.command == "GET":
                fetched.append(name)
            data, begin = files[name].read_bytes(), 0
            if wanted := self.headers.get("Range"):
                begin = int(wanted.removeprefix("bytes=").split("-")[0])
            half = faulty and owner == "half" and name.endswith(".safetensors")
            last = len(data) // 2 if half else len(data)
            about = {"ETag": f'"{len(data)}-{name.replace("/", "-")}"', "X-Repo-Commit": COMMIT}
            if begin:
                about["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self.answer(206 if begin else 200, about, data[begin:last], len(data) - begin)

        def answer_json(self, value: Any) -> None:
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def answer(self, status: int, headers: dict[str, str], body: bytes = b"", length: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(code: str, hub: str, cache: Path, *arguments: str, **variables: str) -> str:
    """Run `code` in a new process that uses `hub`, and return its standard output."""
    here = {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"} | variables
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(**here), timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout
