"""Every rule, with rows on both sides of its threshold."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from precompute.select.config import FiltersConfig, UrlsConfig
from precompute.select.rules import apply, build_rules
from tests.precompute.select import laion

NAN = float("nan")
OFF = dict.fromkeys(FiltersConfig.model_fields.keys() - {"scores"})  # every filter null

# rule, its filter, the tested column, values that pass, values that are dropped, missing values
EDGES: list[tuple[str, dict[str, Any], str, list[Any], list[Any], list[Any]]] = [
    ("aesthetic", {"min_aesthetic": 4.5}, "AESTHETIC_SCORE", [4.5, 9.9], [4.4999995, -1.0], [None, NAN]),
    ("punsafe", {"max_punsafe": 0.1}, "punsafe", [0.0999999, 0.0], [0.1, 0.1000001, 1.0], [None, NAN]),
    ("pwatermark", {"max_pwatermark": 0.8}, "pwatermark", [0.7999999], [0.8, 0.8000001], [None, NAN]),
    # 0.7 is 0.699999988 in float32, but still not below 0.7
    ("similarity", {"min_similarity": 0.7}, "similarity", [0.7, 0.7000001], [0.6999999], [None, NAN]),
    ("min_side", {"min_side": 256}, "WIDTH", [256, 4000], [255, 0, -3], [None]),
    ("min_side", {"min_side": 256}, "HEIGHT", [256, 4000], [255, 0], [None]),
    ("aspect_ratio", {"max_aspect_ratio": 2.0}, "WIDTH", [960, 240], [961, 239, 0, -1], [None]),
    ("language", {"languages": ["en", "de"]}, "LANGUAGE", ["en", "de"], ["EN", "e", "", "fr"], [None]),
    ("caption", {"min_caption": 3}, "TEXT", ["abc", " ab c ", "äöü"], ["ab", "  ab  ", "", "äö", "\u3000ab"], [None]),
    ("caption", {"max_caption": 3}, "TEXT", ["abc", "  abc  ", "", "äöü"], ["abcd", "äöüß"], [None]),
]


@pytest.mark.parametrize(("rule", "filters", "column", "stay", "go", "absent"), EDGES)
def test_edges(rule: str, filters: dict, column: str, stay: list, go: list, absent: list) -> None:
    values = [*go, *stay, *absent]
    batch = laion.rows(len(values), start=0, **{column: values}).to_batches()[0]
    rules = build_rules(FiltersConfig.model_validate(OFF | filters), UrlsConfig(), [])
    dropped: Counter[str] = Counter()
    kept = apply(rules, batch, dropped)
    assert kept.column("URL").to_pylist() == batch.column("URL").to_pylist()[len(go) : len(go) + len(stay)]
    assert dropped == Counter({f"{rule} by_value": len(go), f"{rule} no_value": len(absent)})


def test_a_row_is_counted_by_the_first_rule_that_drops_it() -> None:
    # all four fail punsafe, two of them for lack of a value; the first fails aesthetic before, the second has no score
    columns = {"AESTHETIC_SCORE": [1.0, None, 6.0, 6.0, 6.0], "punsafe": [0.5, None, 0.5, None, 0.0]}
    batch = laion.rows(5, start=0, **columns).to_batches()[0]
    rules = build_rules(FiltersConfig(), UrlsConfig(), [])
    dropped: Counter[str] = Counter()
    assert apply(rules, batch, dropped).num_rows == 1
    each = ("aesthetic by_value", "aesthetic no_value", "punsafe by_value", "punsafe no_value")
    assert dropped == Counter(dict.fromkeys(each, 1))


def test_a_picture_without_sides_has_no_ratio() -> None:
    batch = laion.rows(3, WIDTH=[0, -2, 2], HEIGHT=[0, -2, 2]).to_batches()[0]
    rules = build_rules(FiltersConfig.model_validate(OFF | {"max_aspect_ratio": 2.0}), UrlsConfig(), [])
    assert apply(rules, batch, Counter()).column("WIDTH").to_pylist() == [2]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_thresholds_hold_in_the_columns_own_precision(kind: pa.DataType) -> None:
    batch = laion.rows(1).to_batches()[0]
    index = batch.schema.get_field_index("similarity")
    batch = batch.set_column(index, "similarity", pa.array([0.7], kind))
    rules = build_rules(FiltersConfig.model_validate(OFF | {"min_similarity": 0.7}), UrlsConfig(), [])
    assert apply(rules, batch, Counter()).num_rows == 1


def test_text_that_is_not_utf8_counts_as_none() -> None:
    broken = pa.array([b"ok", b"\xff\xfe", None], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, broken.buffers())
    batch = laion.rows(3).to_batches()[0].set_column(1, "TEXT", text)
    rules = build_rules(FiltersConfig(), UrlsConfig(), [])
    dropped: Counter[str] = Counter()
    assert apply(rules, batch, dropped).column("TEXT").to_pylist() == ["ok"]
    assert dropped == Counter({"caption no_value": 2})


def test_rules_that_are_off_are_not_built() -> None:
    rules = build_rules(FiltersConfig.model_validate(OFF), UrlsConfig(allow_private_hosts=True), [])
    assert [rule.name for rule in rules] == ["url_scheme"]
