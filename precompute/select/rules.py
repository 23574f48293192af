"""The rules a row has to pass, in order, and what is counted of rows: dropped by which rule, sizes, scores."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.select.config import FiltersConfig, UrlsConfig
from precompute.select.hosts import are_http, are_private, is_listed
from shards.format.buckets import Bucket

TEXTS = {"LANGUAGE", "TEXT", "URL"}
SIZE_BIN, NUM_SIZE_BINS = 64, 33  # pixels of the shorter side; the last bin is open: 2048 and more
SCORE_BIN, NUM_SCORE_BINS = 0.25, 41  # aesthetic score; the last bin is open: 10 and more


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
    judge: Callable[..., pa.BooleanArray]
    """Of its columns: which rows pass; null where a row has no value to judge."""

    @property
    def counters(self) -> tuple[str, str]:
        """Under which names the rows are counted that it dropped: by their value, and for want of one."""
        return f"{self.name} by_value", f"{self.name} no_value"


def apply(rules: Sequence[Rule], batch: pa.RecordBatch, counts: Counter[str]) -> pa.RecordBatch:
    """The rows of `batch` (columns under our names) that pass every rule; the others are added to `counts`.

    Numbers are judged on the whole batch, texts only on the rows that are left: they cost a hundred times as much.
    """
    left = _all(batch)
    for rule in rules:
        if left.false_count and not TEXTS.isdisjoint(rule.columns):
            batch = batch.filter(left)
            left = _all(batch)
        passes = rule.judge(*(batch[name] for name in rule.columns))
        before, absent = left.true_count, pc.and_(left, passes.is_null()).true_count
        left = pc.and_(left, passes.fill_null(False))
        by_value, no_value = rule.counters
        counts[by_value] += before - absent - left.true_count
        counts[no_value] += absent
    return batch.filter(left) if left.false_count else batch


def _all(batch: pa.RecordBatch) -> pa.BooleanArray:
    return pa.array(np.ones(batch.num_rows, bool))


def build_rules(filters: FiltersConfig, urls: UrlsConfig, opt_out_hosts: list[str]) -> list[Rule]:
    """The rules that are switched on, in the order in which a row meets them."""
    rules: list[Rule] = []
    for name, column, bound, sign in (
        ("aesthetic", "AESTHETIC_SCORE", filters.min_aesthetic, "≥"),
        ("punsafe", "punsafe", filters.max_punsafe, "<"),
        ("pwatermark", "pwatermark", filters.max_pwatermark, "<"),
        ("similarity", "similarity", filters.min_similarity, "≥"),
    ):
        if bound is not None:
            option = f"filters.{'min' if sign == '≥' else 'max'}_{name}"
            # numpy compares in the column's own precision: a float32 0.7 is not below 0.7
            passes = partial(operator.le if sign == "≥" else operator.gt, bound)
            rules.append(Rule(name, f"{column} {sign} {bound:g}", (column,), option, _of_numbers(passes)))
    sides = ("WIDTH", "HEIGHT")
    if (side := filters.min_side) is not None:
        judge = _of_numbers(lambda w, h: np.minimum(w, h) >= side)
        rules.append(Rule("min_side", f"shorter side ≥ {side} px", sides, "filters.min_side", judge))
    if (ratio := filters.max_aspect_ratio) is not None:
        condition = f"longer ÷ shorter side ≤ {ratio:g}"
        judge = _of_numbers(lambda w, h: (np.minimum(w, h) > 0) & (np.maximum(w, h) <= ratio * np.minimum(w, h)))
        rules.append(Rule("aspect_ratio", condition, sides, "filters.max_aspect_ratio", judge))
    return rules + _text_rules(filters, urls, opt_out_hosts)


def _text_rules(filters: FiltersConfig, urls: UrlsConfig, opt_out_hosts: list[str]) -> list[Rule]:
    rules = []
    if (languages := filters.languages) is not None:
        listed = pa.array(languages, pa.string())
        judge = _of_texts(lambda texts: np.asarray(pc.is_in(texts, listed)))
        rules.append(Rule("language", f"LANGUAGE in {', '.join(languages)}", ("LANGUAGE",), "filters.languages", judge))
    low, high = filters.min_caption, filters.max_caption
    if low is not None or high is not None:
        bounds = (low or 0, high if high is not None else 2**31)
        condition = f"caption of {bounds[0]}{f' to {high}' if high is not None else ' or more'} characters"
        option = "filters.min_caption and filters.max_caption"
        judge = _of_texts(lambda texts: _length(texts, *bounds))
        rules.append(Rule("caption", condition, ("TEXT",), option, judge))
    rules.append(Rule("url_scheme", "an http or https URL", ("URL",), "", _of_texts(are_http)))
    if not urls.allow_private_hosts:
        option = "urls.allow_private_hosts"
        judge = _of_texts(lambda texts: ~are_private(texts))
        rules.append(Rule("url_host", "a host that is not private", ("URL",), option, judge))
    if opt_out_hosts:
        hosts = frozenset(opt_out_hosts)
        judge = _of_texts(lambda texts: ~is_listed(texts, hosts))
        rules.append(Rule("opt_out_host", "host not in the opt-out file", ("URL",), "urls.opt_out", judge))
    return rules


def _of_numbers(passes: Callable[..., np.ndarray]) -> Callable[..., pa.BooleanArray]:
    """A judge of numbers, from one of arrays, where null and NaN are NaN: no value."""

    def judge(*columns: pa.Array) -> pa.BooleanArray:
        arrays = [np.asarray(column) for column in columns]
        return pa.array(passes(*arrays), mask=reduce(np.logical_or, (array != array for array in arrays)))

    return judge


def _of_texts(passes: Callable[[pa.Array], np.ndarray]) -> Callable[..., pa.BooleanArray]:
    """A judge of texts, from one of whole UTF-8 without nulls: what is none is no value."""

    def judge(texts: pa.Array) -> pa.BooleanArray:
        absent = _is_unreadable(texts)
        readable = pc.if_else(pa.array(absent), "", texts) if absent.any() else texts
        return pa.array(passes(readable), mask=absent)

    return judge


def _length(texts: pa.Array, low: int, high: int) -> np.ndarray:
    lengths = np.asarray(pc.utf8_length(pc.utf8_trim_whitespace(texts)))
    return (lengths >= low) & (lengths <= high)


def _is_unreadable(texts: pa.Array) -> np.ndarray:
    """Null, or bytes that are not UTF-8 (parquet does not check them)."""
    absent = np.asarray(texts.is_null())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        values = texts.cast(pa.binary()).to_pylist()
        return absent | np.array([bool(data) and data.decode(errors="ignore").encode() != data for data in values])
    return absent


def tally(batch: pa.RecordBatch | pa.Table, buckets: Sequence[str]) -> Counter[str]:
    """Of the rows of `batch`, whose columns are under our names: all as `rows`, those in the third bin of sizes as
    `size 2`, of scores as `score 2`, and those large enough for a bucket under its name."""
    counts = Counter(rows=batch.num_rows)
    if {"WIDTH", "HEIGHT"} <= set(batch.schema.names):
        width, height = np.asarray(batch["WIDTH"]), np.asarray(batch["HEIGHT"])
        counts += _binned("size", np.minimum(width, height), SIZE_BIN, NUM_SIZE_BINS)
        for bucket in map(Bucket.parse, buckets):
            counts[str(bucket)] = int(np.count_nonzero((width >= bucket.width) & (height >= bucket.height)))
    if "AESTHETIC_SCORE" in batch.schema.names:
        counts += _binned("score", np.asarray(batch["AESTHETIC_SCORE"]), SCORE_BIN, NUM_SCORE_BINS)
    return counts


def _binned(name: str, values: np.ndarray, width: float, num_bins: int) -> Counter[str]:
    """Counts of floor(value ÷ width), everything past the last bin in the last; NaN and negatives are left out."""
    values = values[values >= 0]
    bins = np.bincount(np.minimum(values / width, num_bins - 1).astype(np.int64))
    return Counter({f"{name} {number}": count for number, count in enumerate(bins.tolist())})
