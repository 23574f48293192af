"""Filters on stored scores: rules, counts, and runs that train on exactly the samples that pass."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from bench.kit.roots import make_root
from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from tests.roots import part_of
from tests.tiny import flip_a_bit
from tests.train.global_batches import keys_per_step
from train.config import DataConfig
from train.data.selection import FilterConfig, Range, column_rules, count_by_file
from train.data.streams import open_data

NAN = float("nan")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with 64x64 in 5 parts of 13 to 29 samples; every seventh sample has no scores."""
    return make_root(tmp_path_factory.mktemp("scored") / "root", {"64x64": [13, 29, 17, 23, 19]}, missing_every=7)


def data_config(root: Path, **fields: Any) -> DataConfig:
    stream = {"root": str(root), "bucket": "64x64", "weight": fields.pop("weight", 1.0)}
    common = {"num_workers": 0, "num_canonical_nodes": 4, "shuffle_block": 16, "timeout": 60}
    return DataConfig.model_validate({"streams": [stream], **common, **fields})


def rows(root: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(root.glob("64x64/*/samples.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize(
    ("bound", "missing", "passes"),
    [
        (Range(min=0.5), "drop", [False, True, True, False]),
        (Range(max=0.5), "drop", [True, True, False, False]),
        (Range(min=0.5, max=0.5), "drop", [False, True, False, False]),
        (Range(min=0.5), "keep", [False, True, True, True]),
        (Range(min=0.25, max=0.5), "keep", [True, True, False, True]),
    ],
)
def test_bounds_are_inclusive_and_nan_has_its_own_rule(bound: Range, missing: str, passes: list[bool]) -> None:
    values = np.array([0.25, 0.5, 0.75, NAN], np.float32)
    rules = [rule for rule, _ in column_rules("score", values, bound, missing)]
    assert np.logical_and.reduce(rules).tolist() == passes


def test_bounds_are_compared_in_float32() -> None:
    """0.1 is not exact in float32, but a stored 0.1 equals the bound 0.1."""
    ((passes, rule),) = column_rules("punsafe", np.array([0.1], np.float32), Range(max=0.1), "keep")
    assert passes.all() and rule == "punsafe ≤ 0.1"


@pytest.mark.parametrize("fields", [{}, {"min": 2.0, "max": 1.0}])
def test_empty_and_reversed_bounds_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"set min, max or both|min 2 is greater than max 1"):
        Range(**fields)


FILTERS = [
    {"aesthetic": {"min": 5.0}, "missing": "drop"},
    {"aesthetic": {"min": 5.0}, "punsafe": {"max": 0.5}, "missing": "keep"},
    {"width": {"min": 100}, "height": {"max": 180}},
]


def expected_keys(root: Path, config: dict[str, Any]) -> set[str]:
    """Apply the filter sample by sample."""
    keys = set()
    for row in rows(root):
        passes = True
        for column, bound in config.items():
            if column == "missing":
                continue
            value = row[column]
            if value != value:
                passes &= config["missing"] == "keep"
            else:
                passes &= bound.get("min", -np.inf) <= value <= bound.get("max", np.inf)
        if passes:
            keys.add(row["key"])
    return keys


@pytest.mark.parametrize("weight", [1.0, 2.0])
@pytest.mark.parametrize("config", FILTERS, ids=["drop", "keep", "sizes"])
def test_a_run_trains_on_exactly_the_samples_that_pass(root: Path, config: dict[str, Any], weight: float) -> None:
    data = data_config(root, filter=config, weight=weight)
    spec = open_data(data, 8)
    expected = expected_keys(root, config)
    assert 8 < len(expected) < len(rows(root)) and spec.streams[0].num_samples == len(expected)
    seen: set[str] = set()
    for epoch in range(4):
        steps = keys_per_step(data, spec, epoch * spec.steps_per_epoch, spec.steps_per_epoch)
        counts = Counter(key for keys in steps for key in keys)
        assert set(counts) <= expected and max(counts.values()) == weight
        assert counts.total() == len(expected) * weight // 8 * 8  # rounded down to whole global batches
        seen |= set(counts)
    assert seen == expected


def test_a_streams_filter_replaces_the_common_one(root: Path) -> None:
    data = data_config(root, filter=FILTERS[0])
    own = data.streams[0].model_copy(update={"filter": FilterConfig(width=Range(min=1))})
    spec = open_data(data.model_copy(update={"streams": [own]}), 8)
    assert spec.streams[0].num_samples == len(rows(root))


def test_counts_by_file() -> None:
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 4, 50)
    samples[[0, 7, 8, 49]] = 0  # empty files
    passing = rng.random(samples.sum()) < 0.5
    ends = samples.cumsum()
    expected = [int(passing[end - n : end].sum()) for end, n in zip(ends, samples, strict=True)]
    assert count_by_file(passing, samples).tolist() == expected


def test_a_filter_that_leaves_too_few_samples_is_refused_with_counts(root: Path) -> None:
    with pytest.raises(RequestError, match=r"has 101 samples, of which 0 remain\. Samples that fail, by") as caught:
        open_data(data_config(root, filter={"aesthetic": {"min": 50.0}}), 8)
    missing = sum(row["aesthetic"] != row["aesthetic"] for row in rows(root))
    assert f"aesthetic missing ({missing}), aesthetic ≥ 50 ({101 - missing})." in str(caught.value)
    assert "loosen the filter" in str(caught.value)


def test_parts_are_read_in_blocks_that_may_end_within_a_byte(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = open_data(data_config(root, filter=FILTERS[0]), 8).streams[0].selection
    monkeypatch.setattr("train.data.selection.PARTS_AT_ONCE", 2)  # 42, 40 and 19 samples
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a machine that has not read the tables yet
    in_blocks = open_data(data_config(root, filter=FILTERS[0]), 8).streams[0].selection
    assert at_once is not None and in_blocks is not None
    assert in_blocks.sha256 == at_once.sha256
    assert in_blocks.counts.tolist() == at_once.counts.tolist()


def test_the_selection_is_part_of_the_fingerprint(root: Path) -> None:
    selections = [open_data(data_config(root, filter=config), 8).streams[0].selection for config in FILTERS]
    assert all(selections) and len({each.sha256 for each in selections if each}) == 3
    again = open_data(data_config(root, filter=FILTERS[0]), 8).streams[0].selection
    assert again is not None and selections[0] is not None and again.sha256 == selections[0].sha256


def test_a_flipped_bit_in_a_table_is_found(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a machine that has not read the table yet
    copy = shutil.copytree(root, tmp_path / "root")
    path = part_of(copy, "64x64", "00002") / "samples.parquet"
    flip_a_bit(path)
    with pytest.raises(DamagedFile, match=r"00002\.\w+/samples\.parquet is missing or damaged: its SHA-256"):
        open_data(data_config(copy, filter=FILTERS[0]), 8)
    path.unlink()
    with pytest.raises(DamagedFile, match=r"samples\.parquet is missing"):
        open_data(data_config(copy, filter=FILTERS[0]), 8)
    assert open_data(data_config(copy), 8).uncond  # the table is not read without a filter
