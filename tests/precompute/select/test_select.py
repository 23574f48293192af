"""The whole selection: its funnel adds up, its outputs appear atomically, and it resumes after a stop."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.download.config import DownloadConfig
from precompute.download.rows import plan_download, read_rows
from precompute.select import job, passes
from precompute.select.__main__ import run
from precompute.select.funnel import describe, draw_funnel
from precompute.select.job import select
from precompute.select.metadata import MetadataFile
from shards.base.errors import Outage, RequestError, WorkError
from tests.precompute.select import laion

pytestmark = pytest.mark.usefixtures("no_plot")


def read(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet")))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def expected_rows() -> list[int]:
    seen, kept = set(), []
    for i in range(900):
        if i % 10 and i % 7 and i % 750 not in seen:
            seen.add(i % 750)
            kept.append(i)
    return kept


def test_the_numbers_add_up_to_the_row(metadata: Path, tmp_path: Path) -> None:
    funnel = select(laion.config(metadata, tmp_path / "out", rows_per_file=200))
    table = read(tmp_path / "out")
    assert table["TEXT"].to_pylist() == [f"row {i}" for i in expected_rows()]
    steps = {step["rule"]: step for step in funnel["rules"]}
    assert funnel["rows_in"] == 900 and steps["punsafe"]["by_value"] == 90
    assert steps["min_side"]["by_value"] == sum(1 for i in range(900) if i % 10 and i % 7 == 0)
    assert (
        900 - sum(step["by_value"] + step["no_value"] for step in funnel["rules"]) == funnel["rows_out"] == len(table)
    )
    assert [step["left"] for step in funnel["rules"]][-1] == funnel["rows_out"]
    sizes = [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert sizes == [200] * (len(sizes) - 1) + [len(table) - 200 * (len(sizes) - 1)]
    assert [item["rows"] for item in funnel["outputs"]] == sizes
    stored = json.loads((tmp_path / "out" / "funnel.json").read_text())
    assert stored["rules"] == funnel["rules"]
    assert not (tmp_path / "out" / ".work").exists()


def test_buckets_and_histograms(tmp_path: Path) -> None:
    sides = [256, 511, 512, 2047, 2048, 9000]
    table = laion.rows(6, WIDTH=sides, HEIGHT=[9000] * 6, AESTHETIC_SCORE=[4.5, 4.74, 4.75, 9.99, 10.0, 12.0])
    laion.write(tmp_path / "in.parquet", table)
    funnel = select(laion.config(tmp_path / "in.parquet", tmp_path / "out", buckets=["256x256", "512x512", "576x448"]))
    assert funnel["buckets"] == {"256x256": 6, "512x512": 4, "576x448": 3}
    shown = {i * 64: count for i, count in enumerate(funnel["shorter_side"]["out"]) if count}
    assert shown == {256: 1, 448: 1, 512: 1, 1984: 1, 2048: 2}
    scores = {i * 0.25: count for i, count in enumerate(funnel["aesthetic"]["out"]) if count}
    assert scores == {4.5: 2, 4.75: 1, 9.75: 1, 10.0: 2}


def test_processes_and_partitions_change_no_byte(metadata: Path, tmp_path: Path, forked: None) -> None:
    select(laion.config(metadata, tmp_path / "one", rows_per_file=200))
    select(laion.config(metadata, tmp_path / "two", rows_per_file=200, processes=2, partition_rows=100))
    one, two = snapshot(tmp_path / "one"), snapshot(tmp_path / "two")
    assert one == two


def test_a_selection_below_its_metadata_does_not_read_itself(tmp_path: Path) -> None:
    folder = tmp_path / "in [1]"
    laion.write(folder / "a.parquet", laion.rows(6))
    work = folder / "out" / ".work" / "0"
    work.mkdir(parents=True)
    (work / "rows.parquet").write_bytes(b"PAR1")  # of a selection that was killed
    assert select(laion.config(folder, folder / "out"))["rows_in"] == 6
    assert select(laion.config(folder, folder / "out"))["rows_in"] == 6  # the finished one


class Killed(BaseException):
    """Stand-in for SIGKILL or a power cut."""


def test_stopped_anywhere_it_resumes_with_the_same_result(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut also loses the content of files that were not flushed."""
    options = {"rows_per_file": 200, "partition_rows": 450}
    select(laion.config(metadata, tmp_path / "whole", **options))
    left = 0
    flushed = set()
    original_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        original_fsync(descriptor)

    def die_in_time(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return function(*args, **kwargs)

        return wrapped

    for calls in (1, 2, 3, 4, 5, 6, 7, 8, 12):
        config, left = laion.config(metadata, tmp_path / f"out-{calls}", **options), calls
        flushed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            for module in (passes, job):
                for name in ("fsync_tree", "write_atomically"):
                    patch.setattr(module, name, die_in_time(getattr(module, name)))
            try:
                select(config)
            except Killed:
                assert not (config.output / "funnel.json").exists()
                for path in config.output.rglob("*"):
                    if path.is_file() and path.stat().st_ino not in flushed:
                        path.write_bytes(b"")
        select(config)
        assert snapshot(config.output) == snapshot(tmp_path / "whole"), calls


def test_text_that_is_not_utf8_is_stored_as_null(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"cc0", b"\xff\xfe"], pa.binary()).buffers())
    table = laion.rows(2).append_column("license", broken).append_column("note", broken)
    laion.write(tmp_path / "in.parquet", table)
    select(laion.config(tmp_path / "in.parquet", tmp_path / "out", dataset={"keep": ["note"]}))
    [tar] = plan_download(DownloadConfig(input=tmp_path / "out", output=tmp_path / "tars"))
    rows = read_rows(tar, None)
    assert rows["license"].to_pylist() == rows["note"].to_pylist() == ["cc0", None]


def test_finished_files_are_not_filtered_again(metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = laion.config(metadata, tmp_path / "out")
    good = (metadata / "part-2.parquet").read_bytes()
    (metadata / "part-2.parquet").write_bytes(good[:100] + b"\0" * 1500 + good[1600:])
    with pytest.raises(WorkError, match=r"part-2.parquet cannot be read after row 0 of 300"):
        select(config)
    (metadata / "part-2.parquet").write_bytes(good)
    read_again = []
    original = passes.read_batches

    def observed(source: MetadataFile) -> Iterator[pa.RecordBatch]:
        read_again.append(source.name)
        return original(source)

    monkeypatch.setattr(passes, "read_batches", observed)
    select(config)
    assert read_again == ["part-2.parquet"]


def test_a_second_run_does_nothing_and_another_request_is_refused(metadata: Path, tmp_path: Path) -> None:
    select(laion.config(metadata, tmp_path / "out"))
    before = snapshot(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.suffix}
    select(laion.config(metadata, tmp_path / "out", processes=2))
    with pytest.raises(RequestError, match="holds a finished selection with different metadata or settings"):
        select(laion.config(metadata, tmp_path / "out", filters={"min_side": 512}))
    laion.write(metadata / "part-9.parquet", laion.rows(5, start=2000))
    with pytest.raises(RequestError, match="Choose a different --output, or remove that folder"):
        select(laion.config(metadata, tmp_path / "out"))
    assert snapshot(tmp_path / "out") == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_opt_out_as_parquet_and_duplicates_kept(tmp_path: Path) -> None:
    urls = ["http://a.com/1", "http://a.com/2", "http://a.com/2"]
    laion.write(tmp_path / "in.parquet", laion.rows(3, URL=urls))
    laion.write(tmp_path / "list.parquet", pa.table({"url": ["http://a.com/1", None]}))
    settings = {"opt_out": tmp_path / "list.parquet", "drop_duplicates": False}
    funnel = select(laion.config(tmp_path / "in.parquet", tmp_path / "out", urls=settings))
    assert read(tmp_path / "out")["URL"].to_pylist() == urls[1:]
    assert [step["rule"] for step in funnel["rules"]][-1] == "opt_out"


def test_private_hosts_stay_where_they_are_allowed(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1/1", "http://example.com/1", "ftp://example.com/2"]
    laion.write(tmp_path / "in.parquet", laion.rows(3, URL=urls))
    select(laion.config(tmp_path / "in.parquet", tmp_path / "strict"))
    select(laion.config(tmp_path / "in.parquet", tmp_path / "open", urls={"allow_private_hosts": True}))
    assert read(tmp_path / "strict")["URL"].to_pylist() == urls[1:2]
    assert read(tmp_path / "open")["URL"].to_pylist() == urls[:2]


def test_mixed_schemas_come_out_as_one(tmp_path: Path) -> None:
    laion.write(tmp_path / "in" / "a.parquet", laion.rows(1).drop_columns(["hash", "LANGUAGE", "similarity"]))
    renamed = {"URL": "url", "TEXT": "caption", "WIDTH": "width", "HEIGHT": "height", "AESTHETIC_SCORE": "aesthetic"}
    table = laion.rows(2, start=1).rename_columns([renamed.get(n, n) for n in laion.GOOD])
    table = table.append_column("key", pa.array([71, 72])).append_column("LICENSE", pa.array(["?", "?"]))
    table = table.set_column(2, "width", pa.array([640.0, float("nan")], pa.float64()))
    table = table.set_column(9, "LANGUAGE", pa.array(["en", "en"]).dictionary_encode())
    table = table.set_column(5, "hash", pa.array([2**63 + 1, 2], pa.uint64()))
    laion.write(tmp_path / "in" / "b.parquet", table)
    filters = {"min_side": None}
    select(laion.config(tmp_path / "in", tmp_path / "out", filters=filters))
    found = read(tmp_path / "out").to_pydict()
    assert found["URL"] == [f"http://example.com/{i}.jpg" for i in range(3)]
    assert found["WIDTH"] == [640, 640, None]
    assert found["hash"] == [None, -(2**63) + 1, 2]
    assert found["source_key"] == [None, "71", "72"]
    assert found["LANGUAGE"] == [None, "en", "en"]
    assert found["license"] == [None, "?", "?"]


@pytest.mark.parametrize(
    "widths",
    [
        pa.array([640.0, float("inf"), 1e12, 512.5, float("nan"), None]),
        pa.array([640, 2**31, 10**12, -(2**40), None, None]),
        pa.array([640, 512.5, 512.5, 512.5, 512.5, None], pa.float32()).dictionary_encode(),
    ],
    ids=["float64", "int64", "dictionary"],
)
def test_an_impossible_width_is_no_width(widths: pa.Array, tmp_path: Path) -> None:
    table = laion.rows(6)
    laion.write(tmp_path / "in.parquet", table.set_column(table.schema.get_field_index("WIDTH"), "WIDTH", widths))
    funnel = select(laion.config(tmp_path / "in.parquet", tmp_path / "filtered"))
    (step,) = (step for step in funnel["rules"] if step["rule"] == "min_side")
    assert (step["by_value"], step["no_value"], funnel["rows_out"]) == (0, 5, 1)
    select(laion.config(tmp_path / "in.parquet", tmp_path / "all", filters={"min_side": None}))
    assert read(tmp_path / "all")["WIDTH"].to_pylist() == [640, *[None] * 5]


def test_a_long_row_group_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.select.metadata.BATCH_ROWS", 100)
    monkeypatch.setattr(passes, "GROUP_ROWS", 50)
    laion.write(tmp_path / "in.parquet", laion.rows(1001))
    select(laion.config(tmp_path / "in.parquet", tmp_path / "out", rows_per_file=333))
    assert read(tmp_path / "out")["URL"].to_pylist() == [f"http://example.com/{i}.jpg" for i in range(1001)]
    assert pq.read_metadata(tmp_path / "out" / "selected-00000.parquet").num_row_groups == 7


def test_the_command(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "draw_funnel", draw_funnel)
    arguments = ["--config", "configs/select.yaml", "--metadata", str(metadata), "--output", str(tmp_path / "out")]
    run([*arguments, "--filters.min_side", "100", "--processes", "1"])
    said = capsys.readouterr().out
    assert "shorter side ≥ 100 px" in said and "rows out" in said
    assert read(tmp_path / "out").num_rows == 675
    assert (tmp_path / "out" / "funnel.png").read_bytes().startswith(b"\x89PNG")


def test_only_no_rows_are_0_percent_and_only_all_rows_are_100_percent() -> None:
    left = [20_000, 19_999, 10_000, 1, 0]
    rules = [{"rule": "a", "keeps": "x", "by_value": 0, "no_value": 0, "left": rows} for rows in left]
    lines = describe({"rows_in": 20_000, "rules": rules, "rows_out": 0, "buckets": {}}).splitlines()[2:-1]
    shown = [line.split(maxsplit=4)[4].removesuffix("x").strip() for line in lines]
    assert shown == ["100.0 %", "> 99.9 %", "50.0 %", "< 0.1 %", "0.0 %"]


def test_metadata_on_s3_and_a_glob_give_the_same_rows(s3: str, metadata: Path, tmp_path: Path) -> None:
    fsspec.filesystem("s3").put(f"{metadata}/", f"{s3}/100% ö/", recursive=True)
    select(laion.config(f"{metadata}/part-*.parquet", tmp_path / "near"))
    select(laion.config(f"{s3}/100% ö", tmp_path / "far"))
    near = read(tmp_path / "near")
    assert near["TEXT"].to_pylist() == [f"row {i}" for i in expected_rows()]
    assert read(tmp_path / "far").equals(near)


def test_metadata_on_s3_without_credentials(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # otherwise the client asks the network for credentials
    with pytest.raises(Outage, match=f"{s3}/in cannot be read or written: .* Check the URL, the credentials and the"):
        select(laion.config(f"{s3}/in", tmp_path / "out"))


def test_a_finished_selection_with_a_missing_or_damaged_file(metadata: Path, tmp_path: Path) -> None:
    request = laion.config(metadata, tmp_path / "out", rows_per_file=200)
    select(request)
    (tmp_path / "out" / "selected-00001.parquet").unlink()
    with pytest.raises(RequestError, match=r"holds this selection, but selected-00001\.parquet is missing\. Restore"):
        select(request)
    (tmp_path / "out" / "funnel.json").write_text("{")
    with pytest.raises(RequestError, match=r"funnel\.json is damaged\. Restore it from a backup, or remove"):
        select(request)
