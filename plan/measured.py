"""Benchmark files, with rates that bench/encode.py or bench/train_step.py measured, or that were published."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from shards.base.config import Config
from shards.base.errors import RequestError
from shards.format.buckets import BucketName

IGNORED_WORDS = re.compile(r"nvidia|tesla|quadro|geforce|amd|instinct|generation|gpu|sxm\d*|oam|hbm\w*|\d+gb?|\d+tb")
"""Words in a device name that do not identify the GPU kind: vendor, brand, form factor and memory."""


class Measurement(Config):
    """Throughput of one stage on a given number of GPUs."""

    stage: Literal["train", "encode", "text", "decode", "decode_on_gpu"]
    """Stage to which the rate applies. `train`: training steps; `encode`: encoding images, from pixels to moments;
    `text`: encoding captions; `decode`: decoding image files into the pixels of every bucket, on one CPU core;
    `decode_on_gpu`: decoding JPEG files on the GPU."""
    bucket: BucketName | None = None
    """Bucket (WIDTHxHEIGHT); required for `train` and `encode`, not allowed for other stages."""
    images_per_second_per_gpu: float = Field(gt=0)
    """Images per second per GPU. For `text`, captions per second per GPU. For `decode`, images per second per CPU
    core."""
    gpus: int | None = Field(None, gt=0)
    """Number of GPUs; null: the file's `gpus`."""
    global_batch_size: int | None = Field(None, gt=0)
    """Global batch size of a `train` measurement; null: the plan's global batch size."""
    microbatch_size: int | None = Field(None, gt=0)
    """Microbatch size of a `train` measurement; null: the plan's microbatch size."""

    @model_validator(mode="after")
    def _has_a_bucket(self) -> "Measurement":
        needs_bucket = self.stage in ("train", "encode")
        if needs_bucket != (self.bucket is not None):
            verb = "must" if needs_bucket else "must not"
            raise ValueError(f"a measurement of stage `{self.stage}` {verb} have a bucket")
        return self


class BenchFile(Config):
    """Results of one benchmark run."""

    device: str
    """Device name from torch.cuda.get_device_name(). It is matched against the plan's `gpu.kind`."""
    gpus: int = Field(gt=0)
    """Number of GPUs in the run."""
    date: str
    """Date of the run (YYYY-MM-DD), or year of publication."""
    command: str
    """Command that was run, or the reference for a published figure."""
    published: bool = False
    """Whether the figures come from a publication."""
    measurements: list[Measurement]
    details: dict[str, Any] = Field({})
    """Other results of the run; the planner ignores them."""


@dataclass(frozen=True)
class Rate:
    """A throughput and its source."""

    images_per_second_per_gpu: float
    gpus: int
    source: str
    global_batch_size: int | None = None
    microbatch_size: int | None = None
    assumed: bool = False
    """Whether the rate follows from an assumed utilisation. In training, such a rate covers only the forward and
    backward pass, whereas a measured or published rate includes the optimizer and the traffic between GPUs."""


@dataclass(frozen=True)
class Rates:
    """Rates for the plan's GPU kind, and the benchmark files that were skipped because they are for other kinds."""

    by_stage: dict[tuple[str, str | None], list[Rate]]
    skipped_files: list[str]

    def of(self, stage: str, bucket: str | None) -> list[Rate]:
        """Return the rates of a stage and bucket, sorted by number of GPUs."""
        return sorted(self.by_stage.get((stage, bucket), []), key=lambda rate: rate.gpus)


def read_rates(paths: Iterable[str], gpu_kind: str) -> Rates:
    """Read benchmark files, skipping those measured on a different GPU kind.

    Raises:
        RequestError: a file is missing or invalid, or the same stage and bucket was measured twice on the same number
            of GPUs.
    """
    by_stage: dict[tuple[str, str | None], list[Rate]] = {}
    skipped_files = []
    for path in paths:
        bench = _read(path)
        if not matches_gpu_kind(bench.device, gpu_kind):
            skipped_files.append(f"{path} (measured on {bench.device})")
            continue
        verb = "published" if bench.published else "measured"
        for item in bench.measurements:
            rates = by_stage.setdefault((item.stage, item.bucket), [])
            gpus = item.gpus or bench.gpus
            if any(rate.gpus == gpus for rate in rates):
                raise RequestError(
                    f"{path} repeats a measurement that another of the benchmark files contains: "
                    f"{' '.join(filter(None, (item.stage, item.bucket)))} on {gpus} × {gpu_kind}. Keep only one of "
                    f"them."
                )
            source = f"{verb} {bench.date}: {bench.command}"
            batch_sizes = (item.global_batch_size, item.microbatch_size)
            rates.append(Rate(item.images_per_second_per_gpu, gpus, source, *batch_sizes))
    return Rates(by_stage, skipped_files)


def matches_gpu_kind(device: str, kind: str) -> bool:
    """Return whether a device name from torch.cuda.get_device_name() denotes the given GPU kind.

    The words of the kind must occur consecutively in the name, and all other words must match `IGNORED_WORDS`. An H100
    PCIe, an RTX 4090 Laptop GPU and a MIG slice are therefore different kinds from the full GPU.
    """
    name, wanted = (re.findall(r"[a-z0-9.]+", text.lower()) for text in (device, kind))
    starts = [i for i in range(len(name) - len(wanted) + 1) if wanted and name[i : i + len(wanted)] == wanted]
    return any(all(map(IGNORED_WORDS.fullmatch, name[:i] + name[i + len(wanted) :])) for i in starts)


def _read(path: str) -> BenchFile:
    try:
        return BenchFile.model_validate_json(Path(path).read_bytes())
    except FileNotFoundError:
        message = f"The benchmark file {path} does not exist. Correct the path, or leave it out."
        raise RequestError(message) from None
    except OSError as error:
        raise RequestError(
            f"The benchmark file {path or '``'} cannot be read: {error.strerror}. Correct the path, or leave "
            f"it out (`--measured []` plans without benchmark files)."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        reason = f"`{place}`: {first['msg'].removeprefix('Value error, ')}"
        if first["type"] == "extra_forbidden":
            reason = f"unknown key `{place}`"
        raise RequestError(
            f"{path} is not a valid benchmark file: {reason}. docs/how-to/plan.md has an example."
        ) from None
