"""Verification of a tar against its own records: every kind of damage is found."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.download.config import DownloadConfig
from precompute.download.job import is_published
from precompute.download.rows import PlannedTar
from precompute.download.verify import check_tar, format_of
from shards.base.errors import WorkError
from tests.tiny import flip_a_bit, make_tar

PICTURES = {
    "0000000": b"\xff\xd8\xff" + bytes(2000),
    "0000001": b"\x89PNG\r\n\x1a\n" + bytes(900),
    "0000003": b"<html>",
}
SHARD = PlannedTar(0, Path("in.parquet"), 0, 4)


@pytest.fixture
def config(tmp_path: Path) -> DownloadConfig:
    """Write tar 00000 as img2dataset does, with four rows and three successes, and return the config of its folder."""
    keys = [f"{i:07d}" for i in range(4)]
    hashes = {key: hashlib.sha256(data).hexdigest() for key, data in PICTURES.items()}
    statuses = ["success" if key in PICTURES else "failed_to_download" for key in keys]
    table = pa.table({"key": keys, "status": statuses, "sha256": [hashes.get(key) for key in keys]})
    pq.write_table(table, tmp_path / "00000.parquet")
    write_tar(tmp_path)
    stats = {"count": 4, "successes": 3, "failed_to_download": 1, "failed_to_resize": 0}
    (tmp_path / "00000_stats.json").write_text(json.dumps(stats))
    return DownloadConfig(input=tmp_path / "in.parquet", output=tmp_path)


def check(config: DownloadConfig) -> dict[str, Any]:
    return check_tar(config.output, SHARD.name, SHARD.num_rows, config)


def write_tar(folder: Path, **changes: bytes | None) -> None:
    """Write the tar, with members of sample 0000001 replaced (None: removed) by extension."""
    samples: dict[str, dict[str, bytes]] = {
        key: {"jpg": data, "txt": b"a caption", "json": json.dumps({"key": key}).encode()}
        for key, data in PICTURES.items()
    }
    changed = samples["0000001"] | changes
    samples["0000001"] = {extension: data for extension, data in changed.items() if data is not None}
    make_tar(folder, "00000", list(samples.items()), stats=False)


def change_parquet(folder: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(folder / "00000.parquet")), folder / "00000.parquet")


def change_stats(folder: Path, **changes: Any) -> None:
    path = folder / "00000_stats.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(folder: Path, size: int) -> None:
    (folder / "00000.tar").write_bytes((folder / "00000.tar").read_bytes()[:size])


def rename(table: pa.Table, old: str, new: str) -> pa.Table:
    keys = [new if key == old else key for key in table["key"].to_pylist()]
    return table.set_column(0, "key", pa.array(keys))


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (
        lambda folder: write_tar(folder, jpg=None, txt=None, json=None),
        "contains 2 samples, but .* lists 3",
    ),
    (lambda folder: write_tar(folder, jpg=None), "sample 0000001 has no image"),
    (lambda folder: write_tar(folder, txt=None), "sample 0000001 has no caption"),
    (lambda folder: write_tar(folder, json=None), "the JSON of sample 0000001 is missing or has no key"),
    (lambda folder: write_tar(folder, json=b"{"), "the JSON of sample 0000001 is missing or has no key"),
    (
        lambda folder: write_tar(folder, json=b'{"key": "0000003"}'),
        "the JSON of sample 0000001 has the key 0000003 instead",
    ),
    (lambda folder: write_tar(folder, jpg=b"other"), "sample 0000001 does not match the SHA-256"),
    (lambda folder: flip_a_bit(folder / "00000.tar", 600), "sample 0000000 does not match the SHA-256"),
    (lambda folder: flip_a_bit(folder / "00000.tar", 5), "uncompressed|damaged"),
    # in a later header, where Python's tarfile ends the listing without an error
    (lambda folder: flip_a_bit(folder / "00000.tar", 512 + 2048 + 5), "damaged"),
    (lambda folder: cut(folder, 512 + 2048), "truncated"),
    (lambda folder: cut(folder, 1000), "truncated within"),
    (lambda folder: change_stats(folder, count=5), "requested 4, stats 5, sum of stats 4, parquet 4"),
    (lambda folder: change_stats(folder, successes=2), "sum of stats 3"),
    (
        lambda folder: change_stats(folder, successes=2, failed_to_resize=1),
        "contains 3 samples, but 00000_stats.json lists 2",
    ),
    (lambda folder: change_parquet(folder, lambda table: table.slice(1)), "parquet 3"),
    (
        lambda folder: change_parquet(folder, lambda t: rename(t, "0000002", "0000001")),
        "parquet file lists a key twice",
    ),
    (
        lambda folder: change_parquet(folder, lambda t: rename(t, "0000001", "0000009")),
        "does not list, starting with 0000001",
    ),
]


def test_an_image_that_has_grown_by_encoding_passes(config: DownloadConfig) -> None:
    """max_bytes limits responses, but an image that is resized or converted may become larger."""
    assert check(config.model_copy(update={"requests": config.requests.model_copy(update={"max_bytes": 1000})}))


def test_a_whole_shard_passes(config: DownloadConfig) -> None:
    found = check(config)
    assert found["formats"] == {"html": 1, "jpeg": 1, "png": 1}
    data = (config.output / "00000.tar").read_bytes()
    assert (found["tar_bytes"], found["tar_sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damage_is_found(damage: Callable[[Path], None], message: str, config: DownloadConfig) -> None:
    damage(config.output)
    with pytest.raises(WorkError, match=message):
        check(config)


def test_json_that_is_too_large_to_be_read_is_not_damage(config: DownloadConfig) -> None:
    """A tar with one very long caption would otherwise be downloaded again in every run."""
    write_tar(config.output, json=json.dumps({"key": "0000001", "caption": "й" * 200_000}).encode())
    assert check(config)


def test_other_bytes_are_expected_where_pictures_are_encoded_again(config: DownloadConfig) -> None:
    write_tar(config.output, jpg=b"other")
    images = config.images.model_copy(update={"mode": "keep_ratio_largest"})
    assert check(config.model_copy(update={"images": images}))["formats"]["other"] == 1


def test_what_is_published_is_recognised(config: DownloadConfig) -> None:
    assert not is_published(config, SHARD), "there is no receipt"
    change_stats(config.output, latentmill=check(config))
    assert is_published(config, SHARD)
    flip_a_bit(config.output / "00000.tar", 600)
    assert is_published(config, SHARD), "sizes alone do not show it"
    assert not is_published(config.model_copy(update={"recheck": True}), SHARD)
    cut(config.output, 1000)
    assert not is_published(config, SHARD)
    for damaged in ("null", "[]", "1", '{"latentmill": null}'):
        (config.output / "00000_stats.json").write_text(damaged)
        assert not is_published(config, SHARD)
    (config.output / "00000.tar").unlink()
    assert not is_published(config, SHARD)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\xff\xd8\xff\xdb", "jpeg"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "webp"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "other"),
        (b"\0\0\0\x20ftypavif", "avif"),
        (b"GIF89a", "gif"),
        (b"II*\0", "tiff"),
        (b"MM\0*", "tiff"),
        (b"  <html>", "html"),
        (b"", "empty"),
        (b"{}", "other"),
    ],
)
def test_formats(data: bytes, name: str) -> None:
    assert format_of(data) == name
