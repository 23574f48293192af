"""Generate docs/reference/config.md from the config models and their docstrings: `python docs/generate.py`."""

import json
import sys
import textwrap
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "reference" / "config.md"
COMMANDS = {
    "precompute": ("configs/precompute.yaml", "precompute.config:PrecomputeConfig"),
    "train": ("configs/phase1.yaml", "train.config:TrainConfig"),
    "train export RUN": (None, "train.export.pipeline:ExportConfig"),
    "train ema RUN": (None, "train.export.posthoc:RebuildConfig"),
    "precompute.select": ("configs/select.yaml", "precompute.select.config:SelectConfig"),
    "precompute.download": ("configs/download.yaml", "precompute.download.config:DownloadConfig"),
    "plan": ("configs/plan.yaml", "plan.config:Plan"),
    "evaluation score": ("configs/evaluate.yaml", "evaluation.config:EvaluateConfig"),
    "evaluation.study prepare": ("configs/study.yaml", "evaluation.study.config:StudyConfig"),
    "evaluation watch RUN": ("configs/evaluate.yaml", "evaluation.config:WatchConfig"),
    "evaluation report RUN…": (None, "evaluation.report.page:ReportConfig"),
}
"""Default config file and config class of each command."""
HEAD = """\
# Config reference

`make docs` generates this page from the docstrings in the code. Do not edit it.

Set a field in the command's YAML file, or override it on the command line with `--a.b value`.
`base: other.yaml` loads other.yaml first and overrides its fields; the path is relative to the
file that contains the `base` key. Separate list items with commas: `--buckets 256x256,512x512`.
Pass nested values as JSON in single quotes. `null` unsets an optional field. Unknown fields are
rejected, and the error suggests the closest name.
"""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}
NAMES = {"str": "text", "Path": "path", "int": "integer", "float": "number", "bool": "true or false"}


def reference() -> str:
    """Return the page as Markdown."""
    page = [HEAD]
    listed: dict[type[BaseModel], str] = {}
    for command, (file, place) in COMMANDS.items():
        module, _, name = place.partition(":")
        model = getattr(import_module(module), name)
        base = next((other for other in model.__mro__[1:] if other in listed), None)
        typed = f"`python -m {command}`" + (f", with `{file}`" if file else "")
        more = f" This command has all fields of `{listed[base]}`, and these:" if base else ""
        known = set(base.model_fields) - set(model.__annotations__) if base else set()
        page += [
            f"## {command}",
            "",
            wrapped(f"{typed}. {model.__doc__}{more}"),
            "",
            *lines(model, {}, known=known),
            "",
        ]
        listed[model] = command
    return "\n".join(page)


def lines(
    model: type[BaseModel], seen: dict[Any, str], prefix: str = "", defaults: Any = None, known: Collection[str] = ()
) -> Iterator[str]:
    """List the fields of `model` and its sections.

    Args:
        seen: path of each section listed so far. Later occurrences refer to that path. Extended in place.
        defaults: instance of `model` whose values replace the fields' own defaults.
        known: names of fields to omit.
    """
    sections = []
    for name, field in ((name, field) for name, field in model.model_fields.items() if name not in known):
        path = prefix + name
        default = getattr(defaults, name) if defaults is not None else field.get_default(call_default_factory=True)
        within = list(models_in(field.annotation))
        if within != [field.annotation] or seen.get(within[0]):
            yield item(path, field, default, seen.get(within[0], "") if within else "")
        path += "[]" if get_origin(field.annotation) is list else ""
        for section in within:
            if section not in seen:
                seen[section] = path
                sections.append((path, section, default))
    for path, section, default in sections:
        kind = section.model_fields.get("kind") if sum(other == path for other, *_ in sections) > 1 else None
        of_kind = f", kind {get_args(kind.annotation)[0]}" if kind else ""
        yield from ["", f"### {path}{of_kind}", "", wrapped(section.__doc__ or ""), ""]
        yield from lines(section, seen, f"{path}.", default if isinstance(default, BaseModel) else None)


def item(path: str, field: FieldInfo, default: Any, section: str) -> str:
    """Format a field as ``- `path`: type; default. Meaning``.

    Args:
        section: path under which the fields of the same class are already listed, or an empty string.
    """
    bounds = [f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in BOUNDS.items() if hasattr(m, key)]
    words = [", ".join([type_name(field.annotation), *bounds])]
    if not isinstance(default, BaseModel):
        words.append("required" if default is PydanticUndefined else f"default `{shown(default)}`")
    meaning = [field.description, f"Fields as in `{section}`." if section else None]
    return wrapped(" ".join([f"`{path}`: {'; '.join(words)}.", *filter(None, meaning)]), "- ")


def type_name(kind: Any) -> str:
    """Describe a type in words."""
    if hasattr(kind, "__metadata__"):  # unwrap Annotated[T, …]; only `item` shows bounds
        return type_name(kind.__origin__)
    if get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    inner = [type_name(part) for part in get_args(kind) if part is not Ellipsis]
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys(inner))
    if get_origin(kind) in (list, tuple):
        return f"list of {inner[0]}"
    if get_origin(kind) is dict:
        return f"table of {inner[0]} → {inner[1]}"
    if next(models_in(kind), None):
        return "section"
    return "null" if kind is NoneType else NAMES.get(kind.__name__, kind.__name__)


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the config classes that occur in a field's type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from models_in(part)


def shown(value: Any) -> str:
    """Format a default value as it would be written in YAML or on the command line."""
    if value is None or isinstance(value, bool | dict):
        return json.dumps(value, default=lambda model: model.model_dump(mode="json", exclude_none=True))
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)


def wrapped(text: str, bullet: str = "") -> str:
    """Wrap a paragraph or list item at 100 columns."""
    return textwrap.fill(" ".join(text.split()), 100, initial_indent=bullet, subsequent_indent=" " * len(bullet))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    TARGET.write_text(reference())
