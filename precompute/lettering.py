"""Draw text in any script, choosing for each character an installed font that has a glyph for it."""

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.ft2font import FT2Font
from PIL import ImageDraw, ImageFont

FIRST = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
"""Default font. It comes with matplotlib, so it is always available, and covers Latin, Greek, Cyrillic, Arabic, Hebrew,
Georgian and many symbols."""
SHOWN = 5
"""Maximum number of missing characters that the note lists."""
SPECIAL = ("bold", "italic", "oblique", "black", "light", "thin", "condensed", "mono", "serif")
"""Words in the file names of fonts with special styles, which are used only if no plainer font covers as many
characters."""
PLACEHOLDERS = "lastresort"
"""Part of the file names of fonts that draw every character as a placeholder box."""


@dataclass(frozen=True, eq=False)
class Face:
    """A font at a fixed size."""

    font: ImageFont.FreeTypeFont
    characters: frozenset[str]
    """Characters of the text that the font can draw."""


class Lettering:
    """Text measurement and drawing in DejaVu Sans, with system fonts as fallbacks for missing glyphs."""

    def __init__(self, texts: Iterable[str], size: int):
        """Choose the fonts needed to draw all of `texts` at a size of `size` pixels."""
        needed = {char for text in texts for char in text}
        self.faces = [_open(FIRST, size, needed)]
        missing = {char for char in needed - self.faces[0].characters if not _is_invisible(char)}
        for path in best_cover({path: glyphs(path, missing) for path in system_fonts()} if missing else {}):
            self.faces.append(_open(path, size, missing))
            missing -= self.faces[-1].characters
        self.missing = sorted(missing)
        """Characters for which no font has a glyph; they are drawn as boxes."""
        self.ascent, _ = self.faces[0].font.getmetrics()

    @property
    def note(self) -> str:
        """Note about the characters that are drawn as boxes; empty if there are none."""
        if not self.missing:
            return ""
        named = ", ".join(f"{char} (U+{ord(char):04X})" for char in self.missing[:SHOWN])
        more = f" and {len(self.missing) - SHOWN} more" if len(self.missing) > SHOWN else ""
        return (
            f"No installed font has a glyph for {named}{more}, so boxes are drawn instead. Install a font for these "
            f"characters. On Debian and Ubuntu, fonts-noto-cjk covers Chinese, Japanese and Korean, and "
            f"fonts-noto-core covers most other scripts."
        )

    def length(self, text: str) -> float:
        """Return the width of a line in pixels."""
        return sum(face.font.getlength(run) for face, run in self._runs(text))

    def write(self, draw: ImageDraw.ImageDraw, left: float, top: float, text: str) -> None:
        """Draw a line in black, with all fonts on one baseline."""
        for face, run in self._runs(text):
            draw.text((left, top + self.ascent), run, "black", face.font, anchor="ls")
            left += face.font.getlength(run)

    def _runs(self, text: str) -> Iterator[tuple[Face, str]]:
        """Split a line into runs of one font each. Runs are as long as possible, because shaping and bidirectional
        layout work only within a run."""
        chosen: list[tuple[Face, str]] = []
        face = self.faces[0]
        for char in text:
            candidates = [face for face in self.faces if char in face.characters]
            if not candidates and _is_invisible(char):
                char, candidates = " " if char.isspace() else "", [face]
            if face not in candidates or not _is_neutral(char):
                face = candidates[0] if candidates else self.faces[0]
            chosen.append((face, char))
        for face, pieces in groupby(chosen, key=lambda piece: piece[0]):
            yield face, "".join(char for _, char in pieces)


def system_fonts() -> list[Path]:
    """Return the installed font files, plain styles first."""
    from matplotlib.font_manager import findSystemFonts  # deferred: importing it scans all fonts

    found = [Path(path) for path in findSystemFonts() if PLACEHOLDERS not in path.lower()]
    return sorted(found, key=lambda path: (sum(word in path.name.lower() for word in SPECIAL), path.name))


def glyphs(path: Path, wanted: set[str]) -> set[str]:
    """Return the characters in `wanted` for which the font at `path` has glyphs. The set is empty for bitmap fonts and
    unreadable files."""
    try:
        font = FT2Font(str(path))
    except (RuntimeError, OSError):  # a format that FreeType does not support, or a damaged file
        return set()
    return {char for char in wanted if ord(char) in font.get_charmap()} if font.scalable else set()


def best_cover(fonts: dict[Path, set[str]]) -> Iterator[Path]:
    """Greedily yield the font that adds the most characters (the first of them on ties), until no font adds any."""
    while fonts:
        best = max(fonts, key=lambda path: len(fonts[path]))
        if not (covered := fonts[best]):
            return
        yield best
        fonts = {path: found - covered for path, found in fonts.items()}


def _open(path: Path, size: int, wanted: set[str]) -> Face:
    font, found = ImageFont.truetype(str(path), size), glyphs(path, wanted)
    # the glyphs of colour fonts have layers instead of outlines, so they would be drawn blank
    inked = {char for char in found if char.isspace() or _is_invisible(char) or font.getmask(char).getbbox()}
    return Face(font, frozenset(inked))


def _is_invisible(char: str) -> bool:
    """Return whether a character needs no glyph: a space, control or format character, or variation selector."""
    return unicodedata.category(char) in ("Zs", "Zl", "Zp", "Cc", "Cf") or "\ufe00" <= char <= "\ufe0f"


def _is_neutral(char: str) -> bool:
    """Return whether a character uses the font of the preceding letters: a space, punctuation or a combining mark."""
    return not char or unicodedata.category(char)[0] in "ZPMC"
