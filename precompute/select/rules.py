"""The rules that each row must pass, in order, and the counts of dropped rows, image sizes and scores."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.select.config import FiltersConfig, UrlsConfig
from precompute.select.datasets import LAION, SPELLINGS, DatasetConfig
from precompute.select.hosts import are_http, are_private
from shards.base.opt_outs import matching_hosts
from shards.format.buckets import Bucket

TEXTS = {"LANGUAGE", "TEXT", "URL"}
SIZE_BIN, NUM_SIZE_BINS = 64, 33  # bin width in pixels of the shorter side; the last bin is open-ended (≥ 2048)
SCORE_BIN, NUM_SCORE_BINS = 0.25, 41  # bin width in aesthetic score; the last bin is open-ended (≥ 10)


@dataclass(frozen=True)
class Rule:
    """A condition that a row must satisfy."""

    name: str
    condition: str
    """Human-readable condition, including its threshold."""
    columns: tuple[str, ...]
    """Canonical names of the columns that the rule reads."""
    predicate: Callable[..., pa.BooleanArray]
    """Function that takes these columns and returns a mask of the rows that pass, with null for rows without a
    value."""
    option: str = ""
    """Config field that disables the rule if it is null; empty if there is none."""

    @property
    def counters(self) -> tuple[str, str]:
        """Names of the counters for rows dropped because of their value, and for rows dropped for lack of a value."""
        return f"{self.name} by_value", f"{self.name} no_value"


def apply(rules: Sequence[Rule], batch: pa.RecordBatch, counts: Counter[str]) -> pa.RecordBatch:
    """Return the rows of `batch` that pass every rule, and count the dropped rows in `counts`. `batch` must have
    canonical column names.

    Numeric rules run on the whole batch. Text rules, which cost a hundred times as much, run only on the rows that are
    still left.
    """
    left = _all(batch)
    for rule in rules:
        if left.false_count and not TEXTS.isdisjoint(rule.columns):
            batch = batch.filter(left)
            left = _all(batch)
        passes = rule.predicate(*(batch[name] for name in rule.columns))
        before, absent = left.true_count, pc.and_(left, passes.is_null()).true_count
        left = pc.and_(left, passes.fill_null(False))
        by_value, no_value = rule.counters
        counts[by_value] += before - absent - left.true_count
        counts[no_value] += absent
    return batch.filter(left) if left.false_count else batch


def _all(batch: pa.RecordBatch) -> pa.BooleanArray:
    return pa.array(np.ones(batch.num_rows, bool))


def build_rules(
    filters: FiltersConfig, urls: UrlsConfig, opt_out_hosts: list[str], dataset: DatasetConfig = LAION
) -> list[Rule]:
    """Return the enabled rules, in the order in which they are applied. Conditions quote the dataset's own names for
    its columns."""
    rules: list[Rule] = []
    for name, column, bound, sign in (
        ("aesthetic", "AESTHETIC_SCORE", filters.min_aesthetic, "≥"),
        ("punsafe", "punsafe", filters.max_punsafe, "<"),
        ("pwatermark", "pwatermark", filters.max_pwatermark, "<"),
        ("similarity", "similarity", filters.min_similarity, "≥"),
    ):
        if bound is not None:
            option = f"filters.{'min' if sign == '≥' else 'max'}_{name}"
            # numpy compares in the column's own precision: a float32 0.7 is not below a bound of 0.7
            passes = partial(operator.le if sign == "≥" else operator.gt, bound)
            condition = f"{dataset.columns.get(column, column)} {sign} {bound:g}"
            rules.append(Rule(name, condition, (column,), _numeric_predicate(passes), option))
    canonical = SPELLINGS | {spelling: column for column, spelling in dataset.columns.items()}
    for name, limits in filters.scores.items():
        if limits is None:
            continue
        for compare, limit, text in limits.rules:
            predicate = _numeric_predicate(partial(_within, compare, limit))
            column = canonical.get(name, name)
            rule = f"scores.{name}.{'min' if compare is np.greater_equal else 'max'}"
            rules.append(Rule(rule, f"{name} {text}", (column,), predicate, f"filters.scores.{name}"))
    sides = ("WIDTH", "HEIGHT")
    if (side := filters.min_side) is not None:
        predicate = _numeric_predicate(lambda w, h: np.minimum(w, h) >= side)
        rules.append(Rule("min_side", f"shorter side ≥ {side} px", sides, predicate, "filters.min_side"))
    if (ratio := filters.max_aspect_ratio) is not None:
        condition = f"longer ÷ shorter side ≤ {ratio:g}"
        predicate = _numeric_predicate(
            lambda w, h: (np.minimum(w, h) > 0) & (np.maximum(w, h) <= ratio * np.minimum(w, h))
        )
        rules.append(Rule("aspect_ratio", condition, sides, predicate, "filters.max_aspect_ratio"))
    return rules + _text_rules(filters, urls, opt_out_hosts)


def _within(compare: np.ufunc, limit: float, values: np.ndarray) -> np.ndarray:
    return np.asarray(compare(values, limit))


def _text_rules(filters: FiltersConfig, urls: UrlsConfig, opt_out_hosts: list[str]) -> list[Rule]:
    rules = []
    if (languages := filters.languages) is not None:
        listed = pa.array(languages, pa.string())
        predicate = _text_predicate(lambda texts: np.asarray(pc.is_in(texts, listed)))
        rules.append(
            Rule("language", f"LANGUAGE in {', '.join(languages)}", ("LANGUAGE",), predicate, "filters.languages")
        )
    low, high = filters.min_caption, filters.max_caption
    if low is not None or high is not None:
        bounds = (low or 0, high if high is not None else 2**31)
        condition = f"caption of {bounds[0]}{f' to {high}' if high is not None else ' or more'} characters"
        option = "filters.min_caption and filters.max_caption"
        predicate = _text_predicate(lambda texts: _length(texts, *bounds))
        rules.append(Rule("caption", condition, ("TEXT",), predicate, option))
    rules.append(Rule("url_scheme", "an http or https URL", ("URL",), _text_predicate(are_http)))
    if not urls.allow_private_hosts:
        predicate = _text_predicate(lambda texts: ~are_private(texts))
        rules.append(Rule("url_host", "a host that is not private", ("URL",), predicate))
    if opt_out_hosts:
        hosts = frozenset(opt_out_hosts)
        predicate = _text_predicate(lambda texts: np.asarray(matching_hosts(texts, hosts).is_null()))
        rules.append(Rule("opt_out_host", "host not in the opt-out file", ("URL",), predicate))
    return rules


def _numeric_predicate(passes: Callable[..., np.ndarray]) -> Callable[..., pa.BooleanArray]:
    """Turn a predicate on NumPy arrays into a predicate on Arrow arrays that returns null for null and NaN."""

    def predicate(*columns: pa.Array) -> pa.BooleanArray:
        arrays = [
            np.asarray(column.cast(pa.float32()) if pa.types.is_null(column.type) else column) for column in columns
        ]
        return pa.array(passes(*arrays), mask=reduce(np.logical_or, (array != array for array in arrays)))

    return predicate


def _text_predicate(passes: Callable[[pa.Array], np.ndarray]) -> Callable[..., pa.BooleanArray]:
    """Turn a predicate on valid UTF-8 without nulls into a predicate on any text that returns null for nulls and
    invalid UTF-8."""

    def predicate(texts: pa.Array) -> pa.BooleanArray:
        absent = is_unreadable(texts)
        readable = pc.if_else(pa.array(absent), "", texts) if absent.any() else texts
        return pa.array(passes(readable), mask=absent)

    return predicate


def _length(texts: pa.Array, low: int, high: int) -> np.ndarray:
    lengths = np.asarray(pc.utf8_length(pc.utf8_trim_whitespace(texts)))
    return (lengths >= low) & (lengths <= high)


def is_unreadable(texts: pa.Array) -> np.ndarray:
    """Return a mask of the values that are null or invalid UTF-8, which parquet files may contain."""
    absent = np.asarray(texts.is_null())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        values = texts.cast(pa.binary()).to_pylist()
        return absent | np.array([bool(data) and data.decode(errors="ignore").encode() != data for data in values])
    return absent


def tally(batch: pa.RecordBatch | pa.Table, buckets: Sequence[str]) -> Counter[str]:
    """Count the rows of `batch`, which has canonical column names.

    The keys of the result are `rows` for all rows, `size N` and `score N` for each histogram bin N, and the name of
    each bucket for the rows that are large enough for it.
    """
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
    """Count the values in each bin floor(value ÷ width); the last bin is open-ended. Ignore NaN and negative values."""
    values = values[values >= 0]
    bins = np.bincount(np.minimum(values / width, num_bins - 1).astype(np.int64))
    return Counter({f"{name} {number}": count for number, count in enumerate(bins.tolist())})
