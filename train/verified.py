"""A stream whose files are hashed before their first use.

`streaming` checks hashes only when it downloads, so that a file which is damaged where it lies trains silently.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import Stream
from streaming.base.hashing import get_hash

from shards.files import DamagedFile

HASH = "xxh3_64"


class VerifiedStream(Stream):
    """Once per node and run, each MDS file is read and held against the hash in its index."""

    def __init__(self, report: Path, **arguments: Any):
        """`report`: a file for the name of a damaged one; streaming swallows what its threads raise."""
        super().__init__(**arguments)
        self.report = report

    def set_up_local(self, shards: list[Any], cache_usage_per_shard: NDArray[np.int64]) -> None:
        """Let no file count as present, so that `prepare_shard` is called before it is read."""
        super().set_up_local(shards, cache_usage_per_shard)
        cache_usage_per_shard[:] = 0

    def prepare_shard(self, shard: Any) -> int:
        """As streaming's, and then the hash.

        Raises:
            DamagedFile: the file is not what its index says.
        """
        delta: int = super().prepare_shard(shard)
        for raw, _ in shard.file_pairs:
            path = Path(os.path.join(self.local, self.split, raw.basename))
            if get_hash(HASH, path.read_bytes()) != raw.hashes[HASH]:
                message = f"{path} is damaged: its {HASH} is not the one in its index. Restore the file from its copy."
                self.report.write_text(message)
                raise DamagedFile(message)
        return delta
