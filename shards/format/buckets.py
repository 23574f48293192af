"""Resolution buckets: all samples of a bucket share one image size and therefore one latent shape. Pure
arithmetic."""

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
    """Bucket for one image size, in pixels. Its name, WIDTHxHEIGHT, is also the name of its folder."""

    width: int
    height: int

    @classmethod
    def parse(cls, name: str) -> "Bucket":
        """Parse a name such as `"576x448"` into `Bucket(576, 448)`. Raises ValueError for any other text."""
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", name)
        if not match:
            raise ValueError(f"{name!r} is not a bucket: write WIDTHxHEIGHT in pixels, such as 512x512")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    def fits(self, width: int, height: int) -> bool:
        """Return whether a width × height image covers this bucket without upscaling."""
        return width >= self.width and height >= self.height

    def latent_hw(self, downsampling: int) -> tuple[int, int]:
        """Return the latents' (h, w) for a VAE that downsamples each side by `downsampling`. Raises ValueError if a
        side is not a multiple of that factor."""
        if self.width % downsampling or self.height % downsampling:
            raise ValueError(
                f"a side of bucket {self} is not a multiple of the VAE's downsampling factor, {downsampling}"
            )
        return self.height // downsampling, self.width // downsampling


BucketName = Annotated[str, AfterValidator(lambda name: str(Bucket.parse(name)))]
"""Config field type for a bucket name."""


@dataclass(frozen=True)
class AspectTable:
    """Table of buckets with about base² pixels each.

    Their sides are multiples of `step`, and their aspect ratios are at most `max_ratio`. For base 512, step 64 and
    ratio 2, the buckets are 512x512, 576x448, 640x384, 704x384, and the portrait versions of the last three.
    """

    base: int
    step: int
    max_ratio: float

    def __str__(self) -> str:
        return f"base {self.base}, step {self.step}, max_ratio {self.max_ratio:g}"

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets of the table, from the tallest to the widest.

        There is one bucket per long side. Its short side is the multiple of `step` that brings the area closest to
        base² (ties go to the smaller side), so the short side never grows with the long side.
        """
        wide = []
        for width in count(self.base, self.step):
            # base² / width, rounded to the nearest multiple of step, with ties rounded down
            height = self.step * ((2 * self.base**2 + width * self.step - 1) // (2 * width * self.step))
            if not height or width > self.max_ratio * height:
                break
            wide.append(Bucket(width, height))
        return (*(Bucket(b.height, b.width) for b in reversed(wide[1:])), *wide)

    def nearest(self, width: int, height: int) -> Bucket | None:
        """Return the bucket closest in log aspect ratio to an image, or None if the image covers no bucket.

        Only buckets that the width × height image covers without upscaling count, and ties go to the bucket closer to
        square. The result is always one of the two buckets whose ratios enclose the image's ratio (or the outermost
        bucket), because an image that covers a bucket further out on one side also covers the buckets in between.
        """

        def distance(bucket: Bucket) -> tuple[Fraction, Fraction]:
            here, there = width * bucket.height, height * bucket.width
            return _ratio(here, there), _ratio(bucket.width, bucket.height)

        return min((b for b in self.buckets if b.fits(width, height)), key=distance, default=None)


def _ratio(a: int, b: int) -> Fraction:
    """Return the larger number divided by the smaller."""
    return Fraction(max(a, b), min(a, b))


def choose_buckets(
    width: int, height: int, buckets: Iterable[Bucket], aspects: Iterable[AspectTable] = ()
) -> list[Bucket]:
    """Return the buckets for a width × height image: all of `buckets` that the image covers, and the nearest bucket in
    each table."""
    nearest = (table.nearest(width, height) for table in aspects)
    return sorted({b for b in buckets if b.fits(width, height)} | {b for b in nearest if b})


def bucket_rules(buckets: Iterable[Bucket], aspects: Iterable[AspectTable]) -> dict[Bucket, str]:
    """Map each bucket to the rule that assigns images to it. Raises ValueError if two tables share a bucket.

    The rule is `covers` (every image that covers the bucket) or `nearest, base …` (images whose aspect ratio is closest
    to this bucket in a table). A bucket that is both in a table and in `buckets` has the rule `covers`.
    """
    rules: dict[Bucket, str] = {}
    for table in aspects:
        for bucket in table.buckets:
            if bucket in rules:
                first = rules[bucket].removeprefix(NEAREST)
                raise ValueError(f"the aspect tables `{first}` and `{table}` both contain the bucket {bucket}")
            rules[bucket] = f"{NEAREST}{table}"
    return rules | dict.fromkeys(buckets, COVERS)
