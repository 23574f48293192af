"""Bad metadata, bad opt-out files, nothing left, no space: errors are clear, and finished work is kept."""

import errno
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from precompute.select import __main__ as command
from precompute.select.job import select
from precompute.select.metadata import MetadataFile, read_batches, read_footer
from shards.base.errors import Outage, RequestError, WorkError, exit_code_of
from tests.precompute.select import laion

pytestmark = pytest.mark.usefixtures("no_plot")


def table_with(column: str, values: pa.Array) -> pa.Table:
    table = laion.rows(len(values))
    return table.set_column(table.schema.get_field_index(column), column, values)


BAD_REQUESTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: None, r"There is no parquet file at .*in\. Pass a file, a folder or a glob"),
    (lambda path: (path / "a.parquet").write_bytes(b""), r"a.parquet is empty. Download it again, or remove it"),
    (lambda path: (path / "a.parquet").write_bytes(b"PAR1 and no more"), r"a.parquet cannot be read as parquet: "),
    (
        lambda path: laion.write(path / "a.parquet", laion.rows(2).drop_columns(["punsafe"])),
        r"a.parquet has no column for punsafe, which the rule `punsafe` needs \(punsafe < 0.1\). "
        r"Its columns are URL, TEXT.*"
        r"disable the filter with --filters.max_punsafe null",
    ),
    (lambda path: laion.write(path / "a.parquet", laion.rows(2).drop_columns(["URL"])), "has no column for URL"),
    (
        lambda path: laion.write(path / "a.parquet", table_with("WIDTH", pa.array(["640", "480"]))),
        r"a.parquet: the column `WIDTH` has type string, but WIDTH must have type int32",
    ),
    (
        lambda path: laion.write(path / "a.parquet", table_with("URL", pa.array([[1], [2]]))),
        r"the column `URL` has type list<element: int64>, but URL must have type string",
    ),
    (
        lambda path: laion.write(path / "a.parquet", laion.rows(2).append_column("url", pa.array(["a", "b"]))),
        r"has the columns `URL` and `url`, which are both names for URL, .* Keep only one of them, "
        r"or choose one with dataset.columns, as in {URL: URL}\.",
    ),
]


@pytest.mark.parametrize(("prepare", "message"), BAD_REQUESTS)
def test_bad_metadata_is_refused_before_anything_is_written(
    prepare: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    prepare(tmp_path / "in")
    if any((tmp_path / "in").iterdir()):
        laion.write(tmp_path / "in" / "z.parquet", laion.rows(3))
    with pytest.raises(RequestError, match=message):
        select(laion.config(tmp_path / "in", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "opt-out file .* does not exist"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"PAR1", r"list.parquet cannot be read as parquet"),
    ],
)
def test_bad_opt_out_files(content: bytes | None, message: str, metadata: Path, tmp_path: Path) -> None:
    path = tmp_path / ("list.parquet" if content == b"PAR1" else "list.txt")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=message):
        select(laion.config(metadata, tmp_path / "out", urls={"opt_out": path}))


def test_no_row_left(metadata: Path, tmp_path: Path) -> None:
    with pytest.raises(
        WorkError, match=r"None of the 900 rows passed.*`aesthetic` \(AESTHETIC_SCORE ≥ 11\) dropped the most rows: 900"
    ):
        select(laion.config(metadata, tmp_path / "out", filters={"min_aesthetic": 11}))
    laion.write(tmp_path / "empty.parquet", laion.rows(0))
    with pytest.raises(WorkError, match="The metadata has no rows"):
        select(laion.config(tmp_path / "empty.parquet", tmp_path / "out2"))
    assert not list(tmp_path.glob("out*/*.parquet"))


def test_a_number_that_its_column_cannot_hold(tmp_path: Path) -> None:
    laion.write(tmp_path / "in.parquet", table_with("similarity", pa.array([1, 2**24 + 1])))
    with pytest.raises(WorkError, match=r"in.parquet has an out-of-range value: .*16777217"):
        select(laion.config(tmp_path / "in.parquet", tmp_path / "out"))


def test_an_unreachable_server_is_an_outage(tmp_path: Path) -> None:
    address = "http://127.0.0.1:9/in.parquet"  # a closed port
    for read in (
        lambda: select(laion.config(address, tmp_path / "out")),
        lambda: read_footer(address),
        lambda: list(read_batches(MetadataFile(address, 1, 1, "", {}))),
    ):
        with pytest.raises(Outage, match=r"in.parquet cannot be read or written: ClientConnectorError: .*the network"):
            read()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError("slow"), Outage),
        (OSError(errno.EIO, "unknown error of the store"), Outage),
        (FileNotFoundError("gone"), WorkError),
        (OSError("Couldn't deserialize thrift"), WorkError),  # from pyarrow
    ],
)
def test_damage_is_not_mistaken_for_an_outage(
    error: OSError, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(fsspec.filesystem("memory"), "open", fail)
    with pytest.raises(WorkError) as caught:
        list(read_batches(MetadataFile("memory://in.parquet", 1, 1, "", {})))
    assert type(caught.value) is expected


def test_no_space(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    arguments = ["--metadata", str(metadata), "--output", str(tmp_path / "out"), "--processes", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("precompute.select.passes.hash_urls", full)
        assert exit_code_of(lambda: command.run(arguments)) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "No space is left in" in error and "Free some space, then run the same command again" in error
    assert exit_code_of(lambda: command.run(arguments)) == 0
