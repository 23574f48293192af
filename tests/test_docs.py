"""The docs are within 100 columns, and everything they name exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TOPS = {path.name for path in ROOT.iterdir()} - {"runs"}
FAMILIES = ("sd2", "sd15", "sdxl", "pixart-sigma", "sd3", "flux1", "sana", "prx")
COSTS_IN_MAKE_TEST = ("pixart-sigma",)
"""Families whose costs `make test` checks; `make test-families` checks all costs."""


def script(name: str) -> ModuleType:
    """Load a script of docs/, which is not a package."""
    spec = util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines outside of code blocks and tables, with their numbers."""
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        in_code ^= line.startswith(("```", "   ```"))
        if not in_code and not line.startswith(("|", "    ", "```")):
            yield number, line


@cache
def defined(path: Path) -> set[str]:
    """Return every function, class and constant of a Python file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tables_of_families_are_current_except_for_costs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the costs depend on the networks' FLOPs, whose counting takes seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("plan.arithmetic.work.count_flops", lambda *_: 1)
    monkeypatch.setattr("plan.arithmetic.work.count_by_block", lambda *_: (1, ((1.0, 1.0),)))
    families = script("families")
    for page, make_row in families.ROWS.items():
        rows = [line.partition("$")[0] for line in (families.HOW_TO / page).read_text().splitlines()]
        assert make_row(family).partition("$")[0] in rows, "run `make docs`"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in COSTS_IN_MAKE_TEST else pytest.mark.slow) for name in FAMILIES]
)
def test_the_costs_of_families_are_current(family: str, shared_counts: None) -> None:
    families = script("families")
    assert families.row(family) in (families.HOW_TO / "families.md").read_text().splitlines(), "run `make docs`"


def test_lines_are_short() -> None:
    for page in PAGES:
        assert [(number, line) for number, line in prose(page) if len(line) > 100] == [], page


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        gone = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
        assert gone == [], page


def test_paths_are_there() -> None:
    """Check every path in backticks that begins with a folder or file of the repository."""
    for page in PAGES:
        spans = re.findall(r"`([\w./-]+)`", page.read_text())
        paths = [span for span in spans if ("/" in span or "." in span) and span.split("/")[0] in TOPS]
        assert [path for path in paths if not (ROOT / path).exists()] == [], page


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        code = re.findall(r"`(?:\w+=\S+ )*make (?:-\w+ )?([a-z][\w-]*)", page.read_text())
        code += re.findall(r"^(?:\w+=\S+ )*make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
        assert set(code) - targets == set(), page


def test_what_the_lookup_table_names_is_there() -> None:
    """Check that each function of docs/reference/where.md is in its file, and that each config field and test
    exists."""
    rows = [
        line for line in (ROOT / "docs/reference/where.md").read_text().splitlines() if re.match(r"\| .*`tests/", line)
    ]
    fields = (ROOT / "docs" / "reference" / "config.md").read_text()
    assert len(rows) >= 25
    for row in rows:
        _, what, start, also, field, test, _ = (cell.strip() for cell in row.split("|"))
        for place in [start, *(also.split("; ") if also else [])]:
            check_place(what, place)
        assert not field or f"- {field}:" in fields or f"### {field.strip('`')}\n" in fields, f"{what}: {field}"
        assert (ROOT / test.strip("`")).is_file(), f"{what}: {test}"


def test_the_places_for_what_is_not_built_in_are_there() -> None:
    _, table = (ROOT / "docs/reference/where.md").read_text().split("## Not built in")
    for row in table.strip().splitlines()[2:]:
        _, what, places, _ = (cell.strip() for cell in row.split("|"))
        for place in places.split("; "):
            check_place(what, place.split(",")[0])


def check_place(what: str, place: str) -> None:
    """Check one cell: a file, and the functions, classes and constants that it should define."""
    file, *names = re.findall(r"`([^`]+)`", place)
    assert (ROOT / file).is_file(), f"{what}: {file}"
    assert not names or set(names) <= defined(ROOT / file), f"{what}: {place}"


def test_the_tour_names_functions_in_their_files() -> None:
    tour = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`([A-Za-z_.]+)`\s+(?:\(|in\s+)`([\w/]+\.py)`", tour)
    assert len(named) >= 20
    for name, file in named:
        assert set(name.split(".")) <= defined(ROOT / file), f"{name} in {file}"


def test_every_field_has_a_meaning() -> None:
    items = re.split(r"\n(?=- |\n)", (ROOT / "docs" / "reference" / "config.md").read_text())
    bare = [item for item in items if re.fullmatch(r"- [^;]*; (required|default\s+`[^`]*`)\.", item)]
    assert bare == []


def test_generated_pages_are_current() -> None:
    generate = script("generate")
    assert generate.TARGET.read_text() == generate.reference(), "run `make docs`"
