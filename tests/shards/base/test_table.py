"""Tables as text."""

from shards.base.table import format_table


def test_cells_stand_on_their_sides_without_blanks_behind() -> None:
    rows = [["name", "count", "why"], ["a", "1,000", ""], ["longer", "7", "because"]]
    assert format_table(rows, "<><") == "name    count  why\na       1,000\nlonger      7  because"
    assert format_table([["a", "10"], ["bc", "1"]]) == " a  10\nbc   1"
