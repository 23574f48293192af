"""Which buckets a job fills, and which pictures each of them holds."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from shards.base.config import Config
from shards.format.buckets import AspectTable, Bucket, bucket_rules


class AspectConfig(Config):
    """Buckets of other shapes than those in `buckets`: of each base, a picture goes to the one of the nearest ratio."""

    bases: list[int] = Field([])
    """Sides of the squares whose areas the buckets have, about; `[512]` is a table, `[]` is none."""
    step: int = Field(64, ge=1)
    """Their sides are multiples of this."""
    max_ratio: float = Field(2.0, ge=1)
    """Of the longer side to the shorter."""

    @property
    def tables(self) -> tuple[AspectTable, ...]:
        """A table for each base."""
        return tuple(AspectTable(base, self.step, self.max_ratio) for base in sorted(self.bases))

    @model_validator(mode="after")
    def _check(self) -> "AspectConfig":
        if len(set(self.bases)) != len(self.bases):
            raise ValueError("a base is named twice")
        for base in self.bases:
            if base <= 0 or base % self.step:
                raise ValueError(f"base {base} is not a multiple of step {self.step}")
        bucket_rules([], self.tables)
        return self


@dataclass(frozen=True)
class Buckets:
    covering: tuple[Bucket, ...]
    """Each holds every picture that covers it."""
    tables: tuple[AspectTable, ...] = ()
    """Of each, a picture goes to the bucket of the nearest ratio."""

    @property
    def rules(self) -> dict[Bucket, str]:
        """Every bucket → which pictures it holds, in the words of a receipt."""
        return bucket_rules(self.covering, self.tables)

    @property
    def all(self) -> list[Bucket]:
        """Every bucket, smallest first."""
        return sorted(self.rules)

    @property
    def nearest_only(self) -> dict[Bucket, AspectTable]:
        """Those that hold only the pictures nearest to them, and the table that they are in."""
        return {bucket: table for table in self.tables for bucket in table.buckets if bucket not in self.covering}
