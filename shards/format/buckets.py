"""Resolution buckets: every sample of a bucket has one picture size, so one latent shape. Pure arithmetic."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import count
from typing import Annotated

from pydantic import AfterValidator

COVERS = "covers"
NEAREST = "nearest, "


@dataclass(frozen=True, order=True)
class Bucket:
    """A picture size in pixels; its name, WIDTHxHEIGHT, is the name of its folder."""

    width: int
    height: int

    @classmethod
    def parse(cls, name: str) -> "Bucket":
        """`"576x448"` → Bucket(576, 448).

        Raises:
            ValueError: not WIDTHxHEIGHT with both at least 1.
        """
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", name)
        if not match:
            raise ValueError(f"a bucket is WIDTHxHEIGHT in pixels, such as 512x512, not {name!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    def fits(self, width: int, height: int) -> bool:
        """Whether a width × height picture covers this bucket without being enlarged."""
        return width >= self.width and height >= self.height

    def latent_hw(self, downsampling: int) -> tuple[int, int]:
        """(h, w) of the latents of a VAE that shrinks each side `downsampling` times.

        Raises:
            ValueError: a side is not a multiple of `downsampling`.
        """
        if self.width % downsampling or self.height % downsampling:
            raise ValueError(f"bucket {self} is not a multiple of the VAE's downsampling, {downsampling}")
        return self.height // downsampling, self.width // downsampling


BucketName = Annotated[str, AfterValidator(lambda name: str(Bucket.parse(name)))]
"""A config field for a bucket."""


@dataclass(frozen=True)
class AspectTable:
    """Buckets of about base² pixels, whose sides are multiples of `step`, up to a ratio of `max_ratio` either way.

    For base 512, step 64, ratio 2: 512x512, 576x448, 640x384, 704x384, and the last three upright.
    """

    base: int
    step: int
    max_ratio: float

    def __str__(self) -> str:
        return f"base {self.base}, step {self.step}, max_ratio {self.max_ratio:g}"

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """From the most upright to the widest. For each longer side there is one: that nearest base² (never half a step
        off, and the smaller of two), so the shorter side never grows with the longer."""
        wide = []
        for width in count(self.base, self.step):
            # base² / width, to the nearest step; half a step goes down
            height = self.step * ((2 * self.base**2 + width * self.step - 1) // (2 * width * self.step))
            if not height or width > self.max_ratio * height:
                break
            wide.append(Bucket(width, height))
        return (*(Bucket(b.height, b.width) for b in reversed(wide[1:])), *wide)

    def nearest(self, width: int, height: int) -> Bucket | None:
        """The bucket whose ratio is nearest (by its logarithm) that of a width × height picture, among those that it
        covers without being enlarged; of two that are as near, the one nearer the square. None where it covers none.

        That one is always among the two whose ratios enclose the picture's (or the outermost): if it covers a bucket
        further out on one side, it covers those in between, whose sides are no longer.
        """

        def distance(bucket: Bucket) -> tuple[Fraction, Fraction]:
            here, there = width * bucket.height, height * bucket.width
            return _ratio(here, there), _ratio(bucket.width, bucket.height)

        return min((b for b in self.buckets if b.fits(width, height)), key=distance, default=None)


def _ratio(a: int, b: int) -> Fraction:
    """The larger over the smaller."""
    return Fraction(max(a, b), min(a, b))


def choose_buckets(
    width: int, height: int, buckets: Iterable[Bucket], aspects: Iterable[AspectTable] = ()
) -> list[Bucket]:
    """Where a width × height picture goes: every one of `buckets` that it covers, and one of each table; each once."""
    nearest = (table.nearest(width, height) for table in aspects)
    return sorted({b for b in buckets if b.fits(width, height)} | {b for b in nearest if b})


def bucket_rules(buckets: Iterable[Bucket], aspects: Iterable[AspectTable] = ()) -> dict[Bucket, str]:
    """Bucket → which pictures it holds: `covers`, all that cover it, or `nearest, base …`, those whose ratio it is
    nearest in a table. A table's bucket that is also in `buckets` holds all.

    Raises:
        ValueError: two tables share a bucket.
    """
    rules: dict[Bucket, str] = {}
    for table in aspects:
        for bucket in table.buckets:
            if bucket in rules:
                raise ValueError(f"the aspect tables of {rules[bucket]} and of {table} share the bucket {bucket}")
            rules[bucket] = f"{NEAREST}{table}"
    return rules | dict.fromkeys(buckets, COVERS)
