"""Config files: YAML, with every field open to `--a.b value` on the command line, checked by pydantic models."""

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

from shards.base.errors import RequestError
from shards.base.store import Place, parse_place


class Config(BaseModel):
    """Base of every config section: unknown keys are refused, and a built config does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    short_for: ClassVar[dict[str, str]] = {}
    """Field that is short for another → that one; where a file or the command line gives that, what was below goes."""


ConfigT = TypeVar("ConfigT", bound=BaseModel)

MOST_FILES = 1000
"""Looked at for the name that may be meant."""
GIVEN = "given"
"""Under this key of its context a validator finds the paths of the fields that the command line gave."""


def load_config(
    model: type[ConfigT], path: str | Path | None, overrides: list[str], prog: str, about: str | None = None
) -> ConfigT:
    """Read the YAML file at `path` (none: defaults only), lay `--a.b value` overrides over it, and validate.

    A file with `base: other.yaml` holds what differs from that one.

    `--help` among the overrides prints `about` (what the command does, its subcommands, examples) and every field, and
    exits with 0.

    Raises:
        RequestError: no such file, not YAML, an unknown key (with the nearest known one), or a value out of range.
    """
    given = _parse_overrides(model, overrides, prog, about)
    values = _lay(model, _read_yaml(model, path) if path else {}, given)
    try:
        return model.model_validate(values, context={GIVEN: set(flatten(given))})
    except ValidationError as error:
        source = f"{path} with its overrides" if path else "the command line"
        wrong = [_no_json(overrides, _place(item)) or _explain(model, item) for item in error.errors()]
        raise RequestError(f"{source}: {'; '.join(dict.fromkeys(wrong))}.") from None


def load_asked(model: type[ConfigT], arguments: list[str], prog: str, about: str | None) -> ConfigT:
    """What `load_config` makes of the file that `--config` names, and of all other arguments as overrides."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    options, overrides = parser.parse_known_args(arguments)
    return load_config(model, options.config, overrides, prog, about)


def first_word(known: Iterable[str], arguments: list[str], prog: str, about: str | None) -> tuple[str, list[str]]:
    """The subcommand that the first argument names, and the arguments behind it; none, or `--help`, prints `about`.

    Raises:
        RequestError: there is no such subcommand.
    """
    word, *rest = arguments or ["--help"]
    if word in ("-h", "--help"):
        raw = argparse.RawDescriptionHelpFormatter
        argparse.ArgumentParser(f"python -m {prog}", description=about, formatter_class=raw).parse_args(["--help"])
    if word not in known:
        raise RequestError(f"python -m {prog} has no command {word}; it has {', '.join(known)}.")
    return word, rest


def load_named(model: type[ConfigT], arguments: list[str], command: str, about: str | None) -> tuple[Place, ConfigT]:
    """The run that the first argument names, and the options behind it, for `python -m COMMAND RUN --a.b value`.

    Raises:
        RequestError: it begins with an option, or as `load_config`.
    """
    if not arguments or arguments[0].startswith("-"):
        if set(arguments) & {"-h", "--help"}:
            load_config(model, None, ["--help"], f"{command} RUN", about)
        raise RequestError(f"{command}: name the run first: `python -m {command} RUN …`; --help lists the options.")
    return parse_place(arguments[0]), load_config(model, None, arguments[1:], f"{command} RUN")


def flatten(values: dict[str, Any], separator: str = ".") -> dict[str, Any]:
    """`a.b` → value, for every value that is no section, or an empty one."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        below = flatten(value, separator) if isinstance(value, dict) else {}
        flat |= {f"{name}{separator}{key}": item for key, item in below.items()} or {name: value}
    return flat


def save_config(config: BaseModel, path: Path) -> None:
    """Write the resolved config as YAML, so that `load_config(type(config), path, [])` gives it back."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


class _EachKeyOnce(yaml.SafeLoader):
    """Refuses a key that stands twice, as YAML 1.2 does (3.2.1.3); PyYAML would take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As `SafeLoader`."""
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise ConstructorError(None, None, f"the key {key.value} stands there twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(model: type[BaseModel], path: str | Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file's values, laid over those of the file that its `base` names, relative to its own folder."""
    try:
        values = yaml.load(Path(path).read_text(), _EachKeyOnce)
    except FileNotFoundError:
        remedy = f"{above[-1]} names it as its `base`: mend that" if above else "Give one with --config PATH"
        nearest = _nearest_file(Path(path), above)
        raise RequestError(f"There is no config file {path}{nearest}. {remedy}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        what, mark = getattr(error, "problem", None) or error, getattr(error, "problem_mark", None)
        at = f" (line {mark.line + 1})" if mark else ""
        raise RequestError(f"The config file {path} cannot be read as YAML: {what}{at}. Mend it.") from None
    if not isinstance(values, dict):
        raise RequestError(f"The config file {path} holds {type(values).__name__}, not `key: value` pairs.")
    if (base := values.pop("base", None)) is None:
        return values
    if not isinstance(base, str) or not base:
        raise RequestError(f"The config file {path} has `base: {base!r}`. Give the path of a config file.")
    below, through = Path(path).parent / base, (*above, Path(path))
    if below.resolve() in [file.resolve() for file in through]:
        raise RequestError(f"The config file {path} has `base: {base}`, which is based on it in turn. Remove one.")
    return _lay(model, _read_yaml(model, below, through), values)


def _parse_overrides(
    model: type[BaseModel], overrides: list[str], prog: str, about: str | None = None
) -> dict[str, Any]:
    # The command line alone is read here: required fields may still come from the file.
    overrides, entries = _split_entries(model, overrides)
    settings: Any = create_model(model.__name__, __base__=(BaseSettings, model), __doc__=model.__doc__)
    try:
        source = CliSettingsSource[Any](
            settings,  # type: ignore[arg-type]
            cli_exit_on_error=False,
            cli_prog_name=prog,
            cli_avoid_json=True,
            cli_parse_none_str="null",
            cli_use_class_docs_for_groups=True,
        )
        # by itself the usage lists every field, of which a screen is full before anything is said
        source.root_parser.usage = f"python -m {prog} [--FIELD VALUE …]"
        source.root_parser.description = inspect.cleandoc(about) if about else source.root_parser.description
        return _lay(model, source(args=overrides)(), entries)
    except SettingsError as error:
        known = _field_paths(model)
        hints = [f"--{name}{_nearest(name, known)}" for name, _ in _options(overrides) if name not in known]
        if hints:
            reason = f"unknown option {', '.join(hints)}"
        else:
            reason = (
                _no_json(overrides) or f"{str(error).removeprefix('error parsing CLI: ')}, in {' '.join(overrides)}"
            )
        raise RequestError(f"{prog}: {reason}. `{prog} --help` lists every option.") from None


def _split_entries(model: type[BaseModel], overrides: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Take options such as `--texts.t5.max_tokens 77` out, which name an entry of a field that holds sections by name.

    pydantic-settings has no options for these, since it cannot know the names.

    Returns:
        The other words, and the entries as nested dicts. Values stay text unless they are `null` or JSON.
    """
    rest: list[str] = []
    entries: dict[str, Any] = {}
    words = iter(overrides)
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        field, _, below = name.partition(".")
        if not (word.startswith("--") and below and _holds_sections(model, field)):
            rest.append(word)
            continue
        text = value if has_value else next(words, "")
        section = entries.setdefault(field, {})
        *path, last = below.split(".")
        for key in path:
            section = section.setdefault(key, {})
        section[last] = _parse_value(text)
    return rest, entries


def _parse_value(text: str) -> Any:
    """Parse `null`, a list or a dict; all else, and what is no JSON, stays text for pydantic to judge."""
    if text == "null" or text.startswith(("[", "{")):
        with suppress(ValueError):
            return json.loads(text)
    return text


def _holds_sections(model: type[BaseModel], name: str) -> bool:
    """Return whether a field of `model` is a dict of config sections."""
    field = model.model_fields.get(name)
    if field is None or get_origin(field.annotation) is not dict:
        return False
    _, value = get_args(field.annotation)
    return isinstance(value, type) and issubclass(value, BaseModel)


def _options(overrides: list[str]) -> Iterator[tuple[str, str]]:
    """Each option's name and what stands behind it, as far as the next one."""
    for i, word in enumerate(overrides):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            behind = takewhile(lambda word: not word.startswith("--"), overrides[i + 1 :])
            yield name, " ".join([*filter(None, [value]), *behind])


def _no_json(overrides: list[str], place: str | None = None) -> str:
    """What to say of an option whose value should have been JSON; of any, or of the one that gave the field `place`."""
    for name, text in _options(overrides):
        if text.startswith(("[", "{")) and (place is None or f"{place}.".startswith(f"{name}.")):
            try:
                json.loads(text)
            except ValueError:
                quoted = '[{"name": "value"}]' if text.startswith("[") else '{"name": "value"}'
                escaped = quoted.replace('"', '\\"')
                return (
                    f"--{name} was read as {text}, which is no JSON. If the shell took its quotes away, put single "
                    f"""ones around it, --{name} '{quoted}', and behind make, ARGS="--{name} '{escaped}'\""""
                )
    return ""


def _lay(model: Any, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Values of a file or the command line, laid over those below, section by section."""
    shorts = getattr(model, "short_for", {})
    merged = {key: value for key, value in below.items() if shorts.get(key) not in above}
    for key, value in above.items():
        both_are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        field = getattr(model, "model_fields", {}).get(key)
        merged[key] = _lay(field and field.annotation, merged[key], value) if both_are_sections else value
    return merged


def _place(item: Any) -> str:
    return ".".join(str(part) for part in item["loc"])


def _explain(model: type[BaseModel], item: Any) -> str:
    place = _place(item) or "config"
    if item["type"] == "extra_forbidden":
        return f"unknown key `{place}`{_nearest(place, _field_paths(model))}"
    if item["type"] == "missing":
        return f"`{place}` is missing: give it in the file or as --{place} VALUE"
    message = item["msg"].removeprefix("Value error, ").rstrip(".")
    value = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"  # a section says nothing by its fields
    return f"`{place}`{value}: {message[0].lower()}{message[1:]}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _nearest_file(path: Path, above: tuple[Path, ...]) -> str:
    """Of YAML files in the nearest folder that is there, and in the folders in it; none where these cannot be read."""
    try:
        folder = next(each for each in path.parents if each.is_dir())
        if str(folder) == path.anchor:  # all that the machine has
            return ""
        found = islice(chain(folder.glob("*.yaml"), folder.glob("*/*.yaml")), MOST_FILES)
        names = {str(file.relative_to(folder)): file for file in found if file not in above}
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
