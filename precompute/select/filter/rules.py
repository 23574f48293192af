"""The rules a row has to pass, in order, and the count of those that each rule dropped."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.select.config import FiltersConfig, UrlsConfig
from precompute.select.filter.hosts import are_http, are_private, is_listed

Masks = tuple[np.ndarray, np.ndarray]
"""(rows that pass, rows that have no value to judge), both bool."""


@dataclass(frozen=True)
class Rule:
    """One condition on a row."""

    name: str
    condition: str
    """The condition in words, with its value."""
    columns: tuple[str, ...]
    """What it reads, under our names."""
    option: str
    """The config field that switches it."""
    judge: Callable[[pa.RecordBatch], Masks]


@dataclass
class Dropped:
    """Rows that one rule dropped."""

    by_value: int = 0
    no_value: int = 0

    def __iadd__(self, other: "Dropped") -> "Dropped":
        self.by_value += other.by_value
        self.no_value += other.no_value
        return self


@dataclass
class RuleSet:
    """All rules of a selection that look at one row alone.

    Numbers are judged on whole batches, texts only on the rows that are left: they cost a hundred times as much.
    """

    numeric: list[Rule]
    text: list[Rule]
    all: list[Rule] = field(init=False)

    def __post_init__(self) -> None:
        self.all = self.numeric + self.text

    def apply(self, batch: pa.RecordBatch, dropped: dict[str, Dropped]) -> pa.RecordBatch:
        """The rows of `batch` (columns under our names) that pass every rule; the others are added to `dropped`."""
        for stage in (self.numeric, self.text):
            alive = np.ones(batch.num_rows, bool)
            for rule in stage:
                passes, absent = rule.judge(batch)
                num_absent = int(np.count_nonzero(alive & absent))
                num_before = int(np.count_nonzero(alive))
                alive &= passes & ~absent
                lost = num_before - int(np.count_nonzero(alive))
                dropped[rule.name] += Dropped(lost - num_absent, num_absent)
            if not alive.all():
                batch = batch.filter(pa.array(alive))
        return batch


def build_rules(filters: FiltersConfig, urls: UrlsConfig, opt_out_hosts: list[str]) -> RuleSet:
    """The rules that are switched on, in the order in which a row meets them."""
    numeric: list[Rule] = []
    for name, column, bound, sign in (
        ("aesthetic", "AESTHETIC_SCORE", filters.min_aesthetic, "≥"),
        ("punsafe", "punsafe", filters.max_punsafe, "<"),
        ("pwatermark", "pwatermark", filters.max_pwatermark, "<"),
        ("similarity", "similarity", filters.min_similarity, "≥"),
    ):
        if bound is not None:
            option = f"filters.{'min' if sign == '≥' else 'max'}_{name}"
            numeric.append(Rule(name, f"{column} {sign} {bound:g}", (column,), option, _threshold(column, bound, sign)))
    sides = ("WIDTH", "HEIGHT")
    if (side := filters.min_side) is not None:
        numeric.append(Rule("min_side", f"shorter side ≥ {side} px", sides, "filters.min_side", _min_side(side)))
    if (ratio := filters.max_aspect_ratio) is not None:
        condition = f"longer ÷ shorter side ≤ {ratio:g}"
        numeric.append(Rule("aspect_ratio", condition, sides, "filters.max_aspect_ratio", _max_ratio(ratio)))
    return RuleSet(numeric, _text_rules(filters, urls, opt_out_hosts))


def _text_rules(filters: FiltersConfig, urls: UrlsConfig, opt_out_hosts: list[str]) -> list[Rule]:
    rules = []
    if (languages := filters.languages) is not None:
        judge = _texts("LANGUAGE", lambda texts: _to_numpy(pc.is_in(texts, pa.array(languages, pa.string()))))
        rules.append(Rule("language", f"LANGUAGE in {', '.join(languages)}", ("LANGUAGE",), "filters.languages", judge))
    low, high = filters.min_caption, filters.max_caption
    if low is not None or high is not None:
        bounds = (low or 0, high if high is not None else 2**31)
        condition = f"caption of {bounds[0]}{f' to {high}' if high is not None else ' or more'} characters"
        option = "filters.min_caption and filters.max_caption"
        judge = _texts("TEXT", lambda texts: _length(texts, *bounds))
        rules.append(Rule("caption", condition, ("TEXT",), option, judge))
    rules.append(Rule("url_scheme", "an http or https URL", ("URL",), "", _texts("URL", are_http)))
    if not urls.allow_private_hosts:
        option = "urls.allow_private_hosts"
        judge = _texts("URL", lambda texts: ~are_private(texts))
        rules.append(Rule("url_host", "a host that is not private", ("URL",), option, judge))
    if opt_out_hosts:
        hosts = pa.array(opt_out_hosts, pa.string())
        judge = _texts("URL", lambda texts: ~is_listed(texts, hosts))
        rules.append(Rule("opt_out_host", "host not in the opt-out file", ("URL",), "urls.opt_out", judge))
    return rules


def _threshold(column: str, bound: float, sign: str) -> Callable[[pa.RecordBatch], Masks]:
    def judge(batch: pa.RecordBatch) -> Masks:
        # numpy compares in the column's own precision: a float32 0.7 is not below 0.7
        values = _numbers(batch.column(column))
        return (values >= bound if sign == "≥" else values < bound), _is_absent(values)

    return judge


def _min_side(bound: int) -> Callable[[pa.RecordBatch], Masks]:
    return lambda batch: _judge_sides(batch, lambda shorter, longer: shorter >= bound)


def _max_ratio(bound: float) -> Callable[[pa.RecordBatch], Masks]:
    return lambda batch: _judge_sides(batch, lambda shorter, longer: (shorter > 0) & (longer <= bound * shorter))


def _judge_sides(batch: pa.RecordBatch, passes: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Masks:
    width, height = _numbers(batch.column("WIDTH")), _numbers(batch.column("HEIGHT"))
    return passes(np.minimum(width, height), np.maximum(width, height)), _is_absent(width) | _is_absent(height)


def _texts(column: str, passes: Callable[[pa.Array], np.ndarray]) -> Callable[[pa.RecordBatch], Masks]:
    def judge(batch: pa.RecordBatch) -> Masks:
        texts = batch.column(column)
        absent = _is_unreadable(texts)
        if absent.any():
            texts = pc.if_else(pa.array(absent), "", texts)
        return passes(texts), absent

    return judge


def _length(texts: pa.Array, low: int, high: int) -> np.ndarray:
    lengths = pc.utf8_length(pc.utf8_trim_whitespace(texts)).to_numpy(zero_copy_only=False)
    return (lengths >= low) & (lengths <= high)


def _numbers(column: pa.Array) -> np.ndarray:
    """Null → NaN."""
    return column.to_numpy(zero_copy_only=False)


def _to_numpy(mask: pa.Array) -> np.ndarray:
    return mask.to_numpy(zero_copy_only=False)


def _is_absent(values: np.ndarray) -> np.ndarray:
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)


def _is_unreadable(texts: pa.Array) -> np.ndarray:
    """Null, or bytes that are not UTF-8 (parquet does not check them)."""
    absent = texts.is_null().to_numpy(zero_copy_only=False)
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        decoded = (_is_utf8(data) for data in texts.cast(pa.binary()).to_pylist())
        return absent | ~np.fromiter(decoded, bool, len(texts))
    return absent


def _is_utf8(data: bytes | None) -> bool:
    try:
        return data is None or data.decode() is not None
    except UnicodeDecodeError:
        return False
