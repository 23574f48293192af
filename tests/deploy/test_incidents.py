"""docs/how-to/incidents.md quotes the product's messages correctly, and covers every alert rule."""

import ast
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from cluster.failure_log import FailureLog
from cluster.fleet import Failed
from shards.__main__ import run as shards
from tests.cluster.played import error
from tests.rooms import PACKAGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "incidents.md").read_text()
QUOTED = re.findall(r"^- `([^`]+)`(?::|$)", PAGE, re.MULTILINE)


@cache
def texts() -> set[str]:
    """Return every string of the product; placeholders become …"""
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_the_product_says_what_is_quoted() -> None:
    patterns = {quoted: ".*".join(re.escape(piece.strip()) for piece in quoted.split("…")) for quoted in QUOTED}
    assert len(patterns) > 20
    assert not [
        quoted
        for quoted, pattern in patterns.items()
        if not any(re.search(pattern, text, re.DOTALL) for text in texts())
    ]


KINDS = {"WorkError", "Outage", "UnfitNode", "Preempted", "Stuck"}
PLACES = ["cluster", "precompute/job", "precompute/encode"]
PLACES += [f"train/{name}" for name in ("data", "run", "launch.py", "slurm.py", "ssh.py", "trainer.py")]
PAGES = ("incidents.md", "resume.md")


@cache
def messages() -> list[str]:
    """Return every message of these kinds of errors, which end a job or a run; placeholders become … Errors that only
    pass on the text of a different error are left out."""
    found = []
    for place in PLACES:
        for path in (ROOT / place).rglob("*.py") if (ROOT / place).is_dir() else [ROOT / place]:
            tree = ast.parse(path.read_text())
            assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
            names = {
                target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                    found.append(" ".join(text_of(node.args[0], names).split()))
    return [text for text in found if num_words(text) >= 3]


def text_of(value: ast.AST, names: dict[str, ast.expr]) -> str:
    """Return the constant text of an expression, following variables that such a text is assigned to."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(part, names) for part in values)
        case ast.FormattedValue(value=ast.Name() as name) | (ast.Name() as name):
            named = names.get(name.id)
            return text_of(named, {}) if isinstance(named, ast.Constant | ast.JoinedStr) else "…"
    return "…"


def num_words(text: str) -> int:
    return len(re.findall(r"[\w.-]*\w", text))


QUOTES = {
    quote
    for page in PAGES
    for line in (ROOT / "docs" / "how-to" / page).read_text().splitlines()
    for quote in re.findall(r"`([^`]+)`", line)
}


def test_each_error_that_ends_a_job_or_a_run_is_quoted() -> None:
    patterns = [
        ".*".join(re.escape(piece.strip()) for piece in quote.split("…")) for quote in QUOTES if num_words(quote) > 2
    ]
    assert len(messages()) >= 25
    assert not [message for message in messages() if not any(re.search(pattern, message) for pattern in patterns)]


def test_links_lead_to_headings() -> None:
    links = re.findall(r"\]\(([\w./-]+\.md)#([\w-]+)\)", PAGE)
    assert ("resume.md", "losing-machines") in links
    for page, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "how-to" / page).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, page


def test_what_a_run_does_by_itself_names_fields_that_there_are() -> None:
    """The table of resume.md names existing fields and flags."""
    table = (ROOT / "docs" / "how-to" / "resume.md").read_text().split("## Losing machines")[1].split("\n## ")[0]
    rows = "\n".join(line for line in table.splitlines() if line.startswith("|"))
    named = re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z_]+)*)(?:[: ][^`]*)?`", rows)
    fields = (ROOT / "docs" / "reference" / "config.md").read_text() + (ROOT / "Makefile").read_text()
    assert len(set(named)) >= 4 and not [name for name in named if name not in fields and name not in texts()]


FIRST_LOOK = [line.split("  #")[0] for line in PAGE.split("```")[1].splitlines()]


def first_look(begin: str, folder: Path) -> list[str]:
    """Run the page's only command with this beginning in `folder`, and return the lines it prints."""
    (line,) = (line for line in FIRST_LOOK if line.startswith(begin))
    if shutil.which(line.split()[0]) is None:
        pytest.skip(f"{line.split()[0]} is not installed")
    found = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_first_look_at_a_run(tmp_path: Path) -> None:
    (tmp_path / "RUN" / "launches").mkdir(parents=True)
    (tmp_path / "RUN" / "launches" / "000002").touch()
    (tmp_path / "RUN" / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(5)))
    assert first_look("tail", tmp_path) == ['{"step": 2}', '{"step": 3}', '{"step": 4}']
    assert first_look("ls", tmp_path) == ["000002"]


def test_first_look_at_what_failed(tmp_path: Path) -> None:
    """On a job's failure log, the commands list final failures by node and cause, and where a tar's attempts ran."""
    log = FailureLog(tmp_path / "ROOT")
    for key, node, number, again in [("00041", "a", 1, False), ("00042", "a", 1, True), ("00042", "b", 2, False)]:
        log.record(Failed(key, node, "attempt", error(), again, number, log=f"worker-{node}.err"))
    log.record(Failed("00043", "a", "attempt", error(), False, 1))
    causes = [line.split(maxsplit=1) for line in first_look("jq -r 'select(.final)", tmp_path)]
    assert [(count, words.split(" ", 1)[1]) for count, words in causes] == [
        ("2", "a ValueError: no"),
        ("1", "b ValueError: no"),
    ]
    assert first_look("jq -r 'select(.shard", tmp_path) == ["a 1 worker-a.err", "b 2 worker-b.err"]


def test_first_look_at_an_attempt(tmp_path: Path) -> None:
    lines = ["00042: attempt 1 begins", "00042: attempt 2 begins", "a library's", "00042: attempt 2 is done"]
    (tmp_path / "LOG").write_text("\n".join(lines))
    assert first_look("grep", tmp_path) == [lines[1], lines[3]]


def test_first_look_at_a_root(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = (line for line in FIRST_LOOK if line.startswith("python -m shards "))
    (tmp_path / "ROOT").symlink_to(latents)
    monkeypatch.chdir(tmp_path)
    shards(shlex.split(line)[3:])
    said = capsys.readouterr().out
    assert "64x64" in said and "128x128" in said
