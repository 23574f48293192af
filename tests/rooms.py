"""Count rooms, arrows and cycles of the imports: `python -m tests.rooms` prints them.

A room is a file, or a package seen from outside; a package's floor is the rooms directly in it. An arrow is an import.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("shards", "cluster", "precompute", "train", "plan", "evaluation", "examples", "bench")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "shards": (),
    "cluster": ("shards",),
    "precompute": ("shards", "cluster"),
    "train": ("shards",),
    "plan": ("shards", "train"),
    "evaluation": ("shards", "cluster", "precompute", "train"),
    "examples": ("shards", "cluster", "precompute", "train", "evaluation"),
    "bench": ("shards", "cluster", "precompute", "train", "plan", "evaluation", "examples"),
}
"""Top-level package → the packages it may import. precompute and train never import each other."""


@dataclass
class Floor:
    """The rooms directly in one package, and their imports of each other."""

    rooms: set[str] = field(default_factory=set)
    arrows: set[tuple[str, str]] = field(default_factory=set)


def modules() -> dict[str, Path]:
    """Return dotted name → file of every module of the product; a package has the name of its folder."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Return the product's modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


@cache
def floors() -> dict[str, Floor]:
    """Return package → floor; `` stands for the whole product. An import is an arrow on the floor where the two paths
    diverge."""
    known = modules()
    found: dict[str, Floor] = defaultdict(Floor)
    for name, path in known.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            found[".".join(parts[:depth])].rooms.add(parts[depth])
        for other in imports(path, known):
            theirs = other.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(parts, theirs, strict=False)) if a != b), None)
            if shared is not None:
                found[".".join(parts[:shared])].arrows.add((parts[shared], theirs[shared]))
    return dict(found)


def circles(floor: Floor) -> list[set[str]]:
    """Return groups of rooms that import each other, directly or indirectly."""
    reach = {room: {b for a, b in floor.arrows if a == room} for room in floor.rooms}
    for middle in floor.rooms:
        for room in floor.rooms:
            if middle in reach[room]:
                reach[room] |= reach[middle]
    tied = ({room} | {other for other in reach[room] if room in reach[other]} for room in floor.rooms)
    return [set(group) for group in {frozenset(group) for group in tied} if len(group) > 1]


def lines(package: str) -> int:
    """Count the lines of Python below a package."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py"))


def main() -> None:
    """Print every floor."""
    for name, floor in sorted(floors().items()):
        size = f", {lines(name.replace('.', '/')):,} lines" if name else ""
        print(f"{name or 'the product'}: {len(floor.rooms)} rooms, {len(floor.arrows)} arrows{size}")
        print(f"    {' '.join(sorted(floor.rooms))}")
        for circle in circles(floor):
            print(f"    circle: {' '.join(sorted(circle))}")


if __name__ == "__main__":
    main()
