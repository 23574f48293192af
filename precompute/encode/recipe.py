"""What is made of each tar, and how: the same for all tars of a job."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from precompute.input.tars import TarsConfig
from precompute.pixels.buckets import Buckets
from precompute.pixels.decode import LimitsConfig, Picture, PixelsConfig, decode
from shards.base.config import Config
from shards.base.device import is_accelerator
from shards.derive.conversion import Conversion
from shards.format.encoding import EncodingRecord

Decode = Callable[..., Picture]
"""`pixels.decode`, or what stands in for it."""


class WorkerConfig(Config):
    """How one worker goes about a tar; nothing of it changes what the stored numbers mean."""

    decode_threads: int = Field(8, ge=1)
    """Threads that decode pictures, in each worker."""
    batch_size: int = Field(64, ge=1)
    """Pictures of up to 512x512 that are encoded together; the last batch of a tar is smaller."""
    compile: bool | None = None
    """Compile the towers with torch.compile: a minute for each bucket when a worker starts, then faster; null: on GPUs.
    It changes latents by rounding alone, as the kind of GPU does, so it is in the receipts and not in encoding.json."""
    towers: Literal["together", "one_by_one"] = "together"
    """`together`: all towers' weights are on the device. `one_by_one`: one tower's at a time, the others' in the host's
    memory; a tar's pictures are encoded first, then its captions by each text tower in turn. The bytes are the same."""
    tars_at_once: int = Field(3, ge=1, le=4)
    """Tars that a worker has in hand at once: one at the device, the next, whose first batches are made ready, and one
    that is being committed. Each takes room in scratch for its latents, and for its copy until it is encoded; pictures
    of two at most are in memory. 1: one after the other."""
    scratch: Path | None = None
    """Local folder of all that workers need for a while: copies of tars that come from an address, and attempts, each
    as large as its latents, where `output` is an address; the system's temporary folder if not given."""
    isolate_from: int = Field(2, ge=1)
    """Attempt from which pictures are decoded in child processes, so that one that kills its decoder is found and
    rejected as `decoder_crash`; 1: always."""

    @property
    def one_by_one(self) -> bool:
        """Whether towers take turns on the device."""
        return self.towers == "one_by_one"

    def compiles(self, device: torch.device) -> bool:
        """Whether the towers are compiled there."""
        return is_accelerator(device) if self.compile is None else self.compile


@dataclass(frozen=True)
class SourceRoot:
    """The root that a job derives another from."""

    place: Path | str
    conversion: Conversion


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs to know of its job, but for the tar, the root and the encoders."""

    encoding: EncodingRecord
    buckets: Buckets
    pixels: PixelsConfig
    limits: LimitsConfig
    tars: TarsConfig
    worker: WorkerConfig
    batch_sizes: dict[str, int] = field(default_factory=dict)
    """Of towers that have their own: `texts.NAME` or `features.NAME` → samples."""
    source: SourceRoot | None = None
    """A root whose parts are encoded again, in place of tars."""
    decode: Decode = decode

    def batches(self, device: torch.device) -> dict[str, int | bool]:
        """How batches go through the towers on `device`, which decides over rounding."""
        own = {f"batch_size.{name}": size for name, size in self.batch_sizes.items()}
        return {"batch_size": self.worker.batch_size, **own, "compile": self.worker.compiles(device)}

    def settings(self, device: torch.device) -> dict[str, str | int | float | bool]:
        """What a receipt says of it besides the encoding, for towers on `device`."""
        return {
            **self.batches(device),
            "tars": self.tars.policy,
            "check_sha256": self.tars.check_sha256,
            **self.limits.model_dump(mode="json", exclude={"formats"}),
            "formats": " ".join(self.limits.formats),
        }
