"""Plain-text tables and counts."""

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 part` or `2,000 parts`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_table(rows: Sequence[Sequence[str]], sides: str = "") -> str:
    """Align rows into columns two spaces apart. `sides` holds `<` or `>` for each column; by default, all columns are
    right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sides = sides or ">" * len(widths)
    lines = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
