"""Captions: any bytes in, clean text out."""

import re
from typing import Any

import numpy as np

from precompute.pixels import Reject

SCORE_NAMES = (
    ("aesthetic", "AESTHETIC_SCORE", "aesthetic_score"),
    ("similarity",),
    ("punsafe",),
    ("pwatermark",),
)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]+")


def clean_caption(raw: bytes | None) -> str:
    """UTF-8 text without control characters and outer blanks; undecodable bytes become U+FFFD.

    Raises:
        Reject: `no_caption`, where nothing is left.
    """
    caption = CONTROL.sub(" ", (raw or b"").decode("utf-8", errors="replace")).strip()
    if not caption:
        raise Reject("no_caption", "absent" if raw is None else "empty")
    return caption


def read_scores(metadata: dict[str, Any]) -> np.ndarray:
    """(4,) float32: aesthetic, similarity, punsafe, pwatermark, under any of LAION's spellings; NaN where absent."""
    return np.array([_first_number(metadata, names) for names in SCORE_NAMES], np.float32)


def _first_number(metadata: dict[str, Any], names: tuple[str, ...]) -> float:
    values = (metadata.get(name) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)), float("nan"))
