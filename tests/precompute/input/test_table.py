"""Tables with a row per sample: lookups in any order, and tables that cannot be used."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.input.captions import read_captions
from precompute.input.table import TableConfig, load_table, open_parquet, with_tables
from precompute.input.unit import RawSample
from shards.base.errors import UnfitNode
from tests.tiny import table_of


def test_captions_and_numbers_of_any_type(tmp_path: Path) -> None:
    path = tmp_path / "values.parquet"
    columns = {
        "id": pa.array(["a", "b"], pa.string_view()),
        "long": ["one", None],
        "short": pa.array(["two", "three"]).dictionary_encode(),
        "score": pa.array([0.5, None], pa.float32()),
        "rank": pa.array([2**60 + 1, 3]),
        "good": [True, False],
    }
    pq.write_table(pa.table(columns), path, row_group_size=1)
    config = TableConfig(str(path), "id", ("long", "short"), ("score", "rank", "good"), "")
    found = Counter[str]()
    samples = list(with_tables(map(RawSample, ["b", "absent", "a"]), [config], found))
    assert [sample.tables for sample in samples] == [
        {"long": None, "short": "three", "score": None, "rank": 3.0, "good": 0.0},
        dict.fromkeys(config.columns),
        {"long": "one", "short": "two", "score": 0.5, "rank": 2.0**60, "good": 1.0},
    ]
    assert found == {"long": 1, "short": 2, "score": 1, "rank": 2, "good": 2}


def test_lookups_in_any_order_and_with_a_small_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.input.table.CACHE_BYTES", 1)
    rng = np.random.default_rng(0)
    rows: dict[str, str | None] = {f"key {number}": f"text {number}" for number in range(500)} | {"null": None}
    names = list(rows)
    rng.shuffle(names)
    path = table_of(tmp_path / "captions.parquet", {name: rows[name] for name in names}, row_group_size=7)
    config = TableConfig(str(path), "key", ("vlm",), (), "")
    wanted = [*rows, "absent", "ключ"]
    rng.shuffle(wanted)
    found = list(with_tables((RawSample(key) for key in wanted), [config]))
    assert [sample.key for sample in found] == wanted
    assert [sample.tables.get("vlm") for sample in found] == [rows.get(key) for key in wanted]
    assert Counter(sample.tables.get("vlm") for sample in found)[None] == 3
    assert len(load_table(config).cache) == 1


def test_a_worker_refuses_a_table_that_is_not_the_drivers(tmp_path: Path) -> None:
    path = table_of(tmp_path / "captions.parquet", {"a": "x"})
    with pytest.raises(UnfitNode, match="differs from the driver's file"):
        load_table(TableConfig(str(path), "key", ("vlm",), (), 64 * "0"))


def test_threads_load_a_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table_of(tmp_path / "captions.parquet", {"a": "x"})
    opened: list[TableConfig] = []

    def slow(config: TableConfig) -> pq.ParquetFile:
        opened.append(config)
        time.sleep(0.1)
        return open_parquet(config)

    monkeypatch.setattr("precompute.input.table.open_parquet", slow)
    config = TableConfig(str(path), "key", ("vlm",), (), "")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(load_table, [config, config])
    assert first is second and opened == [config]


NOT_UTF_8 = pa.array([b"caf\xe9"]).view(pa.string())


@pytest.mark.parametrize(
    "column", [NOT_UTF_8, pa.DictionaryArray.from_arrays([0], NOT_UTF_8)], ids=["text", "dictionary"]
)
def test_texts_that_are_not_utf8_are_cleaned_like_others(column: pa.Array, tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"key": ["a"], "vlm": column}), path)
    (sample,) = with_tables([RawSample("a")], [TableConfig(str(path), "key", ("vlm",), (), "")])
    (caption,) = read_captions(sample, ["table:vlm"], 100)
    assert caption is not None and caption.text == "caf\ufffd" and caption.changes == {"invalid_utf8"}
