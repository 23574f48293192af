"""Labels in any script: each character is drawn in an installed font that has a glyph for it."""

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.ft2font import FT2Font
from PIL import ImageDraw, ImageFont

FIRST = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
"""Comes with matplotlib, so it is always there: Latin, Greek, Cyrillic, Arabic, Hebrew, Georgian and many symbols."""
SHOWN = 5
"""Number of characters without a glyph that the note names."""
SPECIAL = ("bold", "italic", "oblique", "black", "light", "thin", "condensed", "mono", "serif")
"""Words in the file names of fonts that are only used if no plainer font covers as much."""
PLACEHOLDERS = "lastresort"
"""In the file names of fonts that have a box for every character."""


@dataclass(frozen=True, eq=False)
class Face:
    """A font in one size."""

    font: ImageFont.FreeTypeFont
    characters: frozenset[str]
    """The characters of the text that the font can draw."""


class Lettering:
    """Measures and draws text, in DejaVu Sans where that has the glyphs, and in system fonts where it has not."""

    def __init__(self, texts: Iterable[str], size: int):
        """Choose the fonts that all of `texts` need, `size` pixels high."""
        needed = {char for text in texts for char in text}
        self.faces = [_open(FIRST, size, needed)]
        left = {char for char in needed - self.faces[0].characters if not _is_invisible(char)}
        for path in best_cover({path: glyphs(path, left) for path in system_fonts()} if left else {}):
            self.faces.append(_open(path, size, left))
            left -= self.faces[-1].characters
        self.missing = sorted(left)
        """Characters that no font has, which are drawn as boxes."""
        self.ascent, _ = self.faces[0].font.getmetrics()

    @property
    def note(self) -> str:
        """One sentence about the characters that are drawn as boxes; empty if there are none."""
        if not self.missing:
            return ""
        named = ", ".join(f"{char} (U+{ord(char):04X})" for char in self.missing[:SHOWN])
        more = f" and {len(self.missing) - SHOWN} more" if len(self.missing) > SHOWN else ""
        return (
            f"No installed font has a glyph for {named}{more}, so boxes stand in their place. Install a font for that "
            f"script (on Debian and Ubuntu, fonts-noto-cjk for Chinese, Japanese and Korean, fonts-noto-core for "
            f"most others)."
        )

    def length(self, text: str) -> float:
        """Width in pixels."""
        return sum(face.font.getlength(run) for face, run in self._runs(text))

    def write(self, draw: ImageDraw.ImageDraw, left: float, top: float, text: str) -> None:
        """Draw one line in black; all fonts share its baseline."""
        for face, run in self._runs(text):
            draw.text((left, top + self.ascent), run, "black", face.font, anchor="ls")
            left += face.font.getlength(run)

    def _runs(self, text: str) -> Iterator[tuple[Face, str]]:
        """Split a line into pieces of one font each: letters are only shaped and ordered within a piece."""
        chosen: list[tuple[Face, str]] = []
        face = self.faces[0]
        for char in text:
            having = [face for face in self.faces if char in face.characters]
            if not having and _is_invisible(char):
                char, having = " " if char.isspace() else "", [face]
            if face not in having or not _is_neutral(char):
                face = having[0] if having else self.faces[0]
            chosen.append((face, char))
        for face, pieces in groupby(chosen, key=lambda piece: piece[0]):
            yield face, "".join(char for _, char in pieces)


def system_fonts() -> list[Path]:
    """The installed font files, plain ones first."""
    from matplotlib.font_manager import findSystemFonts  # looks at all fonts once when it is imported

    found = [Path(path) for path in findSystemFonts() if PLACEHOLDERS not in path.lower()]
    return sorted(found, key=lambda path: (sum(word in path.name.lower() for word in SPECIAL), path.name))


def glyphs(path: Path, wanted: set[str]) -> set[str]:
    """The characters among `wanted` that a font file has glyphs for; none if they are bitmaps, or not readable."""
    try:
        font = FT2Font(str(path))
    except (RuntimeError, OSError):  # FreeType does not know the format, or the file is damaged
        return set()
    return {char for char in wanted if ord(char) in font.get_charmap()} if font.scalable else set()


def best_cover(fonts: dict[Path, set[str]]) -> Iterator[Path]:
    """Yield fonts until no other one adds a character: those that add most first, and the first of equal ones."""
    while fonts:
        best = max(fonts, key=lambda path: len(fonts[path]))
        if not (covered := fonts[best]):
            return
        yield best
        fonts = {path: found - covered for path, found in fonts.items()}


def _open(path: Path, size: int, wanted: set[str]) -> Face:
    font, found = ImageFont.truetype(str(path), size), glyphs(path, wanted)
    # colour fonts have layers instead of outlines, of which nothing would be seen
    inked = {char for char in found if char.isspace() or _is_invisible(char) or font.getmask(char).getbbox()}
    return Face(font, frozenset(inked))


def _is_invisible(char: str) -> bool:
    """Return whether a character needs no glyph: blanks, control and format characters, variation selectors."""
    return unicodedata.category(char) in ("Zs", "Zl", "Zp", "Cc", "Cf") or "\ufe00" <= char <= "\ufe0f"


def _is_neutral(char: str) -> bool:
    """Return whether a character keeps the font of the letters before it: blanks, punctuation, combining marks."""
    return not char or unicodedata.category(char)[0] in "ZPMC"
