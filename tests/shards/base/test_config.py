"""Config files, overrides, and error messages."""

import re
import shlex
from pathlib import Path

import pytest
from pydantic import Field

from shards.base.config import Config, load_config, save_config
from shards.base.errors import RequestError
from shards.base.store import LocalPath


class Leaf(Config):
    """A list entry."""

    name: str


class Inner(Config):
    """A section."""

    rate: float = Field(1.0, gt=0)
    names: list[str] = Field(["a"])
    leaves: list[Leaf] = Field([])
    leaf: Leaf | None = None


class Outer(Config):
    """A config."""

    path: Path
    inner: Inner = Inner()
    steps: int | None = None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("path: here\ninner: {rate: 2.0}\n")
    return path


def test_overrides_lie_over_the_file(file: Path, tmp_path: Path) -> None:
    config = load_config(Outer, file, ["--inner.names", '["b", "c"]', "--steps=5", "--inner.rate", "1e-4"], "t")
    assert config == Outer(path=Path("here"), inner=Inner(rate=1e-4, names=["b", "c"]), steps=5)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(Outer, tmp_path / "saved.yaml", [], "t") == config
    assert load_config(Outer, tmp_path / "saved.yaml", ["--steps", "null"], "t").steps is None
    assert load_config(Outer, file, ["--inner.names", "[b,c]"], "t").inner.names == ["b", "c"]  # needs no quotes


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("path: x\nstep: 3\n", [], r"unknown key `step` \(did you mean `steps`\?\)"),
        ("path: x\ninner: {rte: 3}\n", [], r"unknown key `inner.rte` \(did you mean `inner.rate`\?\)"),
        ("path: x\ninner: {rate: -1}\n", [], r"`inner.rate` = -1: input should be greater than 0"),
        ("steps: 3\n", [], r"`path` is missing: set it in the file or with --path VALUE"),
        ("path: x\n", ["--inner.rat", "3"], r"unknown option --inner.rat \(did you mean `inner.rate`\?\)"),
        ("- x\n", [], "must contain `key: value` pairs, but its content has the type list"),
        ("a: [", [], "cannot be read as YAML"),
        ("seed: 1\na: 3\nseed: 2", [], "cannot be read as YAML: the key `seed` is given twice"),
        ("base: ''", [], "`base` must be the path of a config file"),
        ("base: [a]", [], "`base` must be the path of a config file"),
        ("path: x", ["--inner", "x"], 'error parsing value for field "inner" from .*CliSettingsSource", in --inner x'),
        ("path: x", ["--steps", "3", "4"], "unrecognized arguments: 4, in --steps 3 4"),
        ("path: x", ["--inner.names", "[b,c]", "--inner.rate", "-1"], r"overrides: `inner.rate` = '-1': input should"),
    ],
)
def test_errors_name_the_place_and_the_remedy(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        load_config(Outer, path, overrides, "t")


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--inner.leaves [{name:x}]", "--inner.leaves arrived as [{name:x}], which is not valid JSON"),
        ("--inner.leaves=[{name:x}] --steps 3", "--inner.leaves arrived as [{name:x}], which is not valid JSON"),
        ("--steps 3 --inner.leaves [{name: x}]", "--inner.leaves arrived as [{name: x}], which is not valid JSON"),
        ("--inner.leaf {name:x}", "--inner.leaf arrived as {name:x}, which is not valid JSON"),
    ],
)
def test_json_that_the_shell_has_unquoted(file: Path, words: str, read: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_config(Outer, file, words.split(), "t")
    assert read in str(caught.value)
    # both suggested forms work; the second passes through two shells
    said = re.search(r"put single quotes around the value: (.*), or with make: (ARGS=.*\")", str(caught.value))
    assert said
    (make,) = shlex.split(said[2])
    for typed in (said[1], make.removeprefix("ARGS=")):
        inner = load_config(Outer, file, shlex.split(typed), "t").inner
        assert [*inner.leaves, inner.leaf][0] == Leaf(name="value")


class Named(Config):
    sections: dict[str, Inner] = Field({})


def test_entries_of_a_dict_of_sections_are_options(tmp_path: Path) -> None:
    path = tmp_path / "named.yaml"
    path.write_text("sections: {a: {rate: 1.0}, b: {rate: 2.0}}\n")
    found = load_config(Named, path, ["--sections.b.rate", "3", "--sections.c.rate=4"], "program")
    assert {name: section.rate for name, section in found.sections.items()} == {"a": 1.0, "b": 3.0, "c": 4.0}
    with pytest.raises(RequestError, match=r"unknown key `sections\.b\.rat`"):
        load_config(Named, path, ["--sections.b.rat", "3"], "program")
    with pytest.raises(RequestError, match=r"`sections\.b\.rate` = 'fast'"):
        load_config(Named, path, ["--sections.b.rate", "fast"], "program")
    for words in (["--sections.b.rate"], ["--sections.b.rate", "--sections.c.rate=4"]):
        with pytest.raises(RequestError, match=r"program: --sections\.b\.rate has no value"):
            load_config(Named, path, words, "program")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"The config file /nowhere/absent\.yaml does not exist\. Pass the path of an existing file"
    ):
        load_config(Outer, Path("/nowhere/absent.yaml"), [], "t")
    (tmp_path / "sana").mkdir()
    (tmp_path / "sana" / "phase1.yaml").write_text("")
    for typed in ("sanna/phase1.yaml", "sana/phse1.yaml", "phase1.yaml"):
        with pytest.raises(
            RequestError, match=rf"{typed} does not exist \(did you mean `{tmp_path}/sana/phase1\.yaml`\?\)\."
        ):
            load_config(Outer, tmp_path / typed, [], "t")


def test_a_file_says_what_differs_from_its_base(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("path: here\ninner: {rate: 2.0, names: [x, y]}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\ninner: {rate: 3.0}\nsteps: 4\n")
    (tmp_path / "c.yaml").write_text("base: b.yaml\nsteps: null\n")
    config = load_config(Outer, tmp_path / "c.yaml", ["--inner.rate", "5"], "test")
    assert (config.path, config.inner.rate, config.inner.names, config.steps) == (Path("here"), 5.0, ["x", "y"], None)
    (tmp_path / "a.yaml").write_text("base: c.yaml\npath: here\n")
    with pytest.raises(RequestError, match="which in turn is based on this file"):
        load_config(Outer, tmp_path / "c.yaml", [], "test")
    (tmp_path / "a.yaml").unlink()
    with pytest.raises(
        RequestError, match=r"The config file .*a\.yaml does not exist\. Set `base` in .*b\.yaml to the path of"
    ):
        load_config(Outer, tmp_path / "c.yaml", [], "test")


def test_a_base_may_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "a.yaml").write_text("path: here\n")
    (tmp_path / "far" / "b.yaml").write_text("base: ../a.yaml\nsteps: 3\n")
    assert load_config(Outer, tmp_path / "far" / "b.yaml", [], "test").path == Path("here")
    (tmp_path / "a.yaml").write_text("base: far/b.yaml\n")
    with pytest.raises(RequestError, match="which in turn is based on this file"):
        load_config(Outer, tmp_path / "far" / "b.yaml", [], "test")


class Local(Config):
    """A config with a path that must be local."""

    path: LocalPath


def test_a_url_in_place_of_a_local_path_is_refused() -> None:
    with pytest.raises(RequestError, match=r"s3://bucket/tars is a URL, but only a local path is possible here"):
        load_config(Local, None, ["--path", "s3://bucket/tars"], "command")
    with pytest.raises(RequestError, match=r"the path is empty, perhaps because a shell variable is not set"):
        load_config(Local, None, ["--path", ""], "command")
    found = [load_config(Local, None, ["--path", text], "command").path for text in ("a", "file:///a", "~/a")]
    assert found == [Path("a"), Path("/a"), Path.home() / "a"]
