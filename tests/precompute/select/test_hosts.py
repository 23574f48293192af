"""Classification of URLs by their text: http, and private hosts in any spelling."""

import pyarrow as pa
import pytest

from precompute.select.hosts import are_http, are_private, is_listed, is_private_host, is_public_address

PUBLIC = [
    "http://example.com/a.jpg",
    "https://example.com",
    "HTTPS://EXAMPLE.COM/A.JPG",
    "http://example.com:8080/a?b#c",
    "http://a_b.example.co.uk./x",
    "http://user:pass@example.com/x",
    "http://8.8.8.8/x",
    "http://134744072/x",  # 8.8.8.8
    "http://[2001:4860:4860::8888]/x",
    "http://bücher.example/x.jpg",
    "http://xn--bcher-kva.example/x.jpg",
    "http://127.0.0.1.example.com/x",
    "http://localhost.example.com/x",
    "http://mylocalhost.com/x",
    "http://172.15.255.255/x",
    "http://172.32.0.0/x",
    "http://11.0.0.0/x",
    "http://example.com/?next=http://127.0.0.1/",
    "http://example.com/a.local",
]
PRIVATE = [
    "http://127.0.0.1/x",
    "http://127.255.255.254:80/x",
    "http://127.1/x",
    "http://0x7f000001/x",
    "http://0177.0.0.1/x",
    "http://2130706433/x",
    "http://0/x",
    "http://localhost/x",
    "https://LOCALHOST:8443/x",
    "http://localhost./x",
    "http://a.localhost/x",
    "http://printer.local/x",
    "http://metadata.google.internal/x",
    "http://router.home.arpa",
    "http://intranet/x",
    "http://10.0.0.0/x",
    "http://10.255.255.255/x",
    "http://172.16.0.0/x",
    "http://172.31.255.255/x",
    "http://192.168.1.1/x",
    "http://169.254.169.254/latest/meta-data",
    "http://100.64.0.1/x",
    "http://224.0.0.1/x",
    "http://255.255.255.255/x",
    "http://[::1]/x",
    "http://[::]/x",
    "http://[fe80::1]/x",
    "http://[fe80::1%25eth0]/x",
    "http://[fd00::1]/x",
    "http://[::ffff:127.0.0.1]/x",
    "http://[::ffff:10.0.0.1]:80/x",
    "http://[2002:7f00:1::]/x",
    "http://user@127.0.0.1/x",
    "http://example.com@127.0.0.1/x",
    "http://example.com\\@127.0.0.1/x",
    "http://%31%32%37.0.0.1/x",
    "http://①②⑦.0.0.1/x",
    "http://127。0。0。1/x",
    "http://12\t7.0.0.1/x",
]
NOT_HTTP = [
    "ftp://example.com/x",
    "file:///etc/passwd",
    "data:image/png;base64,AAAA",
    "javascript:alert(1)",
    "//example.com/x",
    "example.com/x",
    "http:///x",
    "http://",
    "https:",
    "http//example.com",
    "htp://example.com",
    "http://[::1/x",
    "",
]


@pytest.mark.parametrize("url", PUBLIC)
def test_public(url: str) -> None:
    assert are_http(pa.array([url])).all() and not are_private(pa.array([url])).any()


@pytest.mark.parametrize("url", PRIVATE)
def test_private(url: str) -> None:
    assert are_http(pa.array([url])).all() and are_private(pa.array([url])).all()


@pytest.mark.parametrize("url", NOT_HTTP)
def test_not_http(url: str) -> None:
    assert not are_http(pa.array([url])).any() and not are_private(pa.array([url])).any()


def test_masks_keep_their_order() -> None:
    urls = [*PUBLIC, *NOT_HTTP, *PRIVATE] * 2
    assert are_http(pa.array(urls)).tolist() == [url not in NOT_HTTP for url in urls]
    assert are_private(pa.array(urls)).tolist() == [url in PRIVATE for url in urls]


@pytest.mark.parametrize(
    ("address", "is_public"),
    [("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True)]
    + [
        (address, False)
        for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "2002:c0a8:0101::", "239.1.2.3", "0.0.0.0")
    ],
)
def test_addresses(address: str, is_public: bool) -> None:
    assert is_public_address(address) is is_public
    assert is_private_host(address) is not is_public


def test_names_are_not_addresses() -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        is_public_address("example.com")


@pytest.mark.parametrize(
    ("url", "listed"),
    [
        ("http://bad.com/x", True),
        ("https://BAD.com:8080/x", True),
        ("http://user@bad.com/x", True),
        ("http://cdn.bad.com/x", True),
        ("http://a.b.bad.com?x", True),
        ("http://notbad.com/x", False),
        ("http://bad.com.example/x", False),
        ("http://good.com/?u=http://bad.com/", False),
        ("http://com/x", False),
    ],
)
def test_opted_out_hosts_and_those_below_them(url: str, listed: bool) -> None:
    assert is_listed(pa.array([url]), {"bad.com", "worse.org"}).tolist() == [listed]
