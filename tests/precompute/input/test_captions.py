"""Cleaning of captions, and reading of scores and licences."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.input.captions import CleanCaption, clean_caption, read_captions, read_license, read_scores
from precompute.input.reject import Reject
from precompute.input.tars import Tar
from precompute.input.unit import RawSample
from shards.format.encoding import FALLBACK, TABLE_PREFIX
from shards.format.scores import LAION_SCORES
from tests.fixtures import precompute_config
from tests.tiny import make_tar

LIMIT = 50


@given(st.one_of(st.binary(max_size=200), st.text(st.characters(), max_size=200)))
def test_any_bytes_give_clean_text_or_a_reject(raw: bytes | str) -> None:
    """Including lone surrogates, which JSON escapes can contain."""
    try:
        caption = clean_caption(raw, LIMIT)
    except Reject as reject:
        assert reject.reason == "no_caption"
    else:
        assert caption.text and caption.text == caption.text.strip() and len(caption.text) <= LIMIT
        assert not any(ord(character) < 32 for character in caption.text)
        caption.text.encode("utf-8")
        assert clean_caption(caption.text.encode(), LIMIT) == CleanCaption(caption.text, frozenset())


@pytest.mark.parametrize("raw", [None, b"", b"  \n\t", b"\x00\x01", 7, ["a list"]])
def test_nothing_left_is_rejected(raw: object) -> None:
    with pytest.raises(Reject):
        clean_caption(raw, LIMIT)


@pytest.mark.parametrize(
    ("raw", "text", "changes"),
    [
        (b"a red circle", "a red circle", set()),
        (b" a red circle \r\n", "a red circle", set()),  # surrounding whitespace does not count as a change
        ("b\u00e4r".encode(), "b\u00e4r", set()),
        ("b\u00e4r \ufffd".encode(), "b\u00e4r \ufffd", set()),  # already in the input
        (b"b\xe4r", "b\ufffdr", {"invalid_utf8"}),
        ("b\ud800r", "b\ufffdr", {"invalid_utf8"}),
        (b"a\x00\x1b\nb", "a b", {"control_characters"}),
        (b"a\tb", "a b", {"control_characters"}),
        (b"x" * LIMIT, "x" * LIMIT, set()),
        (b"x" * (LIMIT + 1), "x" * LIMIT, {"too_long"}),
        (b" a\x00\x1bb\xffc\r\n" + b"x" * LIMIT, "a b\ufffdc " + "x" * (LIMIT - 6), None),
    ],
)
def test_changes_are_recorded(raw: bytes | str, text: str, changes: set[str] | None) -> None:
    everything = {"invalid_utf8", "control_characters", "too_long"}
    assert clean_caption(raw, LIMIT) == CleanCaption(text, frozenset(everything if changes is None else changes))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("in the table", "in the table"), (None, "alt text"), (" \x00\n", "alt text"), (3, "alt text")],
)
def test_a_fallback_is_read_only_if_the_table_has_no_text(value: str | float | None, expected: str) -> None:
    raw = RawSample("0", caption=b"alt text", tables={"new": value})
    (found,) = read_captions(raw, [f"{TABLE_PREFIX}new{FALLBACK}txt"], LIMIT)
    assert found is not None and found.text == expected


def test_several_fields() -> None:
    raw = RawSample("0", caption=b"alt text", metadata={"blip": "a picture", "empty": " ", "number": 3})
    found = read_captions(raw, ["json:blip", "json:absent", "txt", "json:empty", "json:number"], LIMIT)
    assert [caption and caption.text for caption in found] == ["a picture", None, "alt text", None, None]
    with pytest.raises(Reject) as caught:
        read_captions(raw, ["json:absent", "json:empty", "json:number"], LIMIT)
    assert str(caught.value) == (
        "json:absent is absent, json:empty is empty, json:number is a value of type int, not text; "
        "the sample has text in txt, json:blip"
    )
    with pytest.raises(Reject, match=r"json:f19$"):
        read_captions(RawSample("0", metadata={f"f{i}": "text" for i in range(20)}), ["txt"], LIMIT)
    with pytest.raises(Reject, match=r"json:a is a value of type list, not text; .* text in json:a\[0\], json:a\[1\]$"):
        read_captions(RawSample("0", metadata={"a": ["one", "two"]}), ["json:a"], LIMIT)
    with pytest.raises(Reject, match="txt is absent; the sample has no text in any field"):
        read_captions(RawSample("0"), ["txt"], LIMIT)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (json.dumps({"blip": "b\u00e4r"}).encode(), "b\u00e4r"),
        (b'{"blip": "b\xe4r"}', "b\ufffdr"),  # Latin-1
        (b'{"blip": "b\\ud800r"}', "b\ufffdr"),  # half a surrogate pair
        (b'\xef\xbb\xbf{"blip": "b"}', "b"),
        (b'{"blip": "b"}'.ljust(1 << 20), "b"),  # the size limit
        (b'{"blip": "b', None),
        (b"[" * 100_000, None),
    ],
)
def test_any_json_in(tmp_path: Path, data: bytes, expected: str | None) -> None:
    path = make_tar(tmp_path, "00000", [("0", {"json": data, "txt": b"text"})])
    (sample,) = Tar(path, 1 << 24).samples()
    found = read_captions(sample, ["txt", "json:blip"], LIMIT)
    assert [caption and caption.text for caption in found] == ["text", expected]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["json:"], "a caption field has no name"),
        ([""], "a caption field has no name"),
        (["a", "json:a"], "a caption field is listed twice in json:a, json:a"),
        (["txt", "txt"], "a caption field is listed twice in txt, txt"),
        ([], "at least 1"),
    ],
)
def test_caption_fields_that_make_no_sense(models: Path, tars: Path, fields: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precompute_config(models, tars, tars, captions=fields)


@pytest.mark.parametrize("score", [10**400, -(10**39), 1e39, float("inf"), float("nan"), True, "five", None, [5.0]])
def test_values_out_of_float32_range_are_not_scores(score: object) -> None:
    np.testing.assert_array_equal(
        read_scores(RawSample("a", metadata={"punsafe": score}), LAION_SCORES), np.full(4, np.nan, np.float32)
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_all_values_in_float32_range_are_scores(sign: int) -> None:
    largest = float(np.finfo(np.float32).max)
    for score in (largest, np.nextafter(largest, 0), 1e-45, 2**127):
        raw = RawSample("a", metadata={"punsafe": sign * score})
        np.testing.assert_array_equal(read_scores(raw, LAION_SCORES)[2], np.float32(sign * score))
    too_large = RawSample("a", metadata={"punsafe": sign * np.nextafter(largest, np.inf)})
    assert np.isnan(read_scores(too_large, LAION_SCORES)[2])


def test_scores_under_any_spelling() -> None:
    metadata = {"AESTHETIC_SCORE": 5.5, "punsafe": 0, "similarity": None, "pwatermark": "0.3"}
    found = read_scores(RawSample("a", metadata=metadata), LAION_SCORES)
    np.testing.assert_array_equal(found, np.array([5.5, np.nan, 0.0, 0.3], np.float32))


def test_a_score_from_a_table_replaces_the_one_in_the_json() -> None:
    raw = RawSample("a", metadata={"hps": 0.5, "punsafe": "0.25"}, tables={"hps": None, "aesthetic": 6.0})
    found = read_scores(raw, ("aesthetic", "hps", "punsafe"))
    np.testing.assert_array_equal(found, np.array([6.0, np.nan, 0.25], np.float32))


@pytest.mark.parametrize(
    ("metadata", "license"),
    [
        ({"license": " CC0 "}, "CC0"),
        ({"LICENSE": "CC BY\n4.0"}, "CC BY 4.0"),
        ({"license": None, "LICENSE": 4}, "4"),
        ({"license": ["CC0"]}, ""),
        ({"license": 500 * "x"}, 100 * "x"),
        ({}, ""),
    ],
)
def test_licences(metadata: dict[str, object], license: str) -> None:
    assert read_license(metadata) == license
