"""Decode and clean captions, recording which changes were made, and read scores."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precompute.input.reject import Reject
from precompute.input.tars import RawSample
from shards.format.scores import score_fields

FLOAT32_MAX = float(np.finfo(np.float32).max)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]+")
SURROGATE = re.compile(r"[\ud800-\udfff]")
JSON_PREFIX = "json:"
MAX_FIELDS, MAX_NAME_CHARACTERS = 20, 64
"""Limits on the detail recorded for a rejected sample: number of fields listed, and characters per field name."""


@dataclass(frozen=True)
class CleanCaption:
    """A caption ready to be stored."""

    text: str
    changes: frozenset[str]
    """Changes made by cleaning, from `CAPTION_CHANGES` (shards.format.tables). Never `truncated`, which depends on the
    text towers and is added after encoding."""


def check_caption_fields(fields: list[str]) -> list[str]:
    """Return `fields`. Raises ValueError unless each of them is `txt` or `json:NAME`, and none is listed twice."""
    for field in fields:
        if field != "txt" and not (field.startswith(JSON_PREFIX) and len(field) > len(JSON_PREFIX)):
            raise ValueError(f"{field!r} is not a caption field; use txt or json:FIELD, such as json:blip_caption")
    if len(set(fields)) != len(fields):
        raise ValueError(f"a caption field is listed twice in {', '.join(fields)}; list each field once")
    return fields


def read_captions(raw: RawSample, fields: Sequence[str], max_characters: int) -> list[CleanCaption | None]:
    """Return a sample's captions, one for each of `fields` (`txt` or `json:NAME`), with None for a missing caption.
    Raises Reject (`no_caption`) if all captions are missing; its message lists the fields that do contain text."""
    captions: list[CleanCaption | None] = []
    problems = []
    for field in fields:
        try:
            captions.append(clean_caption(_raw_caption(raw, field), max_characters))
        except Reject as reject:
            captions.append(None)
            problems.append(f"{field} is {reject}")
    if not any(captions):
        raise Reject("no_caption", f"{', '.join(problems)}; the sample has {_text_fields(raw)}")
    return captions


def clean_caption(raw: object, max_characters: int) -> CleanCaption:
    """Clean a caption (bytes, or a value from JSON) and truncate it to `max_characters`. Invalid UTF-8 is replaced by
    U+FFFD, each run of control characters is replaced by a space, and surrounding whitespace is stripped.

    Raises Reject (`no_caption`) if `raw` is not text or nothing is left.
    """
    if not isinstance(raw, bytes | str):
        raise Reject("no_caption", "absent" if raw is None else f"a value of type {type(raw).__name__}, not text")
    text = raw.decode("utf-8", errors="surrogateescape") if isinstance(raw, bytes) else raw
    changes = set()
    if SURROGATE.search(text):
        text = valid_text(text)
        changes.add("invalid_utf8")
    text = text.strip()  # surrounding whitespace does not count as a change
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
    """Replace lone surrogates, which UTF-8 cannot encode, with U+FFFD."""
    return SURROGATE.sub("\ufffd", text)


def _raw_caption(raw: RawSample, field: str) -> object:
    return raw.caption if field == "txt" else raw.metadata.get(field.removeprefix(JSON_PREFIX))


def _text_fields(raw: RawSample) -> str:
    """List the sample's fields that contain text, for the `detail` recorded when the sample is rejected."""
    names = [f"{JSON_PREFIX}{name}" for name, value in raw.metadata.items() if isinstance(value, str) and value.strip()]
    shown = (["txt"] if raw.caption and raw.caption.strip() else []) + [name[:MAX_NAME_CHARACTERS] for name in names]
    more = f" and {len(shown) - MAX_FIELDS} more" if len(shown) > MAX_FIELDS else ""
    return f"text in {', '.join(shown[:MAX_FIELDS])}{more}" if shown else "no text in any field"


def read_scores(metadata: dict[str, Any], names: tuple[str, ...]) -> np.ndarray:
    """Return the scores `names` from a sample's JSON, whose fields may have any of LAION's spellings, as (scores,)
    float32. A score that is missing, not a number, or out of float32 range becomes NaN."""
    return np.array([_first_number(metadata, fields) for fields in score_fields(names)], np.float32)


def _first_number(metadata: dict[str, Any], fields: tuple[str, ...]) -> float:
    for field in fields:
        value = metadata.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value if abs(value) <= FLOAT32_MAX else math.nan
    return math.nan
