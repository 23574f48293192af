"""Pages and their building blocks, rendered by Jinja with autoescaping.

The macros in macros.html return `Markup`. Any other string that reaches a template is escaped.
"""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from evaluation.report.charts import tick


@dataclass(frozen=True)
class Section:
    """A section of the report, with an entry in its table of contents."""

    id: str
    """Anchor of the section, unique on the page."""
    title: str
    content: Markup


def section(id: str, title: str, *parts: Markup) -> Section:
    """Combine building blocks into a section."""
    return Section(id, title, Markup("").join(parts))


def render_page(template: str, **values: Any) -> str:
    """Render a template of this package, such as `report/report.html`.

    Raises:
        jinja2.UndefinedError: the template uses a value that is missing.
    """
    return _ENVIRONMENT.get_template(template).render(**values)


def paragraph(text: str) -> Markup:
    """Build a paragraph in which text between backticks becomes code."""
    return _macro("paragraph", text)


def heading(text: str) -> Markup:
    """Build a heading one level below the section's."""
    return _macro("heading", text)


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """Build a table. The first cell of each row is the row's heading; see `format_cell` for the values."""
    return _macro("table", caption, header, rows)


def figure(title: str, svg: Markup, note: str, values: Markup) -> Markup:
    """Build a figure from a chart, a note (may be empty) and a table of the chart's values."""
    return _macro("figure", title, svg, note, values)


def columns(parts: Sequence[Markup]) -> Markup:
    """Place blocks side by side where the screen is wide enough."""
    return _macro("columns", parts) if parts else Markup("")


def headline(figures: Mapping[str, str]) -> Markup:
    """Build a row of large figures from a mapping of captions to values."""
    return _macro("headline", figures)


def image_row(title: str, images: Mapping[str, Image.Image]) -> Markup:
    """Build a row of labelled images.

    Args:
        title: the prompt that all images share.
        images: label → image.
    """
    return _macro(
        "image_row", title, {label: (data_url(image), image.width, image.height) for label, image in images.items()}
    )


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


def _mark_code(text: str) -> Markup:
    """Escape the text, and turn text between backticks into code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": format_cell, "code": _mark_code}
    return environment


_ENVIRONMENT = _environment()


def _macro(name: str, *arguments: Any) -> Markup:
    macros = _ENVIRONMENT.get_template("report/macros.html").module
    return Markup(getattr(macros, name)(*arguments))
