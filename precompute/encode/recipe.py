"""The recipe of a job: how each of its tars is encoded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field

from precompute.input.table import TableConfig
from precompute.input.unit import InputConfig
from precompute.pixels.buckets import Buckets
from precompute.pixels.decode import LimitsConfig, Picture, PixelsConfig, decode
from shards.base.config import Config
from shards.base.device import is_accelerator
from shards.derive.conversion import Conversion
from shards.format.encoding import EncodingRecord

Decode = Callable[..., Picture]
"""Type of `pixels.decode.decode`, and of its replacements in tests."""


class WorkerConfig(Config):
    """Processing of tars in a worker. None of these settings changes the meaning of the stored numbers."""

    decode_threads: int = Field(8, ge=1)
    """Number of threads per worker that decode images."""
    batch_size: int = Field(64, ge=1)
    """Number of images up to 512x512 that are encoded together; a batch of larger images has the same total number of
    pixels. A tar's last batch is padded to the same size."""
    compile: bool | None = None
    """Compile the towers with torch.compile; null compiles on GPUs only. Compilation takes a minute per bucket when a
    worker starts. Latents change only by rounding, so receipts record this setting, but encoding.json does not."""
    towers: Literal["together", "one_by_one"] = "together"
    """`together` keeps the weights of all towers on the device. `one_by_one` keeps one tower on the device and the
    others in host memory: a tar's images are encoded first, then its captions by one text tower after another. The
    stored bytes are the same."""
    tars_at_once: int = Field(3, ge=1, le=4)
    """Number of tars that a worker has in flight: one on the device, the next one preparing its first batches, and one
    being committed. Each tar needs scratch space for its latents, and for a copy of the tar until it is encoded. At
    most two tars' images are in memory. 1 processes one tar after another."""
    scratch: Annotated[Path, AfterValidator(Path.absolute)] | None = None
    """Local folder for temporary files: copies of tars from object stores and, if `output` is a URL, attempts, each as
    large as the tar's latents. Default: the system's temporary folder."""
    isolate_from: int = Field(2, ge=1)
    """First attempt at a tar in which images are decoded in child processes, so that an image that crashes its decoder
    is identified and rejected as `decoder_crash`; 1 always uses child processes."""

    @property
    def one_by_one(self) -> bool:
        """Whether only one tower is on the device at a time."""
        return self.towers == "one_by_one"

    def compiles(self, device: torch.device) -> bool:
        """Return whether the towers are compiled on `device`."""
        return is_accelerator(device) if self.compile is None else self.compile


@dataclass(frozen=True)
class SourceRoot:
    """The root from which a job derives a new root, and the conversion of its data."""

    place: Path | str
    conversion: Conversion


@dataclass(frozen=True)
class Recipe:
    """Everything that a worker needs to know about its job, except the tar, the root and the encoders."""

    encoding: EncodingRecord
    buckets: Buckets
    pixels: PixelsConfig
    limits: LimitsConfig
    tars: InputConfig
    worker: WorkerConfig
    batch_sizes: dict[str, int] = field(default_factory=dict)
    """Batch sizes for towers that override `worker.batch_size`, by `texts.NAME` or `features.NAME`."""
    source: SourceRoot | None = None
    """Root whose parts are converted; None for a job that encodes tars."""
    decode: Decode = decode
    tables: tuple[TableConfig, ...] = ()
    """Tables of captions and scores."""

    def batches(self, device: torch.device) -> dict[str, int | bool]:
        """Return the settings that affect rounding on `device`: batch sizes and compilation."""
        own = {f"batch_size.{name}": size for name, size in self.batch_sizes.items()}
        return {"batch_size": self.worker.batch_size, **own, "compile": self.worker.compiles(device)}
