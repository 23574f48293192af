"""Assignment of rows to tars, and names of the stored columns."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.download.config import DownloadConfig
from precompute.download.rows import name_columns, plan_download, read_rows
from shards.base.errors import RequestError, WorkError
from tests.precompute.select import laion


def config(source: Path, output: Path, **fields: Any) -> DownloadConfig:
    return DownloadConfig.model_validate({"input": source, "output": output} | fields)


@pytest.mark.parametrize("row_group_size", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("rows_per_shard", [1, 3, 4, 5, 11, 12])
def test_every_row_is_in_one_shard_in_order(tmp_path: Path, row_group_size: int, rows_per_shard: int) -> None:
    laion.write(tmp_path / "in" / "a.parquet", laion.rows(11), row_group_size=row_group_size)
    laion.write(tmp_path / "in" / "b.parquet", laion.rows(0, start=11))
    laion.write(tmp_path / "in" / "c.parquet", laion.rows(4, start=11), row_group_size=row_group_size)
    shards = plan_download(config(tmp_path / "in", tmp_path / "out", rows_per_shard=rows_per_shard))
    assert [shard.name for shard in shards] == [f"{i:05d}" for i in range(len(shards))]
    tables = [read_rows(shard, None) for shard in shards]
    assert [table.num_rows for table in tables] == [shard.num_rows for shard in shards]
    assert max(shard.num_rows for shard in shards) <= rows_per_shard
    urls = pa.concat_tables(tables)["url"].to_pylist()
    assert urls == [f"http://example.com/{i}.jpg" for i in range(15)]


def test_names() -> None:
    schema = pa.schema([(n, pa.string()) for n in ("url", "caption", "width", "aesthetic", "key", "md5", "LICENSE")])
    assert name_columns(schema, None, "here") == {
        "width": "WIDTH",
        "aesthetic": "AESTHETIC_SCORE",
        "key": "source_key",
        "md5": "source_md5",
        "LICENSE": "license",
        "caption": "caption",
        "url": "url",
    }
    assert list(name_columns(schema, ["LICENSE", "url"], "here").values()) == ["license", "caption", "url"]


def test_dictionaries_and_large_strings_are_read_as_strings(tmp_path: Path) -> None:
    table = laion.rows(2).set_column(9, "LANGUAGE", pa.array(["en", "de"]).dictionary_encode())
    table = table.set_column(1, "TEXT", pa.array(["a", "b"], pa.large_string())).append_column("NSFW", pa.nulls(2))
    table = table.append_column("views", pa.array(["c", "d"], pa.string_view()))
    laion.write(tmp_path / "a.parquet", table)
    [shard] = plan_download(config(tmp_path / "a.parquet", tmp_path / "out"))
    found = read_rows(shard, None)
    assert found.schema.field("LANGUAGE").type == found.schema.field("caption").type == pa.string()
    assert found.schema.field("views").type == pa.string() and found["views"].to_pylist() == ["c", "d"]
    assert found["LANGUAGE"].to_pylist() == ["en", "de"] and found["NSFW"].to_pylist() == [None, None]


def with_column(name: str, values: Any) -> pa.Table:
    return laion.rows(2).append_column(name, values)


@pytest.mark.parametrize(
    ("table", "fields", "message"),
    [
        (
            laion.rows(2).drop_columns(["TEXT", "URL"]),
            {},
            "a.parquet has no URL and no TEXT column. Its columns are WIDTH",
        ),
        (with_column("url", pa.array(["a", "b"])), {}, "has the columns `URL` and `url`, which are both names for URL"),
        (
            with_column("t", pa.array([0, 1], pa.timestamp("ms"))),
            {},
            r"`t` has type timestamp\[ms\], so it cannot be stored as t",
        ),
        (with_column("l", pa.array([["a"], []])), {}, r"`l` has type list<element: string>.*--extra_columns a,b"),
        (
            laion.rows(2).set_column(0, "URL", pa.array([1, 2])),
            {},
            "the column `URL` has type int64, so it cannot be stored as url",
        ),
        (
            laion.rows(2),
            {"extra_columns": ["WIDTH", "NSFW"]},
            "has no column `NSFW`, which extra_columns names. Its columns are URL, TEXT",
        ),
        (
            with_column("md5", pa.array([1, 2])).append_column("source_md5", pa.array([1, 2])),
            {},
            "two columns would be stored as `source_md5`",
        ),
        (laion.rows(0), {}, "a.parquet contains no rows, so there is nothing to download"),
        (
            laion.rows(1).take([0] * 100_001),
            {"rows_per_shard": 1},
            "needs 100001 tars with rows_per_shard = 1, but the limit is 100000",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, table: pa.Table, fields: dict, message: str
) -> None:
    laion.write(tmp_path / "a.parquet", table)
    with pytest.raises(RequestError, match=message):
        plan_download(config(tmp_path / "a.parquet", tmp_path / "out", **fields))
    assert not (tmp_path / "out").exists()


def test_bad_places(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="There is no file or folder"):
        plan_download(config(tmp_path / "nowhere", tmp_path / "out"))
    (tmp_path / "in").mkdir()
    with pytest.raises(RequestError, match=r"contains no \*.parquet file"):
        plan_download(config(tmp_path / "in", tmp_path / "out"))
    (tmp_path / "in" / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(RequestError, match=r"a.parquet cannot be read as parquet: .* Replace or remove the file"):
        plan_download(config(tmp_path / "in", tmp_path / "out"))
    (tmp_path / "in" / ".work").mkdir()
    with pytest.raises(RequestError, match=r"is not finished. Run `precompute.select` to completion first"):
        plan_download(config(tmp_path / "in", tmp_path / "out"))


def test_an_output_keeps_the_rows_it_was_started_with(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    laion.write(source / "a.parquet", laion.rows(5))
    before = plan_download(config(source, output, rows_per_shard=2))

    laion.write(source / "b.parquet", laion.rows(3, start=5))
    assert plan_download(config(source, output, rows_per_shard=2))[:3] == before
    with pytest.raises(
        RequestError, match=r"was started with rows_per_shard = 2, but rows_per_shard is now 3\. All its tars must"
    ):
        plan_download(config(source, output, rows_per_shard=3))
    with pytest.raises(
        RequestError, match=r"was started with images = {.*original.*}, but images is now {.*keep_ratio_largest"
    ):
        plan_download(config(source, output, rows_per_shard=2, images={"mode": "keep_ratio_largest"}))

    laion.write(source / "a.parquet", laion.rows(5, start=100))
    with pytest.raises(
        RequestError,
        match=r"started with a.parquet \(5 rows\) as input file 0, but input file 0 is now a.parquet with 5 rows \(the",
    ):
        plan_download(config(source, output, rows_per_shard=2))
    (source / "b.parquet").unlink()
    laion.write(source / "a.parquet", laion.rows(5))
    with pytest.raises(
        RequestError, match=r"started with b.parquet \(3 rows\) as input file 1, but input file 1 is now missing"
    ):
        plan_download(config(source, output, rows_per_shard=2))

    (output / "download_plan.json").write_text("{}")
    with pytest.raises(RequestError, match=r"download_plan.json is damaged.* rows of the existing tars are unknown"):
        plan_download(config(source, output, rows_per_shard=2))


def test_damaged_rows_are_reported(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff"], pa.binary()).buffers())
    laion.write(tmp_path / "a.parquet", laion.rows(2).set_column(1, "TEXT", broken))
    [shard] = plan_download(config(tmp_path / "a.parquet", tmp_path / "out"))
    with pytest.raises(WorkError, match=r"a.parquet cannot be read at rows 0 to 2: .*Invalid UTF8"):
        read_rows(shard, None)


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    laion.write(tmp_path / "in.parquet", laion.rows(1))
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(RequestError, match=r"The output folder .*/out cannot be written .* Choose a writable --output"):
        plan_download(config(tmp_path / "in.parquet", tmp_path / "out"))
