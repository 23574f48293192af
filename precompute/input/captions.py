"""Captions: any bytes in, clean text out, and what had to be done to it."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precompute.input.reject import Reject
from precompute.input.tars import RawSample

SCORE_NAMES = (
    ("aesthetic", "AESTHETIC_SCORE", "aesthetic_score"),
    ("similarity",),
    ("punsafe",),
    ("pwatermark",),
)
FLOAT32_MAX = float(np.finfo(np.float32).max)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]+")
SURROGATE = re.compile(r"[\ud800-\udfff]")
JSON_PREFIX = "json:"
MOST_FIELDS, MOST_NAME = 20, 64
"""How many fields a reject names, and how many characters of each."""


@dataclass(frozen=True)
class CleanCaption:
    """A caption that may be stored."""

    text: str
    changes: frozenset[str]
    """Which of `CAPTION_CHANGES` (shards.format.tables) cleaning made: all but `truncated`."""


def check_caption_fields(fields: Sequence[str]) -> None:
    """See that each of `fields` is `txt` or `json:NAME`, and none comes twice.

    Raises:
        ValueError: which one is not.
    """
    for field in fields:
        if field != "txt" and not (field.startswith(JSON_PREFIX) and len(field) > len(JSON_PREFIX)):
            raise ValueError(f"{field!r} names no caption; give txt or json:FIELD, such as json:blip_caption")
    if len(set(fields)) != len(fields):
        raise ValueError("a caption is named twice")


def read_captions(raw: RawSample, fields: Sequence[str], max_characters: int) -> list[CleanCaption | None]:
    """A sample's captions, one for each of `fields`: `txt`, or `json:NAME` of its metadata; None where it has none.

    Raises:
        Reject: `no_caption`, where it has none in any field; the detail names the fields that hold text.
    """
    captions: list[CleanCaption | None] = []
    why_not = []
    for field in fields:
        try:
            captions.append(clean_caption(_raw_caption(raw, field), max_characters))
        except Reject as reject:
            captions.append(None)
            why_not.append(f"{field} is {reject}")
    if not any(captions):
        raise Reject("no_caption", f"{', '.join(why_not)}; the sample has {_text_fields(raw)}")
    return captions


def clean_caption(raw: object, max_characters: int) -> CleanCaption:
    """Bytes, or a text out of JSON → text without control characters and outer blanks, of `max_characters` at most.

    What is no UTF-8 becomes U+FFFD; a run of control characters becomes a blank.

    Raises:
        Reject: `no_caption`, where nothing is left.
    """
    if not isinstance(raw, bytes | str):
        raise Reject("no_caption", "absent" if raw is None else f"no text but {type(raw).__name__}")
    text = raw.decode("utf-8", errors="surrogateescape") if isinstance(raw, bytes) else raw
    changes = set()
    if SURROGATE.search(text):
        text = valid_text(text)
        changes.add("invalid_utf8")
    text = text.strip()  # outer blanks and line ends are no fault
    if CONTROL.search(text):
        text = CONTROL.sub(" ", text).strip()
        changes.add("control_characters")
    if len(text) > max_characters:
        text = text[:max_characters].strip()
        changes.add("too_long")
    if not text:
        raise Reject("no_caption", "empty")
    return CleanCaption(text, frozenset(changes))


def valid_text(text: str) -> str:
    """`text` with U+FFFD for what UTF-8 cannot hold."""
    return SURROGATE.sub("\ufffd", text)


def _raw_caption(raw: RawSample, field: str) -> object:
    return raw.caption if field == "txt" else raw.metadata.get(field.removeprefix(JSON_PREFIX))


def _text_fields(raw: RawSample) -> str:
    """Name the fields of a sample that could hold captions, for a person."""
    names = [f"{JSON_PREFIX}{name}" for name, value in raw.metadata.items() if isinstance(value, str) and value.strip()]
    shown = (["txt"] if raw.caption and raw.caption.strip() else []) + [name[:MOST_NAME] for name in names]
    more = f" and {len(shown) - MOST_FIELDS} more" if len(shown) > MOST_FIELDS else ""
    return f"{', '.join(shown[:MOST_FIELDS])}{more}" if shown else "no text in any field"


def read_scores(metadata: dict[str, Any]) -> np.ndarray:
    """(4,) float32: aesthetic, similarity, punsafe, pwatermark, under any of LAION's spellings; NaN where there is no
    number that float32 holds."""
    return np.array([_first_number(metadata, names) for names in SCORE_NAMES], np.float32)


def _first_number(metadata: dict[str, Any], names: tuple[str, ...]) -> float:
    for name in names:
        value = metadata.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value if abs(value) <= FLOAT32_MAX else math.nan
    return math.nan
