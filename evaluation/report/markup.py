"""Pieces of the page: sections, tables, scrolling frames, pictures. Whatever comes in is escaped here."""

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from evaluation.report.charts import Series, line_chart, tick
from evaluation.report.pictures import spread

TABLE_ROWS = 12
"""Of the table beside a chart: as many of its steps, evenly."""


def section(name: str, title: str, *parts: str) -> str:
    heading = f'<h2 id="{name}-h">{html.escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-h">{heading}{"".join(parts)}</section>'


def text(what: str) -> str:
    """A paragraph; what stands in backticks is code."""
    coded = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(what))
    return f"<p>{coded}</p>"


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{cell(first)}</th>{"".join(f"<td>{cell(value)}</td>" for value in rest)}</tr>'
        for first, *rest in rows
    )
    inside = (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
    return frame(caption, inside)


def cell(value: Any) -> str:
    """A value for people; numbers with thousands separators."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return tick(value)
    return f"{value:,}" if isinstance(value, int) else html.escape(str(value))


def frame(name: str, inside: str) -> str:
    """What may be wider than the screen scrolls by itself, by keyboard too."""
    return f'<div class="frame" role="region" tabindex="0" aria-label="{html.escape(name)}">{inside}</div>'


def chart(title: str, x_name: str, y_name: str, series: Sequence[Series], note: str = "", log: bool = False) -> str:
    """A chart with its title, a note, and its values as a table."""
    svg = frame(title, line_chart(title, x_name, y_name, series, log))
    steps = sorted({x for line in series for x, _ in line.points})
    shown = set(spread(steps, TABLE_ROWS))
    rows = [
        [line.name, round(x), y, *(line.intervals[i] if line.intervals else ())]
        for line in series
        for i, (x, y) in enumerate(line.points)
        if x in shown or len(line.points) <= TABLE_ROWS
    ]
    ends = ["95 % from", "to"] if any(line.intervals for line in series) else []
    values = table(f"{title}: values", ["line", x_name, y_name, *ends], rows)
    note = text(note) if note else ""
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}{note}"
        f"<details><summary>Values as a table</summary>{values}</details></figure>"
    )


def columns(parts: Sequence[str]) -> str:
    """Side by side, where the screen is wide enough."""
    return f'<div class="columns">{"".join(parts)}</div>' if parts else ""


def picture_row(title: str, pictures: Mapping[str, Image.Image]) -> str:
    """A row of pictures, each with its label below; `title` is what all of them were asked to show."""
    items = "".join(
        f'<li><img src="{data_address(picture)}" width="{picture.width}" height="{picture.height}" '
        f'alt="{html.escape(label)}: {html.escape(title)}"><span>{html.escape(label)}</span></li>'
        for label, picture in pictures.items()
    )
    return f"<div><h4>{html.escape(title)}</h4>{frame(title, f'<ul class=strip>{items}</ul>')}</div>"


def data_address(picture: Image.Image) -> str:
    """A picture inside the page, as PNG."""
    data = io.BytesIO()
    picture.save(data, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
