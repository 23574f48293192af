"""Buckets and aspect tables; the choice of a bucket is compared with an exhaustive search."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shards.format.buckets import AspectTable, Bucket, bucket_rules, choose_buckets

tables = st.builds(
    lambda step, steps, ratio: AspectTable(step * steps, step, ratio),
    st.sampled_from([8, 16, 32, 64]),
    st.integers(1, 20),
    st.floats(1, 4),
)
sides = st.integers(1, 5000)


def test_the_table_of_512() -> None:
    names = [str(bucket) for bucket in AspectTable(512, 64, 2.0).buckets]
    assert names == ["384x704", "384x640", "448x576", "512x512", "576x448", "640x384", "704x384"]


@given(tables)
def test_tables(table: AspectTable) -> None:
    buckets = table.buckets
    assert Bucket(table.base, table.base) in buckets
    # portrait shapes mirror landscape shapes
    assert {(b.width, b.height) for b in buckets} == {(b.height, b.width) for b in buckets}
    for bucket in buckets:
        short, long = sorted((bucket.width, bucket.height))
        assert short % table.step == 0 and long % table.step == 0
        assert long <= table.max_ratio * short
        # the shorter side is at most half a step off an area of base²
        assert abs(short - table.base**2 / long) <= table.step / 2
    # wider buckets are never higher, which `nearest` relies on
    for narrow, wide in itertools.pairwise(buckets):
        assert narrow.width <= wide.width and narrow.height >= wide.height and narrow != wide


@given(tables)
def test_no_bucket_of_a_table_is_missing(table: AspectTable) -> None:
    """Try every multiple of the step."""
    obvious = set()
    for long in range(table.base, 8 * table.base, table.step):
        heights = range(0, table.base + 1, table.step)
        short = min(heights, key=lambda height: (abs(height - table.base**2 / long), height))
        if not short or long > table.max_ratio * short:
            break
        obvious |= {Bucket(long, short), Bucket(short, long)}
    assert set(table.buckets) == obvious


@given(tables, sides, sides)
def test_the_nearest_against_trying_all(table: AspectTable, width: int, height: int) -> None:
    found = table.nearest(width, height)
    covered = [b for b in table.buckets if b.width <= width and b.height <= height]
    if not covered:
        assert found is None
        return
    distances = {b: abs(math.log(width / height) - math.log(b.width / b.height)) for b in covered}
    assert found in covered  # never enlarged
    assert distances[found] <= min(distances.values()) + 1e-12
    turned = table.nearest(height, width)
    assert turned == Bucket(found.height, found.width)


@given(tables, sides, sides)
def test_the_crop_is_bounded_by_the_neighbouring_ratios(table: AspectTable, width: int, height: int) -> None:
    """Even if the nearest bucket is too large for the picture, its bucket encloses its ratio, or is the outermost."""
    found = table.nearest(width, height)
    assume(found is not None)
    assert found is not None
    ratio = width / height
    below = max((b.width / b.height for b in table.buckets if b.width * height <= width * b.height), default=None)
    above = min((b.width / b.height for b in table.buckets if b.width * height >= width * b.height), default=None)
    assert found.width / found.height in (below, above)
    kept = min(ratio * found.height / found.width, found.width / found.height / ratio)
    if below and above:
        assert kept >= below / above - 1e-12


@given(tables, sides, sides, st.lists(st.builds(Bucket, sides, sides), max_size=5))
def test_choice(table: AspectTable, width: int, height: int, buckets: list[Bucket]) -> None:
    chosen = choose_buckets(width, height, buckets, [table])
    assert len(chosen) == len(set(chosen))
    assert all(bucket.fits(width, height) for bucket in chosen)
    assert {b for b in buckets if b.fits(width, height)} <= set(chosen)
    assert len(set(chosen) - set(buckets)) <= 1
    assert chosen == choose_buckets(width, height, buckets[::-1], [table])


@pytest.mark.parametrize(
    ("width", "height", "bucket"),
    [
        (1600, 1200, "576x448"),  # 4:3
        (1600, 1067, "640x384"),  # 3:2, nearer 1.67 than 1.29
        (1920, 1080, "704x384"),  # 16:9, nearer 1.83 than 1.67
        (640, 427, "640x384"),
        (690, 388, "640x384"),  # 704 is nearer, but 690 wide does not cover it
        (630, 400, None),  # nearest is 640x384; the other neighbour, 576x448, is too high
        (5000, 600, "704x384"),  # beyond the table: the widest bucket
        (512, 512, "512x512"),
        (511, 511, None),
    ],
)
def test_examples(width: int, height: int, bucket: str | None) -> None:
    found = AspectTable(512, 64, 2.0).nearest(width, height)
    assert (str(found) if found else None) == bucket


def test_which_pictures_a_bucket_holds() -> None:
    table = AspectTable(512, 64, 1.5)
    rules = bucket_rules([Bucket(256, 256), Bucket(512, 512)], [table])
    assert {str(bucket): rule for bucket, rule in rules.items()} == {
        "256x256": "covers",
        "512x512": "covers",
        "448x576": "nearest, base 512, step 64, max_ratio 1.5",
        "576x448": "nearest, base 512, step 64, max_ratio 1.5",
    }
    with pytest.raises(ValueError, match="both contain the bucket 64x384"):
        bucket_rules([], [AspectTable(128, 64, 6.0), AspectTable(192, 64, 6.0)])


@given(sides, sides)
def test_names_come_back(width: int, height: int) -> None:
    bucket = Bucket(width, height)
    assert Bucket.parse(str(bucket)) == bucket
    assert bucket.fits(width, height) and not bucket.fits(width - 1, height) and not bucket.fits(width, height - 1)


@pytest.mark.parametrize("name", ["256", "256x", "x256", "0x64", "64X64", "64x64 ", "-64x64", "../x", "064x64"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="WIDTHxHEIGHT"):
        Bucket.parse(name)


def test_latent_shape() -> None:
    assert Bucket(576, 448).latent_hw(8) == (56, 72)
    with pytest.raises(ValueError, match="not a multiple"):
        Bucket(100, 64).latent_hw(8)
