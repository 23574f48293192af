"""Classification of URLs by their text: http, and private hosts in any spelling."""

import pyarrow as pa
import pytest

from precompute.select.hosts import are_http, are_private, is_private_host, is_public_address

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


def test_urls_are_classified_in_order() -> None:
    urls = [*PUBLIC, *NOT_HTTP, *PRIVATE] * 2
    http, private = are_http(pa.array(urls)), are_private(pa.array(urls))
    assert [url for url, found in zip(urls, http, strict=True) if found != (url not in NOT_HTTP)] == []
    assert [url for url, found in zip(urls, private, strict=True) if found != (url in PRIVATE)] == []


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
