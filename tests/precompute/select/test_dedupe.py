"""Duplicates and opt-outs found partition by partition, compared with a plain dict."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precompute.select.duplicates import (
    COMPARABLE_NAME,
    HashWriter,
    count_partitions,
    find_drops,
    hash_urls,
    partition_of,
    read_partition,
    rows_to_drop,
)
from tests.precompute.select import laion


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.select.duplicates.SEGMENT_ROWS", 1)


def written(folder: Path, segments: list[np.ndarray], partitions: int) -> Path:
    with HashWriter(folder, partitions) as writer:
        for segment in segments:
            writer.add(segment)
    return folder


def obvious(files: list[list[str]], opted_out: set[str], drop_duplicates: bool) -> list[tuple[set[int], set[int]]]:
    seen: set[str] = set()
    result = []
    for urls in files:
        opt_outs, duplicates = set(), set()
        for row, url in enumerate(urls):
            if url in opted_out:
                opt_outs.add(row)
            elif url in seen and drop_duplicates:
                duplicates.add(row)
            seen.add(url)
        result.append((opt_outs, duplicates))
    return result


URLS = st.lists(st.sampled_from([f"http://example.com/{i}" for i in range(12)]), max_size=20)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(URLS, min_size=1, max_size=4),
    opted_out=st.none() | URLS,
    partitions=st.sampled_from([1, 2, 8]),
    drop_duplicates=st.booleans(),
    segment=st.integers(1, 7),
)
def test_drops_are_the_obvious_ones(
    files: list[list[str]],
    opted_out: list[str] | None,
    partitions: int,
    drop_duplicates: bool,
    segment: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("dedupe")

    def hashed(name: str, urls: list[str]) -> Path:
        parts = [hash_urls(pa.array(urls[i : i + segment], pa.string())) for i in range(0, len(urls), segment)]
        return written(folder / name, parts, partitions)

    folders = [hashed(str(number), urls) for number, urls in enumerate(files)]
    for number, urls in enumerate(files):
        hashed(f"{number}/{COMPARABLE_NAME}", urls)
    opt_out = hashed("opt_out", opted_out) if opted_out is not None else None
    drops = [folder / f"drops-{partition}" for partition in range(partitions)]
    for partition, path in enumerate(drops):
        find_drops(path, partition, folders, opt_out, drop_duplicates)
    found = [tuple(set(rows.tolist()) for rows in rows_to_drop(drops, number)) for number in range(len(files))]
    assert found == obvious(files, set(opted_out or ()), drop_duplicates)


def test_hashes_that_agree_in_half_their_bits_are_different(tmp_path: Path) -> None:
    hashes = np.array([[1, 5], [1, 6], [2, 5], [1, 6], [1, 5]], np.uint64)
    folder = written(tmp_path / "a", [hashes], 1)
    find_drops(tmp_path / "drops", 0, [folder], None, True)
    assert rows_to_drop([tmp_path / "drops"], 0)[1].tolist() == [3, 4]


@pytest.mark.parametrize("partitions", [1, 2, 256, 65536])
def test_partitions_split_the_range_of_hashes_evenly(partitions: int) -> None:
    high = np.array([0, 2**64 // partitions - 1, 2**64 - 1], np.uint64)
    assert partition_of(high, partitions).tolist() == [0, 0, partitions - 1]
    if partitions > 1:
        assert partition_of(np.array([2**64 // partitions], np.uint64), partitions).tolist() == [1]


def test_hashes_are_of_the_bytes_of_the_url() -> None:
    # XXH3-128 of "" is a published value
    assert [f"{half:016x}" for half in hash_urls(pa.array([""]))[0]] == ["99aa06d3014798d8", "6001c324468d497f"]


@pytest.mark.parametrize(
    ("num_rows", "partitions"), [(0, 1), (1, 1), (100, 1), (101, 2), (200, 2), (201, 4), (10**9, 4096)]
)
def test_the_number_of_partitions_follows_the_rows(num_rows: int, partitions: int) -> None:
    assert count_partitions(num_rows, 100) == partitions


def test_memory_of_a_partition_is_a_share_of_all(tmp_path: Path) -> None:
    num_rows = 100_000
    urls = laion.rows(num_rows)["URL"]
    folder = written(tmp_path / "a", [hash_urls(urls)], 64)
    sizes = [len(read_partition(folder, partition)) for partition in range(64)]
    assert sum(sizes) == num_rows and max(sizes) < 1.2 * num_rows / 64
