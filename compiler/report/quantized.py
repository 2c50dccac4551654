"""The report of a quantization: tables for a terminal, and a page of time won and error paid, layer by layer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dnnc.ir.errors import InputError, count
from dnnc.report import pages
from dnnc.report.layout import Table
from dnnc.report.tables import show_bytes, show_seconds

if TYPE_CHECKING:
    from dnnc.quantization.result import LayerResult, Quantized

FLOAT = "float"
RANDOM = "calibrated on RANDOM numbers: times are valid, accuracy is not. Quantize with --data before use"


def tables(q: Quantized) -> list[Table]:
    """What was done to each layer, and to the whole."""
    done = [x for x in q.layers if x.scheme != FLOAT]
    title = f"{q.name}: {len(done)} of {count(len(q.layers), 'layer')} quantized ({q.scheme}), {q.samples} samples"
    columns = ("layer", "operator", "scheme", "float", "quantized", "saved", "error", "reason")
    rows = tuple(_row(x) for x in q.layers)
    kept = [k for k, name in enumerate(columns) if k < 3 or any(r[k] for r in rows)]
    right = frozenset(("float", "quantized", "saved", "error"))
    layers = Table(title, columns, rows, right, ("operator",), "see --json").only(kept)
    whole = Table("the whole model", ("", ""), tuple(_whole(q)))
    notes = [Table(note, (), ()) for note in q.notes]
    warning = [Table(RANDOM, (), ())] if q.random else []
    return [layers, whole, *notes, *warning]


def _row(x: LayerResult) -> tuple[str, ...]:
    return (
        x.name,
        x.kind,
        x.scheme,
        _seconds(x.before),
        _seconds(x.after),
        _won(x),
        "" if x.error is None else f"{x.error:.2g}",
        x.reason,
    )


def _won(x: LayerResult) -> str:
    if x.won is None or x.scheme == FLOAT:
        return ""
    return show_seconds(x.won) if x.won >= 0 else f"-{show_seconds(-x.won)}"


def _seconds(x: float | None) -> str:
    return "" if x is None else show_seconds(x)


def _whole(q: Quantized) -> list[tuple[str, str]]:
    rows = [("constants", f"{show_bytes(q.sizes[0])} -> {show_bytes(q.sizes[1])}")]
    if q.before is not None and q.after:
        ratio = f"speedup {q.before / q.after:.2f}x"
        rows.append(("kernel time of a call", f"{show_seconds(q.before)} -> {show_seconds(q.after)}, {ratio}"))
    if q.error is not None:
        rows.append(("error of the outputs", f"{q.error:.3g} (relative)"))
    if q.agreement is not None:
        rows.append(("same arg-max as float", f"{q.agreement:.2%}"))
    if q.score is not None:
        rows.append(("metric", f"{q.score[0]:.4g} -> {q.score[1]:.4g}"))
    return rows


# --- the page ---------------------------------------------------------------------------------------------------------


def write_html(q: Quantized, path: str | os.PathLike[str]) -> None:
    """Write the page. InputError where it cannot be written, or a package is missing."""
    check_packages()
    pages.write(html(q), path, InputError)


def check_packages() -> None:
    """InputError where a package is missing that the page takes."""
    pages.needed(InputError, ("jinja2",))


def html(q: Quantized) -> str:
    """The page."""
    longest = max((max(x.before or 0.0, x.after or 0.0) for x in q.layers), default=0.0)
    worst = max((x.error or 0.0 for x in q.layers), default=0.0)
    layers = [_bar(x, longest, worst) for x in q.layers]
    done = sum(x.scheme != FLOAT for x in q.layers)
    figures = [(f"of {count(len(q.layers), 'layer')}", str(done)), *((label, value) for label, value in _whole(q))]
    timed = any(x.before is not None for x in q.layers)
    judged = any(x.error is not None for x in q.layers)
    notes, reasons = [*q.notes, *([RANDOM] if q.random else [])], any(x.reason for x in q.layers)
    return pages.plain_page(
        "quantized.html.j2", name=q.name, scheme=q.scheme, samples=q.samples, figures=figures, layers=layers,
        timed=timed, judged=judged, notes=notes, reasons=reasons,
    )  # fmt: skip


def _bar(x: LayerResult, longest: float, worst: float) -> dict[str, Any]:
    """A layer with the lengths of its bars, in percent."""
    return {
        "name": x.name,
        "kind": x.kind,
        "scheme": x.scheme,
        "float": x.scheme == FLOAT,
        "before": _seconds(x.before),
        "after": _seconds(x.after),
        "won": _won(x),
        "lost": x.won is not None and x.won < 0,
        "error": "" if x.error is None else f"{x.error:.2g}",
        "reason": x.reason,
        "before_width": _percent(x.before, longest),
        "after_width": _percent(x.after, longest),
        "error_width": _percent(x.error, worst),
    }


def _percent(x: float | None, most: float) -> float:
    return 0.0 if x is None or not most else round(100 * x / most, 2)
