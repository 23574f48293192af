"""Numbers about the world: each has a unit, and either a source or the mark `assumed`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field

ASSUMED = "assumed"

GPU_KINDS: dict[str, dict[str, tuple[float, str]]] = yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text())
"""Kind → field of the plan's `gpu` section → (value, source)."""


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
    facts = []
    for field, value, extra in _fact_fields(plan):
        known = (vouched.get(field, (None, ASSUMED)), (extra["vouched"], extra["source"]))
        facts.append(Fact(field, value, extra["unit"], next((source for of, source in known if of == value), ASSUMED)))
    return facts


def _fact_fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, float, dict[str, Any]]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _fact_fields(value, f"{prefix}{name}.")
        elif isinstance(field.json_schema_extra, dict) and "unit" in field.json_schema_extra:
            yield f"{prefix}{name}", value, field.json_schema_extra
