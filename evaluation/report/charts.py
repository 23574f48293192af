"""Charts as inline SVG, readable without colour: each line has a dash, a marker and its name beside its end."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from matplotlib.ticker import LogLocator, MaxNLocator

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 86, 150, 12, 48
LINE_HEIGHT, LABEL = 19, 13
"""Of a line's name: pixels, and characters."""
MARKED = 8
"""Markers of a long line."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4")
MARKERS = (
    '<circle r="4"/>',
    '<rect x="-3.5" y="-3.5" width="7" height="7"/>',
    '<path d="M0-5 4.5 4h-9z"/>',
    '<path d="M0-5 5 0 0 5-5 0z"/>',
    '<path d="M-4-4 4 4M-4 4 4-4"/>',
    '<path d="M0-5V5M-5 0H5"/>',
)
_numbers = count()


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()
    """(low, high) of each point, or none."""
    style: int = 0
    """Of six dashes and colours, and six markers for each: the same for one run in all charts of a page."""


def line_chart(title: str, x_name: str, y_name: str, series: Sequence[Series], log: bool = False) -> str:
    """An SVG that says to a screen reader what it shows, and where the table is."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points] + [
        end for line in series for ends in line.intervals for end in ends
    ]
    log = log and min(ys) > 0
    across, x_ticks = _axis(xs, False, LEFT, WIDTH - RIGHT)
    down, y_ticks = _axis(ys, log, HEIGHT - BOTTOM, TOP)
    styles = [line.style for line in series]
    ends = _apart([down(line.points[-1][1]) for line in series], HEIGHT - BOTTOM)
    described = "; ".join(f"{line.name} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in series)
    number, middle = next(_numbers), (TOP + HEIGHT - BOTTOM) / 2
    y_place = f'transform="translate(13 {middle:.0f}) rotate(-90)"'
    return "".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t{number} d{number}">',
            f'<title id="t{number}">{html.escape(title)}</title><desc id="d{number}">',
            html.escape(f"{y_name} over {x_name}: {described}. The values are in the table below."),
            "</desc>",
            *(
                _grid(LEFT, down(y), WIDTH - RIGHT, down(y)) + _text(LEFT - 6, down(y) + 4, "end", tick(y))
                for y in y_ticks
            ),
            *(_grid(across(x), TOP, across(x), HEIGHT - BOTTOM) for x in x_ticks),
            *(_text(across(x), HEIGHT - BOTTOM + 17, "middle", tick(x)) for x in x_ticks),
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "middle", x_name),
            f'<text {y_place} text-anchor="middle">{html.escape(y_name)}{" (log)" if log else ""}</text>',
            *(_line(line, style, across, down) for line, style in zip(series, styles, strict=True)),
            *(_label(line.name, style, y) for line, style, y in zip(series, styles, ends, strict=True)),
            "</svg>",
        ]
    )


def _axis(values: list[float], log: bool, start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Value → place between `start` and `end`, and where to put ticks."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
    shape = math.log if log else float
    margin = (shape(high) - shape(low)) * 0.04
    first, last = shape(low) - margin, shape(high) + margin
    locator = LogLocator(subs=(1, 2, 5)) if log else MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    ticks = [float(tick) for tick in locator.tick_values(low, high) if not log or tick > 0]
    kept = [tick for tick in ticks if first <= shape(tick) <= last]
    return lambda value: start + (shape(value) - first) / (last - first) * (end - start), kept


def _line(line: Series, style: int, x_scale: Callable[[float], float], y_scale: Callable[[float], float]) -> str:
    places = [(x_scale(x), y_scale(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    bars = "".join(
        f'<path d="M{x:.1f} {y_scale(low):.1f}V{y_scale(high):.1f}M{x - 4:.1f} {y_scale(low):.1f}h8M{x - 4:.1f} '
        f'{y_scale(high):.1f}h8"/>'
        for (x, _), (low, high) in zip(places, line.intervals, strict=False)
    )
    every = -(-len(places) // MARKED)
    marks = "".join(
        f'<g transform="translate({x:.1f} {y:.1f})">{marker_of(style)}</g>' for x, y in places[::-1][::every]
    )
    dash = style % len(DASHES)
    return f'<g class="s{dash}"><path d="{path}" stroke-dasharray="{DASHES[dash]}"/>{bars}{marks}</g>'


def _label(name: str, style: int, y: float) -> str:
    x = WIDTH - RIGHT + 14
    look = f"s{style % len(DASHES)}"
    marker = f'<g class="{look}"><g transform="translate({x} {y:.1f})">{marker_of(style)}</g></g>'
    return marker + _text(x + 9, y + 4, "start", name if len(name) <= LABEL else f"…{name[1 - LABEL :]}")


def marker_of(style: int) -> str:
    """Another one where a dash comes again."""
    return MARKERS[(style + style // len(DASHES)) % len(MARKERS)]


def _apart(places: list[float], lowest: float) -> list[float]:
    """The places, moved as little as keeps a line's height between them, or what room there is down to `lowest`."""
    step = min(LINE_HEIGHT, (lowest - TOP) / len(places))
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved, last = [0.0] * len(places), float("-inf")
    for number in order:
        last = moved[number] = max(places[number], last + step)
    bound = lowest
    for number in reversed(order):
        moved[number] = min(moved[number], bound)
        bound = moved[number] - step
    return moved


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, anchor: str, what: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(what)}</text>'


def tick(value: float) -> str:
    """A number for people."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
