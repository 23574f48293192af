"""Counts of rows at the edges of histogram bins."""

import pyarrow as pa

from precompute.select.rules import tally
from tests.precompute.select import laion

NAN = float("nan")


def test_each_value_is_in_its_bin() -> None:
    sides = [0, 63, 64, 2047, 2048, 10**6, -1, None]
    scores = [0.0, 0.24, 0.25, 9.99, 10.0, 99.0, -0.1, NAN]
    table = laion.rows(8, WIDTH=sides, HEIGHT=[10**6] * 8, AESTHETIC_SCORE=scores)
    expected = {"rows": 8, "size 0": 2, "size 1": 1, "size 31": 1, "size 32": 2}
    expected |= {"score 0": 2, "score 1": 1, "score 39": 1, "score 40": 2, "2048x2048": 2, "64x64": 4}
    for rows in (table, table.to_batches()[0]):
        found = tally(rows, ["2048x2048", "64x64"])
        assert {name: count for name, count in found.items() if count} == expected


def test_columns_that_are_not_there_are_not_counted() -> None:
    table = laion.rows(2).drop_columns(["WIDTH", "AESTHETIC_SCORE"])
    assert tally(table, ["64x64"]) == {"rows": 2}
    assert tally(pa.table({"AESTHETIC_SCORE": [1.0]}), []) == {"rows": 1, "score 4": 1}
