"""Writes docs/reference/config.md from the config models and their docstrings: `python docs/generate.py`."""

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
    "evaluate score": ("configs/evaluate.yaml", "evaluate.config:EvaluateConfig"),
    "evaluate.study prepare": ("configs/study.yaml", "evaluate.study.config:StudyConfig"),
    "evaluate watch RUN": ("configs/evaluate.yaml", "evaluate.config:WatchConfig"),
    "evaluate report RUN…": (None, "evaluate.report.page:ReportConfig"),
}
"""Command → (its config file, the class of its config): the one place that knows where they are."""
HEAD = """\
# Config reference

`make docs` writes this page from the docstrings in the code. Do not edit it.

Every field can stand in the command's YAML file, or be given as `--a.b value`, which wins.
A file with `base: other.yaml` is laid over that file. The path is relative to its own folder.
A list of words takes commas: `--buckets 256x256,512x512`. Anything deeper is JSON in single quotes.
`null` is none. Unknown fields are refused, with the nearest name.
"""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}
NAMES = {"str": "text", "Path": "path", "int": "integer", "float": "number", "bool": "true or false"}


def reference() -> str:
    """The whole page."""
    page = [HEAD]
    listed: dict[type[BaseModel], str] = {}
    for command, (file, place) in COMMANDS.items():
        module, _, name = place.partition(":")
        model = getattr(import_module(module), name)
        base = next((other for other in model.__mro__[1:] if other in listed), None)
        typed = f"`python -m {command}`" + (f", with `{file}`" if file else "")
        more = f" All fields of `{listed[base]}`, and these:" if base else ""
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
    """A list item for each field of `model` but the `known`, then its sections, those `seen` before by place alone."""
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
    """``- `path`: type, default. Meaning``; `section` is where the fields of its kind are listed."""
    bounds = [f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in BOUNDS.items() if hasattr(m, key)]
    words = [", ".join([type_name(field.annotation), *bounds])]
    if not isinstance(default, BaseModel):
        words.append("required" if default is PydanticUndefined else f"default `{shown(default)}`")
    meaning = [field.description, f"Fields as in `{section}`." if section else None]
    return wrapped(" ".join([f"`{path}`: {'; '.join(words)}.", *filter(None, meaning)]), "- ")


def type_name(kind: Any) -> str:
    """A type, for people."""
    if hasattr(kind, "__metadata__"):  # Annotated: its bounds are shown for fields alone
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
    """The config sections that a field's type names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from models_in(part)


def shown(value: Any) -> str:
    """A default as one types it."""
    if value is None or isinstance(value, bool | dict):
        return json.dumps(value, default=lambda model: model.model_dump(mode="json", exclude_none=True))
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)


def wrapped(text: str, bullet: str = "") -> str:
    """A paragraph, or a list item, within 100 columns."""
    return textwrap.fill(" ".join(text.split()), 100, initial_indent=bullet, subsequent_indent=" " * len(bullet))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    TARGET.write_text(reference())
