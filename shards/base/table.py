"""Tables as text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], sides: str = "") -> str:
    """Columns two spaces apart; `sides` has `<` or `>` for each, the side that its cells stand on; else all are `>`."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sides = sides or ">" * len(widths)
    lines = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
