"""docs/how-to/incidents.md quotes what the product says, and names every alert that there is a rule for."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from tests.rooms import PACKAGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "incidents.md").read_text()
QUOTED = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)


def texts() -> set[str]:
    """Every string of the product; what is filled in is …"""
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


TEXTS = texts()


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_product_says_so(quoted: str) -> None:
    pattern = ".*".join(re.escape(piece.strip()) for piece in quoted.split("…"))
    assert any(re.search(pattern, text, re.DOTALL) for text in TEXTS), quoted


def test_much_is_quoted() -> None:
    assert len(QUOTED) >= 15


def test_links_lead_to_headings() -> None:
    links = re.findall(r"\]\(([\w./-]+\.md)#([\w-]+)\)", PAGE)
    assert ("resume.md", "losing-machines") in links
    for page, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "how-to" / page).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, page


def test_what_a_run_does_by_itself_names_fields_that_there_are() -> None:
    """And flags: the table of resume.md that the page sends its reader to."""
    table = (ROOT / "docs" / "how-to" / "resume.md").read_text().split("## Losing machines")[1].split("\n## ")[0]
    rows = "\n".join(line for line in table.splitlines() if line.startswith("|"))
    named = re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z_]+)*)(?:[: ][^`]*)?`", rows)
    fields = (ROOT / "docs" / "reference" / "config.md").read_text() + (ROOT / "Makefile").read_text()
    assert len(set(named)) >= 4 and not [name for name in named if name not in fields and name not in TEXTS]


def test_alerts_are_those_of_the_rules() -> None:
    rules = [rule for path in ROOT.glob("deploy/prometheus/alerts.yml") for rule in alerts(path)]
    named = set(re.findall(r"^\| (Latentmill\w+) \|", PAGE, re.MULTILINE))
    assert named and (not rules or named == set(rules))


def alerts(path: Path) -> list[str]:
    """Names of a rules file's alerts."""
    return [rule["alert"] for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
