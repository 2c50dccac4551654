"""Plots of few lines as SVG text: no script, and colours of the page's theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 14, 44
APART = 46  # of labels on the axis: one is as wide as "98.6 %"
SHAPES = ("circle", "square", "diamond", "triangle", "circle", "square")


@dataclass(frozen=True)
class Line:
    """A name and its points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


def chart(y_title: str, x_title: str, lines: Sequence[Line], level: float | None = None, percent: bool = False) -> str:
    """An SVG of lines with markers; axes begin at 0.

    Args:
        level: a dashed horizontal line, such as where one begins.
        percent: are the xs shares?

    Lines have the classes `line0`, `line1` ..., for which the page has colours.
    """
    xs = [x for k in lines for x, _ in k.points]
    ys = [y for k in lines for _, y in k.points] + ([level] if level is not None else [])
    low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    pad = (high - low) * 0.04 or 0.02
    low, high = low - pad, high + pad
    steps = ticks(max(ys, default=1.0))
    top = steps[-1] or 1.0

    def at_x(x: float) -> float:
        return round(LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def at_y(y: float) -> float:
        return round(HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM), 1)

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_title)} by {escape(x_title)}">']
    for y in steps:
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y)}" y2="{at_y(y)}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{at_y(y) + 4}" text-anchor="end">{y:.4g}</text>')
    shown, last = sorted(set(xs)), -1e9
    for x in shown:
        if at_x(x) - last < APART:
            continue
        last = at_x(x)
        text = f"{x:.4g}" if not percent else f"{100 * x:.4g} %"
        out.append(f'<text class="tick" x="{at_x(x)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    out.append(
        f'<text class="title" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(
        f'<text class="title" x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        f"{escape(y_title)}</text>"
    )
    if level is not None:
        out.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(level)}" y2="{at_y(level)}"/>')
    for k, line in enumerate(lines):
        places = [(at_x(x), at_y(y)) for x, y in sorted(line.points)]
        if len(places) > 1:
            out.append(f'<polyline class="line{k}" points="{" ".join(f"{x},{y}" for x, y in places)}"/>')
        out += [marker(SHAPES[k % len(SHAPES)], x, y, k) for x, y in places]
    out.append("</svg>")
    return "".join(out)


def marker(shape: str, x: float, y: float, k: int) -> str:
    """A point of the k-th line."""
    kind = f'class="mark{k}"'
    if shape == "circle":
        return f'<circle {kind} cx="{x}" cy="{y}" r="3.6"/>'
    if shape == "square":
        return f'<rect {kind} x="{x - 3.3:.1f}" y="{y - 3.3:.1f}" width="6.6" height="6.6"/>'
    points = [(0, -4.6), (4.6, 0), (0, 4.6), (-4.6, 0)] if shape == "diamond" else [(0, -4.4), (4.2, 3.4), (-4.2, 3.4)]
    return f'<polygon {kind} points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in points)}"/>'


def signs(names: Sequence[str]) -> list[tuple[str, str]]:
    """The legend: for each line its marker, in an area of 12 x 12, and its name."""
    return [(marker(SHAPES[k % len(SHAPES)], 6, 6, k), name) for k, name in enumerate(names)]


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to `top` or a little more, five at most beside 0."""
    if top <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** floor(log10(top))
    step = next(s * unit for s in (0.2, 0.25, 0.5, 1.0, 2.0, 2.5) if top / (s * unit) <= 5.0001)
    return [step * k for k in range(ceil(top / step - 1e-9) + 1)]
