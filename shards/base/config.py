"""Config loading: YAML files validated by pydantic models; `--a.b VALUE` on the command line overrides any field."""

import argparse
import difflib
import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError
from yaml.constructor import ConstructorError

from shards.base.durable import write_file
from shards.base.errors import RequestError
from shards.base.store import Place, parse_place


class Config(BaseModel):
    """Base class of every config section. Unknown keys are rejected, and a built config is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    short_for: ClassVar[dict[str, str]] = {}
    """Shorthand field → the field that it abbreviates. Setting the full field discards a shorthand inherited from a
    lower layer."""


ConfigT = TypeVar("ConfigT", bound=BaseModel)

MAX_SUGGESTION_FILES = 1000
"""Maximum number of files searched for a "did you mean" suggestion."""
OVERRIDDEN = "overridden"
"""Key of the validation context that holds the dotted paths of all fields set on the command line."""


def load_config(
    model: type[ConfigT], path: str | Path | None, overrides: list[str], prog: str, about: str | None = None
) -> ConfigT:
    """Read the YAML file at `path`, apply `--a.b VALUE` overrides and validate the result.

    Without a path, only the defaults and the overrides apply. A file with the key `base: other.yaml` inherits that
    file's values and may override them.

    If the overrides contain `--help`, print `about` (what the command does, its subcommands, examples) and every field,
    then exit with code 0.

    Raises:
        RequestError: the file is missing or is not YAML, a key is unknown (the message suggests the closest known key),
            or a value is invalid.
    """
    overridden = _parse_overrides(model, overrides, prog, about) if overrides else {}
    values = _merge(model, _read_yaml(model, path) if path else {}, overridden)
    try:
        return model.model_validate(values, context={OVERRIDDEN: set(flatten(overridden))})
    except ValidationError as error:
        source = f"{path} with its overrides" if path else "the command line"
        wrong = [_json_hint(overrides, _place(item)) or _explain(model, item) for item in error.errors()]
        raise RequestError(f"{source}: {'; '.join(dict.fromkeys(wrong))}.") from None


def load_from_args(model: type[ConfigT], arguments: list[str], prog: str, about: str | None) -> ConfigT:
    """Load the config file named by `--config`, treating all other arguments as overrides. See `load_config`."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    options, overrides = parser.parse_known_args(arguments)
    return load_config(model, options.config, overrides, prog, about)


def parse_subcommand(known: Iterable[str], arguments: list[str], prog: str, about: str | None) -> tuple[str, list[str]]:
    """Split the arguments into a subcommand and the arguments for it. Without arguments, or with `--help`, print
    `about` and exit with code 0. Raises RequestError if the subcommand is unknown."""
    word, *rest = arguments or ["--help"]
    if word in ("-h", "--help"):
        raw = argparse.RawDescriptionHelpFormatter
        argparse.ArgumentParser(f"python -m {prog}", description=about, formatter_class=raw).parse_args(["--help"])
    if word not in known:
        raise RequestError(f"python -m {prog} has no command `{word}`. Choose one of: {', '.join(known)}.")
    return word, rest


def load_for_run(model: type[ConfigT], arguments: list[str], command: str, about: str | None) -> tuple[Place, ConfigT]:
    """Parse the arguments of `python -m COMMAND RUN --a.b VALUE` into the run's location and the config. Raises
    RequestError if RUN is missing or `load_config` fails."""
    if not arguments or arguments[0].startswith("-"):
        if set(arguments) & {"-h", "--help"}:
            load_config(model, None, ["--help"], f"{command} RUN", about)
        raise RequestError(
            f"{command}: the RUN argument is missing. Pass it first: `python -m {command} RUN …`. --help lists the "
            f"options."
        )
    return parse_place(arguments[0]), load_config(model, None, arguments[1:], f"{command} RUN")


def flatten(values: dict[str, Any], separator: str = ".") -> dict[str, Any]:
    """Flatten nested sections into a dict keyed by dotted path, such as `a.b`. An empty section is kept as a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        below = flatten(value, separator) if isinstance(value, dict) else {}
        flat |= {f"{name}{separator}{key}": item for key, item in below.items()} or {name: value}
    return flat


def save_config(config: BaseModel, path: Path) -> None:
    """Write the resolved config durably as YAML, so that `load_config(type(config), path, [])` restores it."""
    write_file(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode())


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, as YAML 1.2 requires (3.2.1.3). PyYAML itself silently keeps the last
    value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the mapping after checking its keys for duplicates."""
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise ConstructorError(None, None, f"the key `{key.value}` is given twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(model: type[BaseModel], path: str | Path, derived: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file and its chain of `base` files, whose paths are relative to the file that names them."""
    try:
        values = yaml.load(Path(path).read_text(), _UniqueKeyLoader)
    except FileNotFoundError:
        named = f"Set `base` in {derived[-1]} to the path of an existing file" if derived else ""
        remedy = named or "Pass the path of an existing file"
        nearest = _nearest_file(Path(path), derived)
        raise RequestError(f"The config file {path} does not exist{nearest}. {remedy}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem, mark = getattr(error, "problem", None) or error, getattr(error, "problem_mark", None)
        at = f" (line {mark.line + 1})" if mark else ""
        raise RequestError(
            f"The config file {path} cannot be read as YAML: {problem}{at}. Fix the file and run the command again."
        ) from None
    if not isinstance(values, dict):
        raise RequestError(
            f"The config file {path} must contain `key: value` pairs, but its content has the type "
            f"{type(values).__name__}."
        )
    if (base := values.pop("base", None)) is None:
        return values
    if not isinstance(base, str) or not base:
        raise RequestError(f"The config file {path} has `base: {base!r}`; `base` must be the path of a config file.")
    parent, chain_so_far = Path(path).parent / base, (*derived, Path(path))
    if parent.resolve() in [file.resolve() for file in chain_so_far]:
        raise RequestError(
            f"The config file {path} has `base: {base}`, which in turn is based on this file. Remove one of the `base` "
            f"keys that form the cycle."
        )
    return _merge(model, _read_yaml(model, parent, chain_so_far), values)


def _parse_overrides(model: type[BaseModel], overrides: list[str], prog: str, about: str | None) -> dict[str, Any]:
    # The model is not validated here, because required fields may still come from the file.
    overrides, entries = _split_entries(model, overrides, prog)
    # The fields inherit their descriptions. Without this setting, pydantic would search all modules for their source.
    inherits = {"use_attribute_docstrings": False}
    settings: Any = create_model(
        model.__name__, __base__=(BaseSettings, model), __doc__=model.__doc__, __cls_kwargs__=inherits
    )
    try:
        source = CliSettingsSource[Any](
            settings,  # type: ignore[arg-type]
            cli_exit_on_error=False,
            cli_prog_name=prog,
            cli_avoid_json=True,
            cli_parse_none_str="null",
            cli_use_class_docs_for_groups=True,
        )
        # the default usage lists every field, which would push the description off the screen
        source.root_parser.usage = f"python -m {prog} [--FIELD VALUE …]"
        source.root_parser.description = inspect.cleandoc(about) if about else source.root_parser.description
        return _merge(model, source(args=overrides)(), entries)
    except SettingsError as error:
        known = _field_paths(model)
        hints = [f"--{name}{_nearest(name, known)}" for name, _ in _options(overrides) if name not in known]
        reason = f"unknown option {', '.join(hints)}" if hints else _json_hint(overrides)
        reason = reason or f"{str(error).removeprefix('error parsing CLI: ')}, in {' '.join(overrides)}"
        raise RequestError(f"{prog}: {reason}. `python -m {prog} --help` lists every option.") from None


def _split_entries(model: type[BaseModel], overrides: list[str], prog: str) -> tuple[list[str], dict[str, Any]]:
    """Extract options such as `--texts.t5.max_tokens 77`, which set values in sections whose names the model does not
    declare; pydantic-settings offers no such options.

    Return the remaining words, and the entries as nested dicts. Values stay text unless they are `null` or JSON. Raises
    RequestError if an option has no value, or contradicts another one.
    """
    rest: list[str] = []
    entries: dict[str, Any] = {}
    words = iter(overrides)
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        *path, last = name.split(".")
        if not (word.startswith("--") and _is_undeclared(model, [*path, last])):
            rest.append(word)
            continue
        text = value if has_value else next(words, "--")
        if not has_value and text.startswith("--"):
            raise RequestError(f"{prog}: {word} has no value. Put one after it.")
        section = entries
        for key in path:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise RequestError(f"{word} contradicts another option, which sets {key} itself. Use one of them.")
        section[last] = _parse_value(text)
    return rest, entries


def _parse_value(text: str) -> Any:
    """Parse `null`, a list or a dict. Any other text, including invalid JSON, is returned for pydantic to validate."""
    if text == "null" or text.startswith(("[", "{")):
        with suppress(ValueError):
            return json.loads(text)
    return text


def _is_undeclared(model: Any, path: list[str]) -> bool:
    """Return whether a path of keys names a section that a model accepts without declaring its name: an entry in a dict
    of sections, or an additional field."""
    name, *below = path
    field = model.model_fields.get(name)
    if field is None:
        return bool(model.model_config.get("extra") == "allow")
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind is not None]
    if get_origin(field.annotation) is dict:
        return bool(below) and any(_is_section(kind) for kind in (kinds[-1], *get_args(kinds[-1])))
    return bool(below) and any(_is_undeclared(kind, below) for kind in kinds if _is_section(kind))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _options(overrides: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each option's name and its value, including any words up to the next option."""
    for i, word in enumerate(overrides):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            behind = takewhile(lambda word: not word.startswith("--"), overrides[i + 1 :])
            yield name, " ".join([*filter(None, [value]), *behind])


def _json_hint(overrides: list[str], place: str | None = None) -> str:
    """Return a hint if an option's value looks like JSON but does not parse. With `place`, check only the option that
    sets that field."""
    for name, text in _options(overrides):
        if text.startswith(("[", "{")) and (place is None or f"{place}.".startswith(f"{name}.")):
            try:
                json.loads(text)
            except ValueError:
                quoted = '[{"name": "value"}]' if text.startswith("[") else '{"name": "value"}'
                escaped = quoted.replace('"', '\\"')
                return (
                    f"--{name} arrived as {text}, which is not valid JSON. If the shell removed the quotes, put single "
                    f"""quotes around the value: --{name} '{quoted}', or with make: ARGS="--{name} '{escaped}'\""""
                )
    return ""


def _merge(model: Any, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge the values from a file or the command line over a lower layer's values, section by section."""
    shorthands = getattr(model, "short_for", {})
    merged = {key: value for key, value in below.items() if shorthands.get(key) not in above}
    for key, value in above.items():
        both_are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        field = getattr(model, "model_fields", {}).get(key)
        merged[key] = _merge(field and field.annotation, merged[key], value) if both_are_sections else value
    return merged


def _place(item: Any) -> str:
    return ".".join(str(part) for part in item["loc"])


def _explain(model: type[BaseModel], item: Any) -> str:
    place = _place(item) or "config"
    if item["type"] == "extra_forbidden":
        known = _field_paths(model)  # has `place` if the key is valid for another `kind`
        return f"unknown key `{place}`{_nearest(place, known) if place not in known else ''}"
    if item["type"] == "missing":
        return f"`{place}` is missing: set it in the file or with --{place} VALUE"
    message = item["msg"].removeprefix("Value error, ").rstrip(".")
    # a whole section would clutter the message
    value = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
    return f"`{place}`{value}: {message[0].lower()}{message[1:]}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _nearest_file(path: Path, excluded: tuple[Path, ...]) -> str:
    """Suggest a YAML file with a similar path, at most one folder below the closest existing parent folder."""
    try:
        folder = next(each for each in path.parents if each.is_dir())
        if str(folder) == path.anchor:  # do not scan the file system from its root
            return ""
        found = islice(chain(folder.glob("*.yaml"), folder.glob("*/*.yaml")), MAX_SUGGESTION_FILES)
        names = {str(file.relative_to(folder)): file for file in found if file not in excluded}
    except OSError:
        return ""
    close = difflib.get_close_matches(str(path.relative_to(folder)), sorted(names), n=1, cutoff=0.65)
    return f" (did you mean `{names[close[0]]}`?)" if close else ""


def _field_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    paths = []
    for name, field in model.model_fields.items():
        paths.append(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths += _field_paths(field.annotation, f"{prefix}{name}.")
    return paths
