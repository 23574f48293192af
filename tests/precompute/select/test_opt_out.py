"""Opt-outs: a listed site or image is dropped in any spelling, and invalid entries are refused."""

import re
import urllib.parse
from pathlib import Path

import idna
import pyarrow as pa
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from precompute.select.job import select
from shards.base.errors import RequestError
from shards.base.opt_outs import OptOuts, matching_hosts, parse_entry
from shards.base.urls import comparable_host, comparable_url, comparable_urls
from tests.precompute.select import laion

pytestmark = pytest.mark.usefixtures("no_plot")


def is_dropped(entry: str, url: str) -> bool:
    found = OptOuts()
    parse_entry(entry, found)
    return bool(
        matching_hosts(pa.array([url]), found.hosts)[0].is_valid
        or (comparable_url(url) in found.urls and comparable_urls(pa.array([url]))[0].as_py() in found.urls)
    )


OF_EXAMPLE = [
    "http://example.com/a.jpg",
    "https://example.com",
    "HTTPS://Example.COM/a.jpg",
    "https://example.com./a.jpg",
    "https://www.example.com/a.jpg",
    "https://a.b.example.com:8443/a.jpg?b",
    "http://example.com:/a",
    "http://user@example.com/a",
    "http://u@v@example.com/a",
    "http://user:pass@img.example.com:80/a",
    "http://ex%61mple.com/a",
    "http://exam\u00adple.com/a",
    "http://exa\tmple.com/a",
    "http://example。com/a",
    "http://ｅｘａｍｐｌｅ.com/a",
    "http://example.com\\@elsewhere.org/a",
    "http://elsewhere.org\\@example.com/a",
    "http://EXAMPLE.com?a",
    "http://example.com#a",
]
NOT_OF_EXAMPLE = [
    "http://notexample.com/a",
    "http://example.com.elsewhere.org/a",
    "http://elsewhere.org/example.com",
    "http://elsewhere.org/?u=http://example.com/a",
    "http://elsewhere.org/#@example.com",
    "http://example.com@elsewhere.org/a",
    "http://example.org/a",
    "http://com/a",
]
FOR_EXAMPLE = [
    "example.com",
    "Example.COM.",
    "*.example.com",
    ".example.com",
    "example.com:8080",
    "example.com:443",
    "example.com/",
    "example.com/*",
    "//example.com",
    "http://example.com",
    "https://example.com/",
    "https://user@example.com:8080/#top",
    "https://*.example.com/*",
    "ex%61mple.com",
    "EXAMPLE。com",
]


@pytest.mark.parametrize("entry", FOR_EXAMPLE)
def test_a_host_stands_for_itself_and_all_below_it(entry: str) -> None:
    assert [url for url in OF_EXAMPLE if not is_dropped(entry, url)] == []
    assert [url for url in NOT_OF_EXAMPLE if is_dropped(entry, url)] == []


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("bücher.de", "https://xn--bcher-kva.de/a"),
        ("bücher.de", "https://BÜCHER.de./a"),
        ("xn--bcher-kva.de", "https://img.bücher.de/a"),
        ("XN--BCHER-KVA.DE", "https://bu\u0308cher.de/a"),
        ("bücher.de", "https://b%C3%BCcher.de/a"),
        ("straße.de", "http://strasse.de/a"),  # as resolved by Python, and so by the downloader
        ("straße.de", "http://xn--strae-oqa.de/a"),  # as resolved by browsers
        ("xn--strae-oqa.de", "http://STRASSE.de/a"),
        ("пример.рф", "http://xn--e1afmkfd.xn--p1ai/a"),
        ("例え。jp", "http://xn--r8jz45g.jp/a"),
        ("*.gov", "http://www.nasa.gov/a"),
        (".gov", "http://gov/a"),
        ("a_b.example.com", "http://a_b.example.com/a"),
        ("93.184.216.34", "http://93.184.216.34:8080/a"),
        ("93.184.216.34", "http://0x5db8d822/a"),
        ("93.184.216.34:80", "http://1572395042/a"),
        ("93.184.216.34", "http://[::ffff:93.184.216.34]/a"),
        ("2001:db8::1", "http://[2001:DB8:0:0::1]/a"),
        ("[2001:db8::1]", "http://[2001:db8::1]:8080/a"),
        ("[2001:db8::1]:8080", "http://[2001:db8:0::1]/a"),
        ("http://[2001:db8::1]/", "http://[2001:db8::1]/a"),
    ],
)
def test_spellings_of_a_host(entry: str, url: str) -> None:
    assert is_dropped(entry, url)
    assert not is_dropped(entry, "https://elsewhere.org/a")


@pytest.mark.parametrize(
    ("entry", "url", "other"),
    [
        ("https://a.com/p.jpg", "http://a.com/p.jpg", "http://a.com/q.jpg"),
        ("a.com/p.jpg", "https://A.com/p.jpg", "http://a.com/P.jpg"),
        ("//a.com/p.jpg", "https://a.com./p.jpg", "http://www.a.com/p.jpg"),
        ("a.com:8080/p.jpg", "http://a.com:8080/p.jpg", "http://a.com/"),
        ("http://a.com:80/p.jpg", "http://a.com/p.jpg", "http://b.com/p.jpg"),
        ("http://user:pw@a.com/p.jpg", "http://a.com/p.jpg", "http://a.com/p.jpg/"),
        ("http://a.com/p.jpg#top", "http://a.com/p.jpg", "http://a.com/p.jpg?top"),
        ("http://a.com/p.jpg?b=1#c", "http://a.com/p.jpg?b=1", "http://a.com/p.jpg"),
        ("http://a.com/?p=1", "https://a.com?p=1#x", "http://a.com/"),
        ("http://a.com/%7Ejo/p%2ejpg", "http://a.com/~jo/p.jpg", "http://a.com/jo/p.jpg"),
        ("http://a.com/my%20p.jpg", "http://a.com/my p.jpg", "http://a.com/my+p.jpg"),
        ("http://a.com/é.jpg", "http://a.com/%c3%a9.jpg", "http://a.com/e.jpg"),
        ("http://a.com/a%2Fb", "http://a.com/a%2fb", "http://a.com/a/b"),
        ("http://a.com/a%3Fb", "http://a.com/a%3fb", "http://a.com/a?b"),
        ("http://a.com/b/../p.jpg", "http://a.com/./p.jpg", "http://a.com/b/p.jpg"),
        ("http://a.com/100%", "http://a.com/100%", "http://a.com/100"),
        ("http://bücher.de/p.jpg", "http://xn--bcher-kva.de/p.jpg", "http://bucher.de/p.jpg"),
        ("http://a.com/x*y.jpg", "http://a.com/x%2Ay.jpg", "http://a.com/xzy.jpg"),
        ("[2001:db8::1]/p.jpg", "http://[2001:db8:0::1]/p.jpg", "http://[2001:db8::2]/p.jpg"),
    ],
)
def test_spellings_of_a_url(entry: str, url: str, other: str) -> None:
    assert is_dropped(entry, url)
    assert not is_dropped(entry, other)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("example", r"'example' is a single label; .* write \*\.example"),
        ("url", "is a single label"),
        ("img*.example.com", r"has a \* inside its host; \* is supported only at the start"),
        ("example.*", r"has a \* inside its host"),
        ("*", "is not a valid host|has a \\*"),
        ("example.com/gallery/*", r"ends with a \*, but path prefixes"),
        ("*.example.com/p.jpg", r"has both a \* in its host and a path"),
        ("example..com", "'example..com' is not a valid host"),
        ("example.com,", "'example.com,' is not a valid host"),
        ('"example.com"', "is not a valid host"),
        ("||example.com^", "is not a valid host"),
        ("example.com example.org", "contains ' '; write one entry per line"),
        ("http://a.com/1.jpg\thttp://a.com/2.jpg", r"contains '\\t'"),
        ("exam\x00ple.com", r"contains '\\x00'"),
        ("owner@example.com", "looks like an e-mail address"),
        ("ftp://example.com/p.jpg", "has the scheme ftp, but only http and https"),
        ("example.com:port", "has an invalid port in 'example.com:port'"),
        ("example.com:99999", "has an invalid port"),
        ("93.184.216.0/24", "is an address range"),
        ("93.184.216", "'93.184.216' is an incomplete address"),
        ("1.2.3.400", "is neither a host name nor an IP address"),
        ("http://", "is not a valid host"),
        ("/p.jpg", "is not a valid host"),
        ("https://", "is not a valid host"),
        (f"{'a' * 64}.com", "is not a valid host"),
    ],
)
def test_entries_that_would_drop_nothing_are_refused(entry: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_entry(entry, OptOuts())


def test_a_list_with_such_entries_is_refused_with_their_lines(metadata: Path, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("# no\n\nexample.org\nnonsense\n*\n" + "x y\n" * 9)
    with pytest.raises(RequestError) as caught:
        select(laion.config(metadata, tmp_path / "out", urls={"opt_out": path}))
    said = str(caught.value)
    assert "list.txt has 11 invalid entries, which would not match any URL:" in said and "and 6 more" in said
    assert "\n  line 4, 'nonsense': 'nonsense' is a single label" in said and "\n  line 5, '*'" in said
    assert not (tmp_path / "out").exists()
    laion.write(tmp_path / "list.parquet", pa.table({"url": ["http://a.com/1", None, "nonsense"]}))
    with pytest.raises(RequestError, match="row 2, 'nonsense'"):
        select(laion.config(metadata, tmp_path / "out", urls={"opt_out": tmp_path / "list.parquet"}))


LIST = "\ufeff# owners\nExample.com   # in May\n\n  *.wild.example\nbücher.de\na.org/p.jpg\nb.org:8080\n"


@pytest.mark.parametrize("name", ["list.txt", "list.parquet"])
def test_a_selection_honours_every_entry(name: str, tmp_path: Path) -> None:
    if name == "list.txt":
        (tmp_path / name).write_bytes(LIST.replace("\n", "\r\n").encode())
    else:
        entries = ["Example.com", " *.wild.example", "bücher.de", "a.org/p.jpg", "b.org:8080", "", None]
        laion.write(tmp_path / name, pa.table({"URL": entries}))
    kept = ["http://example.org/1", "http://a.org/q.jpg", "http://a.org/q.jpg?p.jpg", "http://c.org:8080/"]
    hosts = ["http://example.com./1", "http://x.wild.example/1", "http://xn--bcher-kva.de/1", "https://b.org:8080/1"]
    urls = ["https://A.org/p.jpg", "http://a.org:80/p.jpg", "http://a.org/%70.jpg", "http://a.org/%70.jpg"]
    rows = [*hosts, *kept, *urls, kept[0]]
    laion.write(tmp_path / "in.parquet", laion.rows(len(rows), URL=rows))
    config = laion.config(tmp_path / "in.parquet", tmp_path / "out", urls={"opt_out": tmp_path / name})
    funnel = select(config)
    dropped = {step["rule"]: step["by_value"] for step in funnel["rules"]}
    assert (dropped["opt_out_host"], dropped["opt_out"], dropped["duplicate"]) == (len(hosts), len(urls), 1)
    assert funnel["rows_out"] == len(kept)


CORRECTED = "\U0002f868\U0002f874\U0002f91f\U0002f95f\U0002f9bf"
"""The five characters whose normal form Unicode has corrected, so each version of IDNA reads them as another host."""
LETTERS = st.characters(codec="utf-8", categories=["Ll", "Lu", "Lo", "Nd"], exclude_characters=CORRECTED)
LABELS = st.text(LETTERS, min_size=1, max_size=8)


@given(st.lists(LABELS, min_size=2, max_size=3).map(".".join))
def test_a_host_and_its_punycode_are_one_host(host: str) -> None:
    """Under both versions of IDNA: Python's, which the downloader uses, and that of browsers."""
    encoders = (lambda: host.encode("idna"), lambda: idna.encode(host, uts46=True))
    for encode in encoders:
        try:
            encoded = encode().decode()
        except UnicodeError:  # not a host under this version
            continue
        if encoded.rpartition(".")[2][:1].isalpha():
            assert comparable_host(encoded) == comparable_host(host)
            assert is_dropped(encoded, f"https://img.{encoded}./a")


CHARACTERS = st.characters(codec="utf-8", exclude_characters="\r\n\t")
PATHS = st.text(st.one_of(st.sampled_from("aZ0/.%2F?&=+#;~ é\\:@[]*'\"<"), CHARACTERS), max_size=24).map("/{}".format)
URLS = st.builds(
    "{}://{}{}{}".format,
    st.sampled_from(["http", "https", "HTTP"]),
    st.sampled_from(["a.com", "A.Com.", "bücher.de", "127.0.0.1", "u@a.com", "xn--bcher-kva.de"]),
    st.sampled_from(["", ":80", ":8080"]),
    PATHS,
)


@given(st.lists(URLS, max_size=6))
def test_urls_are_spelled_alike_one_by_one_and_together(urls: list[str]) -> None:
    assert comparable_urls(pa.array(urls, pa.string())).to_pylist() == [comparable_url(url) for url in urls]


@given(URLS)
def test_the_canonical_form_of_a_url_is_canonical(url: str) -> None:
    once = comparable_url(url)
    assert comparable_url(f"https://{once}") == once


@given(PATHS)
def test_escaping_what_needs_none_changes_nothing(path: str) -> None:
    path, _, _ = path.partition("#")
    assume("\\" not in path)
    escaped = re.sub("[a-zA-Z0-9~]", lambda match: f"%{ord(match[0]):02x}", re.sub("%[0-9a-fA-F]{2}", "", path))
    assume("%" not in re.sub("%[0-9a-fA-F]{2}", "", path))
    plain = re.sub("%[0-9a-fA-F]{2}", "", path)
    assert comparable_url(f"http://a.com{escaped}") == comparable_url(f"http://a.com{plain}")


@given(URLS)
@example("http://127.0.0.1/0")  # with a scheme, it is a URL rather than an address range
def test_a_listed_url_drops_its_row(url: str) -> None:
    entry = re.sub(r"\s", lambda match: urllib.parse.quote(match[0]), url.strip())
    try:
        dropped = is_dropped(entry, url)
    except ValueError as error:  # refused, not ignored
        assert re.search("contains |ends with a|has an invalid port", str(error))
    else:
        assert dropped
