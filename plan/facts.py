"""Numeric inputs of a plan. Each has a unit and either a source or the mark `assumed`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field

ASSUMED = "assumed"

GPU_KINDS: dict[str, dict[str, tuple[float, str]]] = yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text())
"""Default (value, source) of each field in the plan's `gpu` section, by GPU kind."""


@dataclass(frozen=True)
class Fact:
    """A numeric input of a plan, with its unit and source."""

    field: str
    value: float
    unit: str
    source: str

    @property
    def assumed(self) -> bool:
        """Whether the value has no source."""
        return self.source == ASSUMED


def fact(unit: str, default: float | None = None, source: str = ASSUMED, **limits: Any) -> Any:
    """Define a config field for a numeric input of the plan. `source` applies only to the default value."""
    extra: Any = {"unit": unit, "sourced_value": default, "source": source}
    start: Any = ... if default is None else default
    return Field(start, json_schema_extra=extra, **limits)


def list_facts(plan: BaseModel, sources: Mapping[str, tuple[float, str]]) -> list[Fact]:
    """Return every numeric input of `plan` with the source of its current value.

    Args:
        sources: (value, source) by field, in addition to the fields' default sources. A field whose value is neither
            the sourced one nor the default is marked as assumed, because neither source applies to it.
    """
    facts = []
    for field, value, extra in _fact_fields(plan):
        candidates = (sources.get(field, (None, ASSUMED)), (extra["sourced_value"], extra["source"]))
        source = next((source for sourced, source in candidates if sourced == value), ASSUMED)
        facts.append(Fact(field, value, extra["unit"], source))
    return facts


def _fact_fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, float, dict[str, Any]]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _fact_fields(value, f"{prefix}{name}.")
        elif isinstance(field.json_schema_extra, dict) and "unit" in field.json_schema_extra:
            yield f"{prefix}{name}", value, field.json_schema_extra
