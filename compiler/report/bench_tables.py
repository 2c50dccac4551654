"""A benchmark's result as tables: one row per engine, and what to know about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dnnc.ir.errors import count
from dnnc.report.layout import Table
from dnnc.report.tables import show_bytes, show_seconds

if TYPE_CHECKING:
    from dnnc.tools.bench import Bench, EngineTimes


def bench_tables(b: Bench) -> list[Table]:
    """Times of the engines, then facts and warnings as lines."""
    columns = ("engine", "p50", "p90", "p99", "calls/s", "ratio", "error", "first result", "memory", "peak")
    table = Table(_title(b), columns, tuple(_row(e) for e in b.engines), frozenset(columns[1:]))
    lines = tuple((line,) for line in _lines(b))
    return [table, Table("notes", (), lines)] if lines else [table]


def _title(b: Bench) -> str:
    shapes = ", ".join(f"{n} {d}[{', '.join(map(str, s))}]" for n, d, s in b.inputs)
    return f"{b.model}, {count(b.threads, 'thread')}; {shapes}"


def show_number(x: float) -> str:
    """Four digits, never an exponent: `13180`, `12.35`."""
    return f"{x:.0f}" if x >= 1e4 else f"{x:.4g}"


def _row(e: EngineTimes) -> tuple[str, ...]:
    ratio = "-" if e.ratio is None else f"{e.ratio[0]:.2f} ({e.ratio[1]:.2f} to {e.ratio[2]:.2f})"
    off = "-" if e.error is None else f"{e.error:.1e}"
    sizes = ("-" if n is None else show_bytes(n) for n in (e.memory, e.peak))
    return (
        f"{e.name} {e.version}",
        *map(show_seconds, (e.p50, e.p90, e.p99)),
        show_number(e.throughput),
        ratio,
        off,
        show_seconds(e.load),
        *sizes,
    )


def _lines(b: Bench) -> list[str]:
    lines = []
    if b.overhead is not None:
        lines.append(
            f"dnnc spends {show_seconds(b.overhead)} of a call outside kernels; "
            f"{count(b.compiled or 0, 'kernel')} compiled, "
            f"{b.from_cache or 0} from the cache"
        )
    if len(b.engines) > 1:
        lines.append(
            "ratio: median time over dnnc's, above 1 if dnnc is faster; error: largest difference from dnnc's outputs, "
            "relative to the largest output"
        )
    lines += [f"{name} cannot run this model: {why}" for name, why in b.failures.items()]
    lines += [
        f"outputs of {e.name} and dnnc differ: {e.error:.1e} of the largest output"
        for e in b.engines
        if e.agrees is False
    ]
    return lines
