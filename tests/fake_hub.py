"""A local hub with the API calls that downloading and uploading need, and with injected faults."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, file_download

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
def fake_hub(
    folder: Path, faulty: bool = True, fetched: list[str] | None = None, asked: list[dict[str, Any]] | None = None
) -> Iterator[str]:
    """Serve the files below `folder` for every repository, at commit COMMIT and on branch main; yield the hub's
    address. Uploads are written to `folder`; the second commit of the owner `flaky` fails once.

    `fetched` receives the name of each file whose bytes are requested, and `asked` the body of each upload's request.
    """
    commits = 0
    faults = FAULTS if faulty else {}

    class Hub(BaseHTTPRequestHandler):
        @property
        def address(self) -> str:
            return f"http://127.0.0.1:{server.server_port}"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            path = re.sub(r"^(/api)?/datasets/|^/api/models/", "/", path)
            path = re.sub(r"^/\w[^/]*/[^/]+$", r"\g<0>/revision/main", path)
            found = re.fullmatch(r"/(\w[^/]*)/([^/]+)/(revision|tree|resolve)/([^/]+)/?(.*)", path)
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
            data = files[name].read_bytes()
            begin, end, wanted = 0, len(data), self.headers.get("Range")
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                begin, end = int(first), min(int(last) + 1, end) if last else end
            half = faulty and owner == "half" and name.endswith(".safetensors")
            about = {"ETag": f'"{len(data)}-{name.replace("/", "-")}"', "X-Repo-Commit": COMMIT}
            if wanted:
                about["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            sent = data[begin : min(end, len(data) // 2) if half else end]
            self.answer(206 if wanted else 200, about, sent, end - begin)

        def do_POST(self) -> None:
            nonlocal commits
            path = unquote(urlsplit(self.path).path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            creating = path == "/api/repos/create"
            owners = {lines[0].get("organization")} if creating else set(path.split("/"))
            owner = next((owner for owner in faults if owner in owners), None)
            if owner:
                status, headers = faults[owner]
                return self.answer(status, headers)
            if creating:
                if asked is not None:
                    asked.append(lines[0])
                name = f"{lines[0].get('organization', 'me')}/{lines[0]['name']}"
                return self.answer_json({"url": f"{self.address}/datasets/{name}", "name": name})
            if path == "/api/validate-yaml":
                return self.answer_json({"errors": [], "warnings": []})
            if "/preupload/" in path:
                files = [{"path": file["path"], "uploadMode": "regular"} for file in lines[0]["files"]]
                return self.answer_json({"files": [file | {"shouldIgnore": False} for file in files]})
            if "/commit/" in path:
                commits += 1
                if "/flaky/" in path and commits == 2:
                    return self.answer(500, {})
                for line in lines:
                    if line["key"] == "file":
                        target = folder / line["value"]["path"]
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(base64.b64decode(line["value"]["content"]))
                repo = re.sub(r"^/api/(models/)?|/commit/.*", "", path)
                return self.answer_json({"commitUrl": f"{self.address}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})
            self.answer(404, {})

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


def keep_downloads_in(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Make this process keep what it downloads from hubs in the folder `cache`."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HOME", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))


def connect(monkeypatch: pytest.MonkeyPatch, hub: str, offline: bool = False) -> None:
    """Make this process use the hub at this address, without hf_xet, which needs the real hub's servers."""
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    template = f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for module in (constants, file_download):  # version 0.34 copies it
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=module is constants)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
