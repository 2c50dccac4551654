"""Reports of pruning: tables for a terminal, a page of a pruned model, and a page with plots of an exploration."""

from __future__ import annotations

import os
from math import log10
from typing import TYPE_CHECKING, Any

from dnnc.ir.errors import InputError, count
from dnnc.report import pages
from dnnc.report.layout import Table
from dnnc.report.lines import Line, chart, signs
from dnnc.report.quantized import check_packages
from dnnc.report.tables import show_bytes, show_seconds

if TYPE_CHECKING:
    from dnnc.pruning.result import Exploration, Point, Pruned, PrunedLayer, Sensitivity

RANDOM = "errors were measured on RANDOM numbers. Measure with --data before use"
GONE = "weights removed"
SLOWER = 1.05  # times as long, from which on a layer counts as slower
METHODS = {
    "magnitude": "smallest weights", "random": "random weights", "2:4": "2 of 4 channels", "block": "blocks",
    "structured": "output channels", "none": "none",
}  # fmt: skip


def tables(p: Pruned) -> list[Table]:
    """What became of each layer, and of the whole."""
    done = [x for x in p.layers if x.left < x.weights and not x.reason]
    title = (
        f"{p.name}: {len(done)} of {count(len(p.layers), 'layer')} pruned ({METHODS[p.method]}), "
        f"{p.sparsity:.1%} of the weights removed"
    )
    columns = ("layer", "operator", "weights", "left", "before", "after", "error", "reason")
    rows = tuple(_row(x) for x in p.layers)
    kept = [k for k, name in enumerate(columns) if k < 4 or any(r[k] for r in rows)]
    right = frozenset(("weights", "left", "before", "after", "error"))
    layers = Table(title, columns, rows, right, ("operator",), "see --json").only(kept)
    whole = Table("the whole model", ("", ""), tuple(_whole(p)))
    notes = [Table(note, (), ()) for note in (*p.notes, *([RANDOM] if p.random else []))]
    return [layers, whole, *notes]


def _row(x: PrunedLayer) -> tuple[str, ...]:
    counts = (f"{x.weights:,}", f"{x.density:.1%}") if x.weights else ("", "")
    error = "" if x.error is None else f"{x.error:.2g}"
    return (x.name, x.kind, *counts, _seconds(x.before), _seconds(x.after), error, x.reason)


def _seconds(x: float | None) -> str:
    return "" if x is None else show_seconds(x)


def _whole(p: Pruned) -> list[tuple[str, str]]:
    weights = p.weights
    rows = [("weights", f"{weights[0]:,} -> {weights[1]:,}")]
    if p.operations is not None:
        before, after = p.operations
        rows.append(("multiplications per sample", f"{_count(before)} -> {_count(after)}, {after / before:.1%}"))
    rows.append(("constants", f"{show_bytes(p.sizes[0])} -> {show_bytes(p.sizes[1])}"))
    if p.before is not None and p.after:
        ratio = f"speedup {p.before / p.after:.2f}x"
        rows.append(("kernel time of a call", f"{show_seconds(p.before)} -> {show_seconds(p.after)}, {ratio}"))
    if p.error is not None:
        rows.append(("error of the outputs", f"{p.error:.3g} (relative)"))
    if p.agreement is not None:
        rows.append(("same arg-max as before", f"{p.agreement:.2%}"))
    if p.score is not None:
        rows.append(("metric", f"{p.score[0]:.4g} -> {p.score[1]:.4g}"))
    return rows


def _count(n: int) -> str:
    """A number of operations."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)


def exploration_tables(e: Exploration) -> list[Table]:
    """Points of the whole model, and errors of layers."""
    columns = ("method", "sparsity", "density", "time", "speed-up", "error", "arg-max", "metric")
    rows = tuple(_point_row(p, e.points[0]) for p in e.points)
    kept = [k for k, name in enumerate(columns) if k < 3 or any(r[k] for r in rows)]
    points = Table(f"{e.name}: {e.samples} samples", columns, rows, frozenset(columns[1:])).only(kept)
    names = tuple(f"{s:.0%}" for s in e.sparsities)
    layers = Table(
        "output error if only this layer is pruned, by sparsity",
        ("layer", "operator", "weights", *names),
        tuple((x.name, x.kind, f"{x.weights:,}", *(f"{v:.2g}" for v in x.errors)) for x in e.layers),
        frozenset(("weights", *names)),
        ("operator",),
        "see --json",
    )
    return [points, layers, *_layer_times(e), *(Table(n, (), ()) for n in (*e.notes, *([RANDOM] if e.random else [])))]


def _layer_times(e: Exploration) -> list[Table]:
    """Times of layers, where they were measured."""
    if not any(x.seconds for x in e.layers):
        return []
    names = tuple(f"{s:.0%}" for s in e.sparsities)
    columns = ("layer", "dense", *names)
    rows = tuple((x.name, *map(_seconds, (x.before, *x.seconds))) for x in e.layers)
    title = "time of a layer's kernels if all layers are pruned by magnitude, by sparsity"
    return [Table(title, columns, rows, frozenset(columns[1:]), (), "see --json")]


def _point_row(p: Point, first: Point) -> tuple[str, ...]:
    speed = "" if not p.seconds or not first.seconds else f"{first.seconds / p.seconds:.2f} x"
    return (
        p.method,
        "" if p.method == "none" else f"{p.sparsity:.0%}",
        f"{p.density:.1%}",
        _seconds(p.seconds),
        speed,
        "" if p.error is None or p.method == "none" else f"{p.error:.3g}",
        "" if p.agreement is None else f"{p.agreement:.1%}",
        "" if p.score is None else f"{p.score:.4g}",
    )


# --- pages ------------------------------------------------------------------------------------------------------------


def write_html(p: Pruned, path: str | os.PathLike[str]) -> None:
    """Write the page of a pruned model. InputError where it cannot be written, or a package is missing."""
    check_packages()
    pages.write(html(p), path, InputError)


def write_exploration(e: Exploration, path: str | os.PathLike[str]) -> None:
    """Write the page of an exploration. InputError as above."""
    check_packages()
    pages.write(exploration_html(e), path, InputError)


def html(p: Pruned) -> str:
    """The page of a pruned model."""
    longest = max((max(x.before or 0.0, x.after or 0.0) for x in p.layers), default=0.0)
    worst = max((x.error or 0.0 for x in p.layers), default=0.0)
    return pages.plain_page(
        "pruned.html.j2", name=p.name, method=METHODS[p.method], sparsity=f"{p.sparsity:.1%}", figures=_whole(p),
        layers=[_bar(x, longest, worst) for x in p.layers], notes=[*p.notes, *([RANDOM] if p.random else [])],
        timed=any(x.before is not None for x in p.layers), judged=any(x.error is not None for x in p.layers),
        reasons=any(x.reason for x in p.layers),
    )  # fmt: skip


def _bar(x: PrunedLayer, longest: float, worst: float) -> dict[str, Any]:
    """A layer with the lengths of its bars, in percent."""
    name, kind, weights, left, before, after, error, reason = _row(x)

    def width(value: float | None, of: float) -> float:
        return round(100 * (value or 0.0) / of, 2) if of else 0.0

    return {
        "name": name, "kind": kind, "weights": weights, "left": left, "before": before, "after": after, "error": error,
        "reason": reason, "as_it_was": bool(reason), "density": round(100 * x.density, 2) if x.weights else 0,
        "before_width": width(x.before, longest), "after_width": width(x.after, longest),
        "error_width": width(x.error, worst), "slower": (x.after or 0.0) > SLOWER * (x.before or 0.0),
    }  # fmt: skip


def exploration_html(e: Exploration) -> str:
    """The page of an exploration: time and error by sparsity, the table, and layers as a map of errors."""
    methods = list(dict.fromkeys(p.method for p in e.points[1:]))
    first = e.points[0]
    of = {m: [p for p in e.points if p.method == m] for m in methods}
    by_time = [Line(m, [(_gone(p), p.seconds * 1e3) for p in of[m] if p.seconds]) for m in methods]
    by_error = [Line(m, [(_gone(p), p.error) for p in of[m] if p.error is not None]) for m in methods]
    plots = [chart("error of the outputs", GONE, by_error, percent=True)]
    if first.seconds:
        plots.append(chart("milliseconds of a call", GONE, by_time, level=first.seconds * 1e3, percent=True))
    table = exploration_tables(e)[0]
    return pages.plain_page(
        "explored.html.j2", name=e.name, samples=e.samples, plots=plots, columns=table.columns, rows=table.rows,
        sparsities=[f"{s:.0%}" for s in e.sparsities],
        layers=[_row_of_map(x) for x in e.layers], timed=any(x.seconds for x in e.layers),
        notes=[*e.notes, *([RANDOM] if e.random else [])], legend=signs(methods),
    )  # fmt: skip


def _gone(p: Point) -> float:
    """The share of the weights that is gone, as an axis shows it."""
    return round(1 - p.density, 3)


def _row_of_map(x: Sensitivity) -> dict[str, Any]:
    """A layer with the errors and times of each sparsity, as texts and how dark their cells are."""
    return {
        "name": x.name, "kind": x.kind, "weights": f"{x.weights:,}", "before": _seconds(x.before),
        "errors": [(f"{v:.2g}", _shade(v)) for v in x.errors],
        "times": [(_seconds(t), _gain(x.before, t)) for t in x.seconds],
    }  # fmt: skip


def _gain(before: float | None, now: float | None) -> float:
    """How dark the cell of a time is, from 0 to 1: the share of the time before that pruning saves."""
    return round(max(1 - now / before, 0.0), 3) if before and now is not None else 0.0


def _shade(error: float) -> float:
    """How dark a cell of the map is, from 0 to 1: an error of 0.001 and less is white, of 1 and more full."""
    return round(min(max(1 + log10(max(error, 1e-9)) / 3, 0.0), 1.0), 3)
