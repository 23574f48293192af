"""Decode and clean captions, recording which changes were made, and read scores and licences."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precompute.input.reject import Reject
from precompute.input.table import CaptionSource, ScoreSource
from precompute.input.unit import RawSample
from shards.format.encoding import FALLBACK, TABLE_PREFIX
from shards.format.scores import OTHER_NAMES
from shards.format.tables import samples_schema

FLOAT32_MAX = float(np.finfo(np.float32).max)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]+")
SURROGATE = re.compile(r"[\ud800-\udfff]")
JSON_PREFIX = "json:"
ITEM = re.compile(r"(.+)\[(\d{1,4})\]")
"""Caption field that is an item of a list, such as `captions[0]`."""
RESERVED = {*samples_schema(()).names, "missing"}
"""Names that a score cannot have, because they are columns of samples.parquet or a field of `data.filter`."""
LICENSE_FIELDS, MAX_LICENSE_CHARACTERS = ("license", "LICENSE"), 100
MAX_FIELDS, MAX_NAME_CHARACTERS = 20, 64
"""Limits on the detail recorded for a rejected sample: number of fields listed, and characters per field name."""


@dataclass(frozen=True)
class CleanCaption:
    """A caption ready to be stored."""

    text: str
    changes: frozenset[str]
    """Changes made by cleaning, from `CAPTION_CHANGES` (shards.format.tables). Never `truncated`, which depends on the
    text towers and is added after encoding."""


def normal_field(field: str) -> str:
    """Return a caption field with `json:` in front, unless it is `txt`. Raises ValueError if it is empty."""
    field = field if field == "txt" else f"{JSON_PREFIX}{field.removeprefix(JSON_PREFIX)}"
    if field == JSON_PREFIX:
        raise ValueError("a caption field has no name; use txt, or the name of a field or column")
    return field


def source_name(source: CaptionSource) -> str:
    """Return the name of a caption source in encoding records: `txt`, `json:FIELD`, `table:COLUMN`, or
    `table:COLUMN|FIELD` with the field that replaces missing captions."""
    if source.field is not None:
        return normal_field(source.field)
    fallback = "" if source.fallback is None else f"{FALLBACK}{normal_field(source.fallback)}"
    return f"{TABLE_PREFIX}{source.column}{fallback}"


def check_caption_sources(sources: list[CaptionSource]) -> list[CaptionSource]:
    """Return `sources`. Raises ValueError if one has no name, or two have the same."""
    names = [source_name(source) for source in sources]
    if len(set(names)) != len(names):
        raise ValueError(f"a caption field is listed twice in {', '.join(names)}; list each field once")
    return sources


def read_captions(raw: RawSample, fields: Sequence[str], max_characters: int) -> list[CleanCaption | None]:
    """Return a sample's captions, one for each of `fields` (see `source_name`), with None for a missing caption.
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
    if field == "txt":
        return raw.caption
    if field.startswith(TABLE_PREFIX):
        column, _, fallback = field.removeprefix(TABLE_PREFIX).partition(FALLBACK)
        caption = raw.tables.get(column)
        is_missing = not isinstance(caption, str) or not CONTROL.sub(" ", caption).strip()
        return _raw_caption(raw, fallback) if fallback and is_missing else caption
    name = field.removeprefix(JSON_PREFIX)
    if name not in raw.metadata and (match := ITEM.fullmatch(name)) and isinstance(raw.metadata.get(match[1]), list):
        return next(iter(raw.metadata[match[1]][int(match[2]) :]), None)
    return raw.metadata.get(name)


def fields_with_text(raw: RawSample) -> Iterator[tuple[str, str]]:
    """Yield (field, text) for each caption field of a sample that contains text, including items of lists."""
    if raw.caption and (text := raw.caption.decode(errors="replace").strip()):
        yield "txt", text
    for name, value in raw.metadata.items():
        for place, text in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(text, str) and text.strip():
                yield f"{JSON_PREFIX}{name}{f'[{place}]' if isinstance(value, list) else ''}", text.strip()


def _text_fields(raw: RawSample) -> str:
    """List the sample's fields that contain text, for the `detail` recorded when the sample is rejected."""
    shown = [field[:MAX_NAME_CHARACTERS] for field, _ in fields_with_text(raw)]
    more = f" and {len(shown) - MAX_FIELDS} more" if len(shown) > MAX_FIELDS else ""
    return f"text in {', '.join(shown[:MAX_FIELDS])}{more}" if shown else "no text in any field"


def check_score_sources(sources: list[ScoreSource]) -> list[ScoreSource]:
    """Return `sources`. Raises ValueError if one has no name or a reserved name, or two have the same name."""
    names = [source.name for source in sources]
    for name in names:
        if not name or name in RESERVED:
            raise ValueError(f"a score cannot have the name {name!r}; rename the field or column")
    if len(set(names)) != len(names):
        raise ValueError(f"a score is listed twice in {', '.join(names)}; list each score once")
    return sources


def read_scores(raw: RawSample, names: tuple[str, ...]) -> np.ndarray:
    """Return the scores `names` of a sample as (scores,) float32: from a table, or from its JSON, whose fields may have
    any of LAION's spellings. A score that is missing, not a number, or out of float32 range becomes NaN."""
    scores = np.full(len(names), np.nan, np.float32)
    for index, name in enumerate(names):
        fields = (name, *OTHER_NAMES.get(name, ()))
        found = [raw.tables[name]] if name in raw.tables else [raw.metadata.get(field) for field in fields]
        scores[index] = next((number for value in found if (number := _number(value)) is not None), math.nan)
    return scores


def _number(value: object) -> float | None:
    """Return the value of a number, or of the text of a number as in CSV files, NaN if it is out of float32 range, and
    None if it is not a number."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) <= FLOAT32_MAX else math.nan


def read_license(metadata: Mapping[str, object]) -> str:
    """Return the licence in a sample's JSON as one line of text, or an empty text if there is none."""
    value = next((metadata[name] for name in LICENSE_FIELDS if metadata.get(name) is not None), "")
    text = CONTROL.sub(" ", valid_text(str(value))).strip() if isinstance(value, str | int) else ""
    return text[:MAX_LICENSE_CHARACTERS]
