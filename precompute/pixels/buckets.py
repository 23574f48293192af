"""The buckets that a job fills, and the rules that assign images to them."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from shards.base.config import Config
from shards.format.buckets import AspectTable, Bucket, bucket_rules


class AspectConfig(Config):
    """Aspect buckets, in addition to `buckets`. For each base, an image goes to the bucket with the nearest aspect
    ratio."""

    bases: list[int] = Field([])
    """Base sides in pixels; each aspect bucket of base b has an area of about b². `[]` disables aspect buckets."""
    step: int = Field(64, ge=1)
    """Step in pixels; each side of an aspect bucket is a multiple of it."""
    max_ratio: float = Field(2.0, ge=1)
    """Maximum ratio of a bucket's longer side to its shorter side."""

    @property
    def tables(self) -> tuple[AspectTable, ...]:
        """The aspect table of each base."""
        return tuple(AspectTable(base, self.step, self.max_ratio) for base in sorted(self.bases))

    @model_validator(mode="after")
    def _check(self) -> "AspectConfig":
        if len(set(self.bases)) != len(self.bases):
            raise ValueError("a base is listed twice")
        for base in self.bases:
            if base <= 0 or base % self.step:
                raise ValueError(f"base {base} must be a positive multiple of step {self.step}")
        for bucket in bucket_rules([], self.tables):
            Bucket.parse(str(bucket))  # refuses sides of six digits
        return self


@dataclass(frozen=True)
class Buckets:
    """The buckets of a job."""

    covering: tuple[Bucket, ...]
    """Buckets that each receive all images that cover them without upscaling."""
    tables: tuple[AspectTable, ...] = ()
    """Tables of aspect buckets; an image goes to one bucket in each table."""

    @property
    def rules(self) -> dict[Bucket, str]:
        """The rule that assigns images to each bucket, as written in receipts, by bucket."""
        return bucket_rules(self.covering, self.tables)

    @property
    def all(self) -> list[Bucket]:
        """All buckets, smallest first."""
        return sorted(self.rules)

    @property
    def nearest_only(self) -> dict[Bucket, AspectTable]:
        """Aspect bucket → its table, for the aspect buckets that are not also in `covering`."""
        return {bucket: table for table in self.tables for bucket in table.buckets if bucket not in self.covering}
