"""Numbers about the world: each has a unit, and either a source or the mark `assumed`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from train.model.flops import PEAK_TFLOPS

ASSUMED = "assumed"

# GPU kind → field of the plan's `gpu` section → (value, source). Datasheets: dense bf16 rate, memory bandwidth, and
# NVLink in one direction. A utilisation is achieved FLOP/s over `peak_tflops`, all overheads of one node included.
GPU_KINDS: dict[str, dict[str, tuple[float, str]]] = {
    "A100": {
        "price_per_hour": (2.0, "published: MosaicML's tables"),
        "peak_tflops": (PEAK_TFLOPS["A100"], "datasheet, SXM 80 GB"),
        "memory_gb_per_s": (2039.0, "datasheet, SXM 80 GB"),
        "link_gb_per_s": (300.0, "datasheet, SXM 80 GB"),
        "network_gbit_per_s": (1600.0, ASSUMED),
        "train_utilisation": (0.24, "follows from MosaicML's 1100 img/s at 256 px on 8 A100s (512 px: 0.28)"),
        "encode_utilisation": (0.267, "follows from MosaicML's 3,784 A100-hours, both sizes encoded for every picture"),
    },
    "H100": {
        "price_per_hour": (3.79, "follows from a peer's $1,890 for 2.6 days on 8 H100s"),
        "peak_tflops": (PEAK_TFLOPS["H100"], "datasheet, SXM"),
        "memory_gb_per_s": (3350.0, "datasheet, SXM"),
        "link_gb_per_s": (450.0, "datasheet, SXM"),
        "network_gbit_per_s": (3200.0, ASSUMED),
        "train_utilisation": (0.22, ASSUMED),
        "encode_utilisation": (0.22, ASSUMED),
    },
    "H200": {
        "price_per_hour": (4.0, ASSUMED),
        "peak_tflops": (PEAK_TFLOPS["H200"], "datasheet, SXM"),
        "memory_gb_per_s": (4800.0, "datasheet, SXM"),
        "link_gb_per_s": (450.0, "datasheet, SXM"),
        "network_gbit_per_s": (3200.0, ASSUMED),
        "train_utilisation": (0.22, ASSUMED),
        "encode_utilisation": (0.22, ASSUMED),
    },
}


@dataclass(frozen=True)
class Fact:
    """One number that a plan rests on."""

    field: str
    value: float
    unit: str
    source: str

    @property
    def assumed(self) -> bool:
        """Nobody measured or published it for this plan."""
        return self.source == ASSUMED


def fact(unit: str, default: float | None = None, source: str = ASSUMED, **limits: Any) -> Any:
    """A config field that is a number about the world. `source` vouches for the default alone."""
    extra: Any = {"unit": unit, "vouched": default, "source": source}
    start: Any = ... if default is None else default
    return Field(start, json_schema_extra=extra, **limits)


def list_facts(plan: BaseModel, vouched: Mapping[str, tuple[float, str]]) -> list[Fact]:
    """Every fact field of `plan`, with the source of its present value.

    Args:
        vouched: field → (value, source), beside the fields' own defaults. A field whose value is neither its vouched
            value nor its default has no source: it is assumed, whoever typed it.
    """
    return [
        Fact(field, value, extra["unit"], _source(value, vouched.get(field), (extra["vouched"], extra["source"])))
        for field, value, extra in _fact_fields(plan)
    ]


def _source(value: float, *known: tuple[float | None, str] | None) -> str:
    for entry in known:
        if entry and entry[0] == value:
            return entry[1]
    return ASSUMED


def _fact_fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, float, dict[str, Any]]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _fact_fields(value, f"{prefix}{name}.")
        elif isinstance(field.json_schema_extra, dict) and "unit" in field.json_schema_extra:
            yield f"{prefix}{name}", value, field.json_schema_extra
