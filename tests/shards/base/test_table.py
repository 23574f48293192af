"""Tables as text."""

from shards.base.table import counted, format_table


def test_cells_stand_on_their_sides_without_blanks_behind() -> None:
    rows = [["name", "count", "why"], ["a", "1,000", ""], ["longer", "7", "because"]]
    assert format_table(rows, "<><") == "name    count  why\na       1,000\nlonger      7  because"
    assert format_table([["a", "10"], ["bc", "1"]]) == " a  10\nbc   1"


def test_only_one_is_singular() -> None:
    assert [counted(count, "part") for count in (0, 1, 2000)] == ["0 parts", "1 part", "2,000 parts"]
