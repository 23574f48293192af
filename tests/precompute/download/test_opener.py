"""The restricted opener against a misbehaving server."""

import hashlib
import socket
import urllib.request
from typing import Any

import pytest

from precompute.download.config import RequestsConfig, RobotsConfig
from precompute.download.opener import build_opener, install, to_ascii
from precompute.download.report import kind_of
from tests.precompute.download.bad_server import JPEG, BadServer

LIMITS: dict[str, Any] = {
    "timeout_seconds": 0.6,
    "deadline_seconds": 1.0,
    "max_bytes": 100_000,
    "max_redirects": 3,
    "allow_private_hosts": True,
}


def fetch(url: str, **limits: Any) -> bytes:
    config = RequestsConfig.model_validate(LIMITS | limits)
    with build_opener(config, RobotsConfig()).open(
        urllib.request.Request(url), timeout=config.timeout_seconds
    ) as response:
        return response.read()


def test_as_many_redirects_as_allowed_are_followed(server: BadServer) -> None:
    """test_download.py tests other successful downloads."""
    assert fetch(f"{server.address}/hops/3").startswith(JPEG)


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("forbidden", "http_403", "HTTP Error 403"),
        ("hops/4", "redirect_loop", "infinite loop"),
        ("to-file", "redirect_loop", "Redirection to url 'file:///etc/hostname' is not allowed"),
        ("to-ftp", "not_http", "unknown url type: ftp"),
        ("cut-chunked", "cut", "IncompleteRead"),
        ("trickling-header", "deadline", "response not complete after 1 seconds"),
    ],
)
def test_failures_are_reported_in_time(server: BadServer, path: str, kind: str, text: str) -> None:
    """The other kinds of failure are tested in test_download.py, by their rows and in the report."""
    with pytest.raises(Exception, match=text) as caught:
        fetch(f"{server.address}/{path}")
    assert kind_of(str(caught.value)) == kind


def test_no_redirect_is_followed(server: BadServer) -> None:
    before = server.requests["/jpeg/redirected"]
    with pytest.raises(OSError, match="HTTP Error 302") as caught:
        fetch(f"{server.address}/redirect", max_redirects=0)
    assert kind_of(str(caught.value)) == "redirect_loop" and server.requests["/jpeg/redirected"] == before


@pytest.mark.parametrize("path", ["/jpeg/1", "/chunked/1"])
def test_the_edge_of_the_size(server: BadServer, path: str) -> None:
    size = len(JPEG + path.encode())
    assert len(fetch(f"{server.address}{path}", max_bytes=size)) == size
    with pytest.raises(OSError, match="too large"):
        fetch(f"{server.address}{path}", max_bytes=size - 1)


def test_after_a_redirect_the_hash_of_the_first_address_counts(server: BadServer) -> None:
    """Several rows may be redirected to the same image, which may have a row of its own."""
    address, target = f"{server.address}/redirect", f"{server.address}/jpeg/redirected"
    wrong, right = (("md5", hashlib.md5(data).hexdigest()) for data in (JPEG, JPEG + b"/jpeg/redirected"))

    def read(first: tuple[str, str], last: tuple[str, str]) -> bytes:
        hashes = {address: {first}, target: {last}}
        opener = build_opener(RequestsConfig.model_validate(LIMITS), RobotsConfig(), hashes)
        with opener.open(urllib.request.Request(address)) as response:
            data: bytes = response.read()
        return data

    assert read(right, wrong).startswith(JPEG)
    with pytest.raises(OSError, match="hash mismatch"):
        read(wrong, right)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:text/plain,x", "gopher://a/b"])
def test_only_http_is_opened(url: str) -> None:
    with pytest.raises(OSError, match="unknown url type") as caught:
        fetch(url)
    assert kind_of(str(caught.value)) == "not_http"


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        (
            "http://user@bücher.example:80/a b/ü?q=й&r=%20+[1]#é",
            "http://user@xn--bcher-kva.example:80/a%20b/%C3%BC?q=%D0%B9&r=%20+[1]#%C3%A9",
        ),
        ("http://ü:b@ü.example/", "http://%C3%BC:b@xn--tda.example/"),
        ("http://例え.テスト:8080/a.jpg", "http://xn--r8jz45g.xn--zckzah:8080/a.jpg"),
        ("https://example.com/a%2Fb?#", "https://example.com/a%2Fb?#"),
        ("http://[::1]/", "http://[::1]/"),
    ],
)
def test_only_what_http_does_not_allow_is_escaped(url: str, sent: str) -> None:
    assert to_ascii(url) == sent == to_ascii(sent)


def test_private_hosts_are_not_even_connected_to(server: BadServer) -> None:
    before = server.requests.total()
    for host in ("127.0.0.1", "localhost", "0x7f.1", "[::ffff:127.0.0.1]"):
        with pytest.raises(OSError, match="private address") as caught:
            fetch(f"http://{host}:{server.server_port}/jpeg/1", allow_private_hosts=False)
        assert kind_of(str(caught.value)) == "private_address"
    assert server.requests.total() == before


def test_a_public_name_with_a_private_address_gets_no_request(
    server: BadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.server_port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answer)
    monkeypatch.setenv("no_proxy", "rebound.example.com")  # does not make it a trusted proxy
    before = server.requests.total()
    for scheme in ("http", "https"):
        with pytest.raises(OSError, match=r"private address: 127.0.0.1 behind host rebound.example.com|SSL") as caught:
            fetch(f"{scheme}://rebound.example.com/jpeg/1", allow_private_hosts=False)
        assert kind_of(str(caught.value)) in ("private_address", "tls")
    assert server.requests.total() == before


@pytest.mark.parametrize("spelling", ["http://127.0.0.1", "127.0.0.1", "LocalHost"])
def test_the_proxy_may_be_private(spelling: str, server: BadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"{spelling}:{server.address.rpartition(':')[2]}")
    monkeypatch.setenv("no_proxy", "")
    before = server.requests["http://example.com/jpeg/1"]
    with pytest.raises(OSError, match="404"):  # used as a proxy, the server does not know that path
        fetch("http://example.com/jpeg/1", allow_private_hosts=False)
    assert server.requests["http://example.com/jpeg/1"] == before + 1
    with pytest.raises(OSError, match=r"private address: host 10.0.0.1"):
        fetch("http://10.0.0.1/jpeg/1", allow_private_hosts=False)


def test_install_serves_urlopen(server: BadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)
    install(RequestsConfig.model_validate(LIMITS), RobotsConfig())
    with pytest.raises(OSError, match="declared"), urllib.request.urlopen(f"{server.address}/huge") as response:
        response.read()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("HTTP Error 410: Gone", "http_410"),
        ("HTTP Error 429: Too Many Requests", "http_429"),
        ("HTTP Error 451: Unavailable For Legal Reasons", "http_4xx"),
        ("HTTP Error 304: Not Modified", "http_other"),
        ("<urlopen error [Errno -2] Name or service not known>", "dns"),
        ("<urlopen error [Errno -3] Temporary failure in name resolution>", "dns"),
        ("<urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed>", "tls"),
        ("<urlopen error [Errno 111] Connection refused>", "refused"),
        ("<urlopen error [Errno 113] No route to host>", "unreachable"),
        ("[Errno 104] Connection reset by peer", "cut"),
        ("<urlopen error timed out>", "timeout"),
        ("Use of image disallowed by X-Robots-Tag directive", "robots"),
        ("Image decoding error: not_an_image", "not_an_image"),
        ("Image decoding error: undecodable", "undecodable"),
        ("URL can't contain control characters. '/a b' (found at least ' ')", "not_http"),
        ("something new", "other"),
    ],
)
def test_kinds(message: str, kind: str) -> None:
    assert kind_of(message) == kind
