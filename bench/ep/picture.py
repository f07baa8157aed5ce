"""Pictures of curves on two logarithmic axes, as SVG."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 1000, 560, 70, 20, 60, 360
COLOURS = (
    "#1b6ca8",
    "#d1495b",
    "#2e933c",
    "#edae49",
    "#6a4c93",
    "#00798c",
    "#8d6a9f",
    "#5c4742",
    "#888888",
    "#111111",
)
#: Dash patterns: the next one begins when all colours are used.
DASHES = ("", "6 3", "2 3")


class Curve(NamedTuple):
    """Points with a name."""

    name: str
    points: Sequence[tuple[float, float]]


class Axis:
    """Positions of values, from the power of ``base`` below the smallest to the one above the
    largest."""

    def __init__(self, values: Sequence[float], base: int, begin: float, end: float) -> None:
        self._base, self._begin, self._end = base, begin, end
        self._low = math.floor(math.log(min(values), base) + 1e-9)
        self._high = max(self._low + 1, math.ceil(math.log(max(values), base) - 1e-9))

    def at(self, value: float) -> float:
        share = (math.log(value, self._base) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def marks(self) -> list[float]:
        return [float(self._base) ** power for power in range(self._low, self._high + 1)]


def picture(across: str, up: str, curves: Sequence[Curve]) -> str:
    """The text of an SVG file. All values are more than 0."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        raise ValueError("a picture has points")
    x = Axis([point[0] for point in points], 4, LEFT, WIDTH - LEGEND)
    y = Axis([point[1] for point in points], 10, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x, y), *(_curve(x, y, nth, curve) for nth, curve in enumerate(curves))]
    parts += [
        _text((LEFT + WIDTH - LEGEND) / 2, HEIGHT - 15, across, "middle"),
        f'<g transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">{_text(0, 0, up, "middle")}</g>',
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    return (
        "\n".join(
            [head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>"]
        )
        + "\n"
    )


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for mark in x.marks():
        parts.append(_line(x.at(mark), TOP, x.at(mark), HEIGHT - BOTTOM))
        parts.append(_text(x.at(mark), HEIGHT - BOTTOM + 18, f"{mark:g}", "middle"))
    for mark in y.marks():
        parts.append(_line(LEFT, y.at(mark), WIDTH - LEGEND, y.at(mark)))
        parts.append(_text(LEFT - 8, y.at(mark) + 4, f"{mark:g}", "end"))
    return parts


def _curve(x: Axis, y: Axis, nth: int, curve: Curve) -> str:
    colour, dash = COLOURS[nth % len(COLOURS)], DASHES[nth // len(COLOURS) % len(DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    path = " ".join(f"{x.at(across):.1f},{y.at(up):.1f}" for across, up in curve.points)
    left, height = WIDTH - LEGEND + 15, TOP + 10 + 20 * nth
    sample = f'<polyline points="{left},{height} {left + 25},{height}" {style}/>'
    return f'<polyline points="{path}" {style}/>{sample}{_text(left + 32, height + 4, curve.name, "start")}'


def _line(left: float, top: float, right: float, bottom: float) -> str:
    return f'<line x1="{left:.1f}" y1="{top:.1f}" x2="{right:.1f}" y2="{bottom:.1f}" stroke="#dddddd"/>'


def _text(left: float, top: float, text: str, anchor: str) -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
