"""The shorthand for a single stream, and timeouts that depend on each other."""

from pathlib import Path

import pytest
import yaml

from shards.base.config import load_config, save_config
from shards.base.errors import RequestError
from tests.runs import train_fields
from train.config import TrainConfig

ONE = [{"root": "a", "bucket": "64x64", "weight": 2.0}]
TWO = [*ONE, {"root": "b", "bucket": "128x128"}]


def config(folder: Path, streams: list[dict[str, object]] | None, *words: str) -> TrainConfig:
    fields = train_fields(Path("a"), folder / "run")
    fields["data"].pop("streams")
    fields["data"] |= {"streams": streams} if streams else {}
    (folder / "c.yaml").write_text(yaml.safe_dump(fields))
    return load_config(TrainConfig, folder / "c.yaml", list(words), "train")


@pytest.mark.parametrize(
    ("streams", "words", "expected"),
    [
        (ONE, ["--data.root", "c"], ("c", "64x64", 2.0)),
        (ONE, ["--data.bucket", "512x512"], ("a", "512x512", 2.0)),
        (ONE, ["--data.root", "s3://c/d", "--data.bucket=512x512"], ("s3://c/d", "512x512", 2.0)),
        (None, ["--data.root", "c", "--data.bucket", "512x512"], ("c", "512x512", 1.0)),
    ],
)
def test_the_shorthand_sets_the_only_stream(
    tmp_path: Path, streams: list | None, words: list[str], expected: tuple
) -> None:
    found = config(tmp_path, streams, *words)
    (stream,) = found.data.streams
    assert (str(stream.root), stream.bucket, stream.weight) == expected
    assert found.data.num_canonical_nodes == 4  # the rest of the section is kept
    # a saved config contains the full stream
    save_config(found, tmp_path / "saved.yaml")
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())["data"]
    assert "root" not in saved and "bucket" not in saved and len(saved["streams"]) == 1
    assert load_config(TrainConfig, tmp_path / "saved.yaml", [], "train") == found


@pytest.mark.parametrize(
    ("streams", "words", "message"),
    [
        (
            TWO,
            ["--data.bucket", "512x512"],
            "data.bucket can change only a single stream, but data.streams in the file lists 2 streams; change the",
        ),
        (
            ONE,
            ["--data.root", "c", "--data.bucket", "64x64", "--data.streams", '[{"root": "d", "bucket": "64x64"}]'],
            "data.streams cannot be combined with data.root and data.bucket, because both set the data to read; remove",
        ),
        (None, ["--data.root", "c"], "`data.streams.0.bucket` is missing"),
        (None, ["--data.bucket", "64x64"], "`data.streams.0.root` is missing"),
        (ONE, ["--data.bucket", "64"], "`data.streams.0.bucket` = '64'"),
        (3, ["--data.root", "c"], "`data.streams` = 3: input should be a valid list"),
        ([4], ["--data.root", "c"], "`data.streams.0` = 4: input should be a valid dictionary"),
    ],
)
def test_invalid_streams_are_refused(tmp_path: Path, streams: list, words: list[str], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        config(tmp_path, streams, *words)
    assert message in str(caught.value)


def test_streams_replace_an_inherited_shorthand(tmp_path: Path) -> None:
    """A base file's shorthand defines a single stream. A derived file that lists `streams` replaces it."""
    fields = train_fields(Path("a"), tmp_path / "run")
    (tmp_path / "below.yaml").write_text(yaml.safe_dump(fields))
    (tmp_path / "short.yaml").write_text("base: below.yaml\ndata: {bucket: 128x128}\n")
    (tmp_path / "above.yaml").write_text(yaml.safe_dump({"base": "short.yaml", "data": {"streams": TWO}}))
    short = load_config(TrainConfig, tmp_path / "short.yaml", [], "train").data.streams
    assert [(str(stream.root), stream.bucket) for stream in short] == [("a", "128x128")]
    above = load_config(TrainConfig, tmp_path / "above.yaml", [], "train").data.streams
    assert [stream.bucket for stream in above] == ["64x64", "128x128"]
    words = ["--data.streams", '[{"root": "c", "bucket": "64x64"}]']
    (typed,) = load_config(TrainConfig, tmp_path / "short.yaml", words, "train").data.streams
    assert (str(typed.root), typed.bucket) == ("c", "64x64")


def test_storage_timeouts_are_shorter_than_those_of_collectives(tmp_path: Path) -> None:
    """A single process has no such limit. In the first steps, collectives allow for the time of a first batch."""
    default = config(tmp_path, ONE)
    assert [default.patience(seconds, 8) for seconds in (900.0, 300.0)] == [480.0, 300.0]
    assert default.patience(900.0, 1) == 900.0 and default.start_timeout == 2100.0
    words = ("--collective_timeout", "50", "--data.first_timeout", "20", "--data.timeout", "100")
    short = config(tmp_path, ONE, *words)
    assert short.patience(short.data.timeout, 2) == 40.0 and short.start_timeout == 120.0
    long = config(tmp_path, ONE, "--collective_timeout", "9000")
    assert long.patience(long.data.timeout, 2) == 300.0 and long.start_timeout == 9000.0
