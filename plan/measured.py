"""Benchmark files: what `bench/encode.py` and `bench/train_step.py` write, what somebody published, or what
`bench/roofline` models where there is neither."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from shards.base.config import Config
from shards.base.errors import RequestError

SAME_KIND = re.compile(r"nvidia|tesla|quadro|geforce|amd|instinct|generation|gpu|sxm\d*|oam|hbm\w*|\d+gb?|\d+tb")
"""Words of a device name that do not tell one kind of GPU from another: vendor, brand, module form, memory."""


class Measurement(Config):
    """One rate on one number of GPUs."""

    stage: Literal["train", "encode", "text", "decode", "decode_on_gpu"]
    """`train`: images through training steps; `encode`: pictures from tar bytes to moments; `text`: captions; `decode`:
    pictures from their files to every bucket's pixels, by one core; `decode_on_gpu`: JPEGs to pixels, by the GPU."""
    bucket: str | None = None
    """WIDTHxHEIGHT, of `train` and `encode`."""
    images_per_second_per_gpu: float = Field(gt=0)
    """Captions per second for `text`; per core for `decode`."""
    gpus: int | None = Field(None, gt=0)
    """Where it differs from the file's."""
    global_batch_size: int | None = Field(None, gt=0)
    """For `train`; none: the plan's."""
    microbatch_size: int | None = Field(None, gt=0)
    """For `train`; none: the plan's."""

    @model_validator(mode="after")
    def _has_a_bucket(self) -> "Measurement":
        of_bucket = self.stage in ("train", "encode")
        if of_bucket != (self.bucket is not None):
            raise ValueError(f"a {self.stage} measurement {'needs a' if of_bucket else 'has no'} bucket")
        return self


class BenchFile(Config):
    """A run of a benchmark."""

    device: str
    """As torch.cuda.get_device_name() says; it names the GPU kind."""
    gpus: int = Field(gt=0)
    """GPUs of the run."""
    date: str
    """YYYY-MM-DD, or the year of a publication."""
    command: str
    """What was run; for a published figure, where it stands."""
    published: bool = False
    """Taken from a publication, not measured here."""
    modelled: bool = False
    """Worked out, not measured; it stands where nothing else says how fast a stage is, and counts as assumed."""
    measurements: list[Measurement]
    details: dict[str, Any] = Field({})
    """What else the run found; a plan leaves it aside."""


@dataclass(frozen=True)
class Rate:
    """A throughput, and how it is known."""

    images_per_second_per_gpu: float
    gpus: int
    source: str
    global_batch_size: int | None = None
    microbatch_size: int | None = None
    assumed: bool = False
    modelled: bool = False
    """Assumed, too, but worked out of more than a utilisation."""


@dataclass(frozen=True)
class Rates:
    """The measurements that a plan can use, and the files that it cannot."""

    by_stage: dict[tuple[str, str | None], list[Rate]]
    left_aside: list[str]

    def of(self, stage: str, bucket: str | None) -> list[Rate]:
        """Rates of one stage and bucket, in order of their GPUs."""
        return sorted(self.by_stage.get((stage, bucket), []), key=lambda rate: rate.gpus)


def read_rates(paths: Iterable[str], gpu_kind: str) -> Rates:
    """Read benchmark files; those measured on a GPU of another kind are left aside, and named.

    Raises:
        RequestError: a file is missing or is no benchmark file, or two give the same stage, bucket and GPUs.
    """
    by_stage: dict[tuple[str, str | None], list[Rate]] = {}
    left_aside = []
    benches = [(path, _read(path)) for path in paths]
    for path, bench in sorted(benches, key=lambda pair: pair[1].modelled):
        if not is_of_kind(bench.device, gpu_kind):
            left_aside.append(f"{path} (measured on {bench.device})")
            continue
        verb = "modelled" if bench.modelled else "published" if bench.published else "measured"
        for item in bench.measurements:
            rates = by_stage.setdefault((item.stage, item.bucket), [])
            if bench.modelled and any(not rate.modelled for rate in rates):
                continue
            gpus = item.gpus or bench.gpus
            if any(rate.gpus == gpus for rate in rates):
                raise RequestError(
                    f"{path} is the second benchmark of {item.stage} {item.bucket or ''} on {gpus} {gpu_kind}s "
                    f"among `measured`. Keep one of them."
                )
            source = f"{verb} {bench.date}: {bench.command}"
            rates.append(
                Rate(
                    item.images_per_second_per_gpu,
                    gpus,
                    source,
                    item.global_batch_size,
                    item.microbatch_size,
                    assumed=bench.modelled,
                    modelled=bench.modelled,
                )
            )
    return Rates(by_stage, left_aside)


def is_of_kind(device: str, kind: str) -> bool:
    """Whether a device, as torch.cuda.get_device_name() calls it, is a GPU of this kind.

    It is if the kind's words occur in its name in a row and the other words are about vendor, module or memory. So an
    H100 PCIe, an RTX 4090 Laptop GPU and a MIG slice are kinds of their own.
    """
    name, wanted = (re.findall(r"[a-z0-9.]+", text.lower()) for text in (device, kind))
    starts = [i for i in range(len(name) - len(wanted) + 1) if wanted and name[i : i + len(wanted)] == wanted]
    return any(all(map(SAME_KIND.fullmatch, name[:i] + name[i + len(wanted) :])) for i in starts)


def _read(path: str) -> BenchFile:
    try:
        return BenchFile.model_validate_json(Path(path).read_bytes())
    except FileNotFoundError:
        raise RequestError(f"There is no benchmark file {path}. Make it, or take it out of `measured`.") from None
    except OSError as error:
        raise RequestError(
            f"The benchmark file {path or '``'} cannot be read: {error.strerror}. `--measured []` plans with none."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        raise RequestError(
            f"{path} is no benchmark file: `{place}`: {first['msg'].removeprefix('Value error, ')}. "
            f"docs/how-to/plan.md shows one."
        ) from None
