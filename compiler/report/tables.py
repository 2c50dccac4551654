"""A report as tables, and tables as plain text. The command line renders the same tables with colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from dnnc.ir.errors import count
from dnnc.report.layout import Table, aligned

if TYPE_CHECKING:
    from dnnc.report import Count, KernelReport, ProgramReport, Report

STAGES = ("passes", "compile", "check", "link")  # of a program, in this order
SHOWN_KERNELS = 20  # of a program; --json has all of them
SHOWN_NODES = 2
SHOWN_NOTES = 10


def plain_text(tables: Iterable[Table]) -> str:
    """Tables one below the other, columns aligned."""
    return "\n\n".join(_lines(t) for t in tables)


def _lines(t: Table) -> str:
    if not t.columns:
        return "\n".join([t.title, *(f"  {' '.join(r)}" for r in t.rows)])
    return "\n".join([t.title, *(f"  {line}" for line in aligned(t, t.widths))])


# --- numbers for people -----------------------------------------------------------------------------------------------


def show_bytes(n: Count) -> str:
    """`1536` -> `1.5 KB`."""
    return _scaled(n, 1024, ("B", "KB", "MB", "GB", "TB"))


def show_count(n: Count) -> str:
    """`2500000` -> `2.5 M`."""
    return _scaled(n, 1000, ("", "K", "M", "G", "T"))


def _scaled(n: Count, step: int, units: Sequence[str]) -> str:
    if isinstance(n, str):
        return n if len(n) <= 24 else "symbolic"
    x, k = float(n), 0
    while x >= step and k < len(units) - 1:
        x, k = x / step, k + 1
    return f"{n} {units[0]}".rstrip() if k == 0 else f"{x:.3g} {units[k]}" if x < 1000 else f"{x:.0f} {units[k]}"


def show_seconds(s: float) -> str:
    """`0.0021` -> `2.1 ms`."""
    if s >= 1:
        return f"{s:.2f} s"
    return f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} us"


def show_dims(dims: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{n}={d}" for n, d in dims)


def show_nodes(nodes: Sequence[str]) -> str:
    """The nodes of the first calls of a kernel, and how many more calls there are."""
    more = len(nodes) - SHOWN_NODES
    return "; ".join(nodes[:SHOWN_NODES]) + (f"; and {more} more" if more > 0 else "")


def with_schedules(t: Table, schedules: Sequence[tuple[str, str]]) -> list[Table]:
    """A table of kernels without its schedules, and a list of (kernel, schedule) in full."""
    kept = [k for k, name in enumerate(t.columns) if name != "schedule"]
    return [t.only(kept), Table("schedules", (), tuple((f"{name}:", choice) for name, choice in schedules))]


# --- the report -------------------------------------------------------------------------------------------------------


def report_tables(r: Report, passes: bool = True, detail: bool = False) -> list[Table]:
    """What a report says, in the order in which it happened; of several programs the last one in full.

    Args:
        r: the report.
        passes: a row for each pass, rather than one line for all.
        detail: list all kernels, and their schedules in full below the table.
    """
    signature = [
        (kind, s.name, f"{s.dtype}[{', '.join(map(str, s.shape))}]")
        for kind, specs in (("input", r.inputs), ("output", r.outputs))
        for s in specs
    ]
    tables = [
        Table(f"{r.name}: {r.target}, {count(r.threads, 'thread')}", ("", "name", "type"), tuple(signature)),
        *(Table(note, (), ()) for note in r.notes),
    ]
    if r.target == "reference":
        return tables
    if not r.programs:
        later = Table("not compiled yet: the first call compiles for its shapes", (), ())
        return [*tables, _fallbacks(r.host) if r.host else later]
    if len(r.programs) > 1 or r.programs[-1].dims:
        tables.append(_programs(r))
    return [*tables, *program_tables(r.programs[-1], r.host, passes, detail), _seconds(r)]


def _programs(r: Report) -> Table:
    rows = tuple(
        (
            show_dims(p.dims.items()),
            "all sizes" if p.symbolic else "these sizes",
            str(p.compiled),
            show_bytes(p.memory.arena),
            show_seconds(sum(p.seconds.values())),
        )
        for p in r.programs
    )
    columns = ("dims", "serves", "compiled", "arena", "time")
    return Table("programs (details of the last one below)", columns, rows, frozenset(("compiled", "arena", "time")))


def program_tables(
    p: ProgramReport, host: Sequence[str] = (), passes: bool = True, detail: bool = False
) -> list[Table]:
    """Passes, kernels, memory and fallbacks of one program; `host` are nodes that run beside it."""
    return [_passes(p, passes), *_notes(p), *_kernels(p, detail), _memory(p), _fallbacks((*host, *p.fallbacks))]


def _passes(p: ProgramReport, each: bool) -> Table:
    if not p.seconds:  # loaded: the times of its compilation are not in the file
        changed = [x.name for x in p.passes if x.changed]
        return Table(f"passes at compile time: {len(p.passes)}, {len(changed)} of them changed the graph", (), ())
    when = " at compile time (this program came from the cache)" if p.kept else ""
    if not each:
        ran = [x for x in p.passes if x.seconds or x.changed]  # others are notes alone
        before, after = (ran[0].nodes_before, ran[-1].nodes_after) if ran else (0, 0)
        names = ", ".join(x.name for x in ran if x.changed) or "none"
        title = (
            f"passes{when}: {len(ran)} in {show_seconds(sum(x.seconds for x in ran))}, {before} -> {after} nodes; "
            f"changed by {names}"
        )
        return Table(title, (), ())
    rows = [
        (x.name, show_seconds(x.seconds), f"{x.nodes_before} -> {x.nodes_after}", "" if x.changed else "unchanged")
        for x in p.passes
    ]
    return Table(f"passes{when}", ("pass", "time", "nodes", ""), tuple(rows), frozenset(("time", "nodes")))


def _notes(p: ProgramReport) -> list[Table]:
    """What passes say that users should know; no table where none says anything."""
    rows = [(x.name, note) for x in p.passes for note in x.notes]
    more = [("", f"and {len(rows) - SHOWN_NOTES} more")] if len(rows) > SHOWN_NOTES else []
    return [Table("notes of passes", ("", ""), (*rows[:SHOWN_NOTES], *more))] if rows else []


def _kernels(p: ProgramReport, detail: bool) -> list[Table]:
    origin = f"{p.compiled} compiled, {p.from_cache} from the cache" if p.seconds else "loaded"
    title = f"kernels: {count(p.calls, 'call')}, {count(len(p.kernels), 'unique kernel')}, {origin}"
    shown = sorted(p.kernels, key=_work, reverse=True)
    most = len(shown) if detail else SHOWN_KERNELS
    rows = [
        (k.name, str(k.count), show_count(k.flops), show_bytes(k.bytes), k.choice, show_nodes(k.nodes))
        for k in shown[:most]
    ]
    if len(shown) > most:
        rows.append((f"and {len(shown) - most} smaller", "", "", "", "", ""))
    columns = ("kernel", "calls", "flops", "bytes", "schedule", "nodes")
    table = Table(title, columns, tuple(rows), frozenset(columns[1:4]), ("schedule",), "see --detail")
    return with_schedules(table, [(k.name, k.choice) for k in shown]) if detail else [table]


def _work(k: KernelReport) -> float:
    flops, moved = (n if isinstance(n, int) else float("inf") for n in (k.flops, k.bytes))
    return max(flops, moved) * k.count


def _memory(p: ProgramReport) -> Table:
    m = p.memory
    over = f" (the arena is {m.arena / m.lower_bound - 1:.1%} larger)" if m.lower_bound else ""
    rows = [
        ("arena", show_bytes(m.arena)),
        ("lower bound", show_bytes(m.lower_bound) + over),
        ("constants", show_bytes(m.constants)),
    ]
    return Table("memory", ("", ""), tuple(rows))


def _fallbacks(host: Sequence[str]) -> Table:
    counts = [(node, len(list(same))) for node, same in groupby(sorted(host))]
    title = f"on the host: {count(len(host), 'node')}" if counts else "on the host: nothing"
    return Table(title, (), tuple((f"{node} x{n}" if n > 1 else node,) for node, n in counts))


def _seconds(r: Report) -> Table:
    names = dict.fromkeys([*STAGES, *(name for p in r.programs for name in p.seconds)])
    if not any(p.seconds for p in r.programs):
        return Table(f"loaded in {show_seconds(r.import_seconds)}", (), ())
    stages = {"import": r.import_seconds, **{name: sum(p.seconds.get(name, 0.0) for p in r.programs) for name in names}}
    rows = [*stages.items(), ("total", sum(stages.values()))]
    return Table("time", ("stage", "time"), tuple((name, show_seconds(s)) for name, s in rows), frozenset(("time",)))
