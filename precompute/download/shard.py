"""What becomes one tar."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class InputShard:
    """The rows [first_row, first_row + num_rows) of one input file, which become one tar."""

    shard_id: int
    file: Path
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.shard_id:05d}"
