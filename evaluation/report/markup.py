"""Pages and their building blocks, rendered by Jinja with autoescaping.

`macros` provides the building blocks defined in macros.html, which return `Markup`. Any other string in a template is
escaped.
"""

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from evaluation.report.charts import tick


@dataclass(frozen=True)
class Section:
    """A section of a page, with an entry in its table of contents."""

    id: str
    """Anchor of the section, unique on the page."""
    title: str
    content: Markup


def section(id: str, title: str, *parts: Markup) -> Section:
    """Combine building blocks into a section."""
    return Section(id, title, Markup("").join(parts))


def render_page(title: str, sections: Sequence[Section]) -> str:
    """Render a page, which needs no other files."""
    return _ENVIRONMENT.get_template("report.html").render(title=title, sections=sections)


def data_url(image: Image.Image) -> str:
    """Encode an image as a `data:` URL (PNG)."""
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def format_cell(value: Any) -> str:
    """Format a table cell: numbers with thousands separators, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return tick(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def mark_code(text: str) -> Markup:
    """Escape the text, and turn text between backticks into <code> elements."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"cell": format_cell, "code": mark_code, "data_url": data_url}
macros: Any = _ENVIRONMENT.get_template("macros.html").module
