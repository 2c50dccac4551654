"""A profile as tables: the machine's limits, where the time goes, each kernel, and on demand each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dnnc.ir.errors import count
from dnnc.report.layout import Table
from dnnc.report.tables import show_bytes, show_dims, show_nodes, show_seconds, with_schedules

if TYPE_CHECKING:
    from dnnc.tools.profile import KernelTime, Profile

SHOWN_KERNELS = 30
LESS = ("schedule", "even", "calls", "limit", "GB/s", "GFLOP/s")  # columns that go first on a narrow terminal


def profile_tables(p: Profile, detail: bool = False) -> list[Table]:
    """With `detail` all kernels, and all calls in the order of the program; else the kernels that take longest."""
    shown = [_ceilings(p), _parts(p), *_kernels(p, detail)]
    return [*shown, _calls(p)] if detail else shown


def show_rate(n: float | None, unit: str) -> str:
    """`3.1e11` -> `310 GFLOP/s`."""
    return "-" if n is None else f"{n / 1e9:.3g} {unit}"


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.1f} %"


def _ceilings(p: Profile) -> Table:
    c = p.ceilings
    rows = [("multiply-add, float32", "", show_rate(c.flops, "GFLOP/s"))]
    rows += [
        (v.name, f"up to {show_bytes(v.capacity)}" if v.capacity else "", show_rate(v.rate, "GB/s")) for v in c.levels
    ]
    title = f"limits of this machine with {count(p.threads, 'thread')} (best measurement so far)"
    return Table(title, ("", "data", "rate"), tuple(rows), frozenset(("data", "rate")))


def _parts(p: Profile) -> Table:
    kernels = sum(k.seconds for k in p.kernels)
    parts = {
        f"kernels ({count(len(p.calls), 'call')})": kernels,
        "waiting at barriers": p.waiting,
        "Python, starting and joining threads": p.overhead,
    }
    parts["rest (varies between calls)"] = max(p.total - sum(parts.values()), 0.0)
    rows = [(name, show_seconds(s), _percent(s / p.total)) for name, s in (*parts.items(), ("total", p.total))]
    at = f" at {show_dims(p.dims.items())}" if p.dims else ""
    title = f"{p.name}{at}: {p.target}, median of {count(p.repeats, 'call')}"
    return Table(title, ("part", "time", "share"), tuple(rows), frozenset(("time", "share")))


def _kernels(p: Profile, detail: bool) -> list[Table]:
    most = len(p.kernels) if detail else SHOWN_KERNELS
    rows = [_kernel(k) for k in p.kernels[:most]]
    rest = p.kernels[most:]
    if rest:
        seconds = sum(k.seconds for k in rest)
        calls = str(sum(k.calls for k in rest))
        rows.append((f"and {len(rest)} more", calls, show_seconds(seconds), _percent(seconds / p.total), *[""] * 6))
    columns = ("kernel", "calls", "time", "share", "GFLOP/s", "GB/s", "of limit", "limit", "even", "schedule", "nodes")
    numbers = frozenset(columns[1:7]) | {"even"}
    filled = tuple((*r, *[""] * (len(columns) - len(r))) for r in rows)
    table = Table(
        "kernels (calls of the same kernel added up)", columns, filled, numbers, () if detail else LESS, "see --detail"
    )
    return with_schedules(table, [(k.name, k.choice) for k in p.kernels]) if detail else [table]


def _kernel(k: KernelTime) -> tuple[str, ...]:
    rates = ("-" if r is None else f"{r / 1e9:.3g}" for r in (k.flops_per_second, k.bytes_per_second))
    even = _percent(k.balance) if k.parallel else "1 thread"
    reached = _percent(k.reached)
    return (
        k.name,
        str(k.calls),
        show_seconds(k.seconds),
        _percent(k.share),
        *rates,
        reached,
        k.bound or "-",
        even,
        k.choice,
        show_nodes(k.nodes),
    )


def _calls(p: Profile) -> Table:
    rows = [
        (str(n), c.kernel, show_seconds(c.seconds), show_seconds(c.waiting), _percent(c.balance), c.nodes)
        for n, c in enumerate(p.calls)
    ]
    columns = ("call", "kernel", "time", "then waits", "even", "nodes")
    return Table("calls in program order", columns, tuple(rows), frozenset(("call", "time", "then waits", "even")))
