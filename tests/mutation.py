"""Random mutants of the core: `python -m tests.mutation --number 200` shows how many of them the tests notice.

A mutant is the product with one expression or statement changed: a comparison or an operator swapped, a condition
negated, a number increased, a call dropped. Each is tested in a private copy of the tree, first with the tests of its
package, where those that mirror its module come first, then with those tests of `make quick` whose package may import
it, then with those of several packages together (tests/precompute/test_*.py for precompute), and then with those of the
training step and the model families. It survives if all of them pass. Survivors are printed as diffs; read them,
because some change nothing (a cache's size, an error's wording).

Tests run in forks of this process, which has imported the libraries but no module of the product.

Results are appended to a file, so the same command continues an interrupted search.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from tests.rooms import MAY_IMPORT

TREE = Path(__file__).parents[1]
CORE = (
    "shards/format",
    "shards/root",
    "precompute/input",
    "precompute/pixels",
    "precompute/encode",
    "train/data",
    "train/model",
    "train/objective",
    "train/run/lease",
    "evaluation/metrics",
)
COPIED = (
    "bench",
    "cluster",
    "configs",
    "deploy",
    "docs",
    "evaluation",
    "examples",
    "plan",
    "precompute",
    "shards",
    "tests",
    "train",
)
GATE = "not (slow or faults)"
QUICK = "not (slow or faults or heavy)"
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "transformers.models.clip.modeling_clip",
    "hypothesis.stateful",
    "ray",
    "streaming",
    "pyarrow.parquet",
    "scipy.stats",
)
SECONDS = 300
"""Time limit for each call of pytest; a mutant that exceeds it, for example in an endless loop, counts as noticed."""
NO_TESTS = 5
"""Exit code of pytest if no test was selected."""


class Mutant(NamedTuple):
    """A module's text with one change."""

    module: str
    line: int
    text: str

    def diff(self) -> str:
        """Return the change as lines of a diff."""
        before = (TREE / self.module).read_text().splitlines()
        lines = difflib.unified_diff(before, self.text.splitlines(), self.module, lineterm="", n=0)
        return "\n".join(line for line in lines if line.startswith(("-", "+")) and not line.startswith(("---", "+++")))


def mutants_of(module: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of its lines."""
    text = (TREE / module).read_text()
    return [Mutant(module, node.lineno, _splice(text, node, new)) for node, new in _changes(ast.parse(text))]


def _changes(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    """Yield pairs of a node and the source that replaces it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in (found for statement in node.body for found in _without_texts(statement)):
                yield from _changes_of(inner)


def _without_texts(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over a statement, except for annotations, nested functions, f-strings and `raise`, which make messages, and
    `strict=` of `zip`, which makes no difference between lists of equal length."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _without_texts(child)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in SWAPS:
            yield node, ast.unparse(ast.Compare(left, [SWAPS[type(op)]()], [right]))  # type: ignore[list-item]
        case ast.BinOp(left, op, right) if type(op) in SWAPS and not isinstance(left, ast.Constant | ast.JoinedStr):
            yield node, f"({ast.unparse(ast.BinOp(left, SWAPS[type(op)](), right))})"  # type: ignore[arg-type]
        case ast.BoolOp(op, values):
            yield node, f"({ast.unparse(ast.BoolOp(SWAPS[type(op)](), values))})"  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not(), operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(test, ast.Compare | ast.BoolOp):
            yield test, f"(not {ast.unparse(test)})"
        case ast.Constant(bool(value)):
            yield node, str(not value)
        case ast.Constant(int(value) | float(value)):
            yield node, repr(value + 1)
        case ast.Expr(ast.Call()):
            yield node, "pass"
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield node, "return None"


def _splice(text: str, node: Any, new: str) -> str:
    """Replace a node's source; columns of `ast` count bytes."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    data = text.encode()
    return (data[:start] + new.encode() + data[end:]).decode()


class MirrorFirst:
    """Plugin of pytest that runs the tests of one file before all others."""

    def __init__(self, mirror: str):
        self.mirror = mirror

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Move the file's tests to the front."""
        items.sort(key=lambda item: not item.nodeid.startswith(f"{self.mirror}::"))


def stages_for(module: str, quick: list[str]) -> Iterator[list[str]]:
    """Yield lists of pytest arguments, those whose tests are most likely to notice a mutant of `module` first."""
    package = f"tests/{os.path.dirname(module)}"
    if (TREE / package).exists():
        yield ["-m", GATE, package]
    changed = module.partition("/")[0]
    reached = [path for path in quick if changed in (top := path.split("/")[1], *MAY_IMPORT.get(top, ()))]
    yield ["-m", QUICK, *reached, f"--ignore={package}"]
    if together := sorted((TREE / "tests" / changed).glob("test_*.py")):
        yield ["-m", GATE, *(str(path.relative_to(TREE)) for path in together)]
    if changed != "evaluation":
        yield ["-m", GATE, "tests/train/test_step.py", "tests/families"]


def examine(mutant: Mutant, copy: Path, quick: list[str]) -> str | None:
    """Return the first failing test, or None if the mutant survives."""
    target = copy / mutant.module
    original = target.read_text()
    target.write_text(mutant.text)
    folder, name = os.path.split(mutant.module)
    try:
        for stage in stages_for(mutant.module, quick):
            if noticed := first_failure(copy, stage, f"tests/{folder}/test_{name}"):
                return noticed
        return None
    finally:
        target.write_text(original)


def first_failure(copy: Path, arguments: list[str], mirror: str = "", write_bytecode: bool = False) -> str | None:
    """Run pytest in a fork; return a line about the first failure, or None if all tests pass."""
    with tempfile.TemporaryFile("w+") as output:
        if not (child := os.fork()):
            _run_pytest(copy, arguments, MirrorFirst(mirror), output.fileno(), write_bytecode)
        end = time.monotonic() + SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"no end after {SECONDS} s"
            time.sleep(0.05)
        if os.waitstatus_to_exitcode(ended[1]) in (0, NO_TESTS):
            return None
        output.seek(0)
        said = output.read()
    return next((line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), said[-200:].strip())


def _run_pytest(copy: Path, arguments: list[str], plugin: MirrorFirst, output: int, write_bytecode: bool) -> NoReturn:
    """Run pytest on a copy of the tree in this process, and end it."""
    os.setpgid(0, 0)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    if not write_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = not write_bytecode
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]  # so that the copy's modules are imported
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    try:
        code = int(pytest.main([*options, *arguments], plugins=[plugin]))
        sys.stdout.flush()
    except BaseException as error:
        os.write(output, f"ERROR {error!r}".encode())
        code = 1
    os._exit(code)


def quick_tests() -> list[str]:
    """Return the tests that `make quick` runs, as the Makefile lists them."""
    text = (TREE / "Makefile").read_text().replace("\\\n", " ")
    return next(line for line in text.splitlines() if line.startswith("QUICK =")).split()[2:]


def examine_all(mutants: list[Mutant], folder: Path, processes: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each mutant, as soon as it is known. `folder`: for the copies of the tree."""
    first, quick, left = copy_tree(folder / "0"), quick_tests(), mutants[::-1]
    if left and (failing := first_failure(first, ["-m", QUICK, *quick], write_bytecode=True)):
        raise SystemExit(f"error: the tests fail without any mutant, so they would notice all of them: {failing}")
    # the other copies include the bytecode that has just been written
    free = [first, *(Path(shutil.copytree(first, folder / str(number))) for number in range(1, processes))]
    running: dict[int, tuple[Mutant, Path, float]] = {}
    while left or running:
        while left and free:
            mutant, copy = left.pop(), free.pop()
            if not (child := os.fork()):
                try:
                    (folder / f"{os.getpid()}.json").write_text(json.dumps(examine(mutant, copy, quick)))
                finally:
                    os._exit(0)
            running[child] = mutant, copy, time.monotonic()
        child, _ = os.wait()
        mutant, copy, began = running.pop(child)
        noticed = json.loads((folder / f"{child}.json").read_text())
        free.append(copy)
        seconds = round(time.monotonic() - began)
        yield {
            "module": mutant.module,
            "line": mutant.line,
            "diff": mutant.diff(),
            "noticed": noticed,
            "seconds": seconds,
        }


def main() -> None:
    """Draw mutants, test them, and print the share that was noticed and the diff of each survivor."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--number", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--processes", type=int, default=2, help="mutants tested at once")
    parser.add_argument("--results", type=Path, default=Path("runs/mutants.jsonl"), help="file to append to")
    options = parser.parse_args()
    modules = sorted(str(path.relative_to(TREE)) for folder in CORE for path in (TREE / folder).rglob("*.py"))
    every = [mutant for module in modules for mutant in mutants_of(module)]
    drawn = random.Random(options.seed).sample(every, options.number)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.touch()
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    known = {(row["module"], row["line"], row["diff"]) for row in rows}
    left = [mutant for mutant in drawn if (mutant.module, mutant.line, mutant.diff()) not in known]
    print(f"{len(every)} mutants of {len(modules)} modules; {len(drawn)} drawn, {len(left)} left", flush=True)
    for name in LIBRARIES:
        import_module(name)
    # not a TemporaryDirectory, which would be removed at the exit of a process that a test has forked
    folder = Path(tempfile.mkdtemp())
    try:
        for row in examine_all(left, folder, options.processes):
            rows.append(row)
            with options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['module']}:{row['line']}: {row['noticed'] or 'SURVIVED'} ({row['seconds']} s)", flush=True)
    finally:
        shutil.rmtree(folder)
    survivors = [row for row in rows if not row["noticed"]]
    for row in survivors:
        print(f"\n{row['module']}:{row['line']}\n{row['diff']}")
    print(f"\n{len(rows) - len(survivors)} of {len(rows)} mutants noticed ({1 - len(survivors) / len(rows):.1%})")


def copy_tree(copy: Path) -> Path:
    """Copy what the tests need to a new folder, and return it."""
    for name in COPIED:
        shutil.copytree(TREE / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in TREE.iterdir():
        if path.is_file() and path.suffix in (".toml", ".md", ".lock", ""):
            shutil.copy(path, copy)
    return copy


if __name__ == "__main__":
    main()
