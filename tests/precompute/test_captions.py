"""Captions and scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.captions import clean_caption, read_scores
from precompute.pixels import Reject


@given(st.binary())
def test_any_bytes_give_clean_text_or_a_reject(raw: bytes) -> None:
    try:
        caption = clean_caption(raw)
    except Reject as reject:
        assert reject.reason == "no_caption"
    else:
        assert caption and caption == caption.strip()
        assert not any(ord(character) < 32 for character in caption)
        caption.encode("utf-8")


@pytest.mark.parametrize("raw", [None, b"", b"  \n\t", b"\x00\x01"])
def test_nothing_left_is_rejected(raw: bytes | None) -> None:
    with pytest.raises(Reject):
        clean_caption(raw)


def test_invalid_utf8_and_control_characters() -> None:
    assert clean_caption(b" a\x00\x1bb\xffc\r\n") == "a b\ufffdc"


def test_scores_under_any_spelling() -> None:
    metadata = {"AESTHETIC_SCORE": 5.5, "punsafe": 0, "similarity": None, "pwatermark": "0.3"}
    np.testing.assert_array_equal(read_scores(metadata), np.array([5.5, np.nan, 0.0, np.nan], np.float32))
