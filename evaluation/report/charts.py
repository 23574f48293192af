"""Line charts as inline SVG. Lines differ in dash, marker and label, so charts are readable without colour."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from markupsafe import Markup
from matplotlib.ticker import LogLocator, MaxNLocator

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 86, 150, 12, 48
"""Margins around the plot area, in pixels."""
LABEL_HEIGHT = 19
"""Minimum distance between two line labels, in pixels."""
MAX_LABEL = 13
"""Maximum length of a line label in characters; longer names are truncated at the start."""
MAX_MARKERS = 8
"""Maximum number of markers on one line."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4")
MARKERS = (
    '<circle r="4"/>',
    '<rect x="-3.5" y="-3.5" width="7" height="7"/>',
    '<path d="M0-5 4.5 4h-9z"/>',
    '<path d="M0-5 5 0 0 5-5 0z"/>',
    '<path d="M-4-4 4 4M-4 4 4-4"/>',
    '<path d="M0-5V5M-5 0H5"/>',
)
_chart_ids = count()


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()
    """(low, high) for each point; empty if the points have no intervals."""
    style: int = 0
    """Index of one of the 36 combinations of dash, colour and marker. A run keeps its style in all charts on a page."""


def line_chart(title: str, x_name: str, y_name: str, series: Sequence[Series], log: bool = False) -> Markup:
    """Draw an SVG line chart, with a description for screen readers that refers to the table below the chart.

    Args:
        series: at least one line, each with at least one point.
        log: use a logarithmic y axis, unless a value is zero or negative.
    """
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    ys += [end for line in series for interval in line.intervals for end in interval]
    log = log and min(ys) > 0
    x_scale, x_ticks = _axis(xs, False, LEFT, WIDTH - RIGHT)
    y_scale, y_ticks = _axis(ys, log, HEIGHT - BOTTOM, TOP)
    label_places = _spread_labels([y_scale(line.points[-1][1]) for line in series], HEIGHT - BOTTOM)

    parts = []
    for y in y_ticks:
        parts.append(_grid_line(LEFT, y_scale(y), WIDTH - RIGHT, y_scale(y)))
        parts.append(_text(LEFT - 6, y_scale(y) + 4, "end", tick(y)))
    for x in x_ticks:
        parts.append(_grid_line(x_scale(x), TOP, x_scale(x), HEIGHT - BOTTOM))
        parts.append(_text(x_scale(x), HEIGHT - BOTTOM + 17, "middle", tick(x)))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "middle", x_name))
    rotation = f'transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"'
    parts.append(f'<text {rotation} text-anchor="middle">{html.escape(y_name)}{" (log)" if log else ""}</text>')
    parts += [_line(line, x_scale, y_scale) for line in series]
    parts += [_label(line, y) for line, y in zip(series, label_places, strict=True)]

    ranges = "; ".join(f"{line.name} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in series)
    description = f"{y_name} over {x_name}: {ranges}. The values are in the table below."
    chart_id = next(_chart_ids)
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t{chart_id} d{chart_id}">'
        f'<title id="t{chart_id}">{html.escape(title)}</title><desc id="d{chart_id}">{html.escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _axis(values: list[float], log: bool, start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Return a scale that maps values to pixels between `start` and `end`, and the tick values."""
    low, high = min(values), max(values)
    if math.isclose(low, high, rel_tol=1e-12):  # equal up to rounding, such as means of equal values
        low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
    transform = math.log if log else float
    margin = (transform(high) - transform(low)) * 0.04
    first, last = transform(low) - margin, transform(high) + margin
    locator = LogLocator(subs=(1, 2, 5)) if log else MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    ticks = [float(value) for value in locator.tick_values(low, high)]
    visible = [value for value in ticks if (value > 0 or not log) and first <= transform(value) <= last]
    return lambda value: start + (transform(value) - first) / (last - first) * (end - start), visible


def _line(line: Series, x_scale: Callable[[float], float], y_scale: Callable[[float], float]) -> str:
    """Draw a line with its error bars and markers. The last point always has a marker."""
    places = [(x_scale(x), y_scale(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    bars = ""
    for (x, _), (low, high) in zip(places, line.intervals, strict=False):
        bottom, top = y_scale(low), y_scale(high)
        bars += f'<path d="M{x:.1f} {bottom:.1f}V{top:.1f}M{x - 4:.1f} {bottom:.1f}h8M{x - 4:.1f} {top:.1f}h8"/>'
    every = -(-len(places) // MAX_MARKERS)
    markers = "".join(
        f'<g transform="translate({x:.1f} {y:.1f})">{marker_of(line.style)}</g>' for x, y in places[::-1][::every]
    )
    dash = line.style % len(DASHES)
    return f'<g class="s{dash}"><path d="{path}" stroke-dasharray="{DASHES[dash]}"/>{bars}{markers}</g>'


def _label(line: Series, y: float) -> str:
    """Draw a line's marker and name to the right of the plot area."""
    x = WIDTH - RIGHT + 14
    css_class = f"s{line.style % len(DASHES)}"
    marker = f'<g class="{css_class}"><g transform="translate({x} {y:.1f})">{marker_of(line.style)}</g></g>'
    name = line.name if len(line.name) <= MAX_LABEL else f"…{line.name[1 - MAX_LABEL :]}"
    return marker + _text(x + 9, y + 4, "start", name)


def marker_of(style: int) -> str:
    """Return the marker of a style. Styles that share a dash have different markers."""
    return MARKERS[(style + style // len(DASHES)) % len(MARKERS)]


def _spread_labels(places: list[float], lowest: float) -> list[float]:
    """Move labels apart vertically, by as little as needed, and keep all of them above `lowest`.

    Adjacent labels end up at least `LABEL_HEIGHT` apart, or are spaced evenly if there is too little height for that.
    """
    step = min(LABEL_HEIGHT, (lowest - TOP) / len(places))
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved, last = [0.0] * len(places), float("-inf")
    for number in order:
        last = moved[number] = max(places[number], last + step)
    bound = lowest
    for number in reversed(order):
        moved[number] = min(moved[number], bound)
        bound = moved[number] - step
    return moved


def _grid_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def tick(value: float) -> str:
    """Format a number with up to four significant digits or, from 1,000 up, as an integer with thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
