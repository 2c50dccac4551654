"""Fills reports: a program with its native code as a ProgramReport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dnnc.backends.runtime.link import describe, describe_control, unique_kernels
from dnnc.backends.runtime.program import Program
from dnnc.ir.errors import Loc
from dnnc.ir.expr import Expr, Var, const, value
from dnnc.ir.shapes import as_env, resolve
from dnnc.passes.base import PassRecord
from dnnc.passes.planning.program import AnyStep, ScheduledGraph, Step
from dnnc.report import Count, KernelReport, MemoryReport, ProgramReport
from dnnc.report.log import Laps, Log

__all__ = ["Laps", "Log", "kernel_reports", "program_report"]


def program_report(
    program: Program,
    dims: Mapping[Var, int],
    symbolic: bool,
    passes: Sequence[PassRecord],
    seconds: Mapping[str, float],
) -> ProgramReport:
    """Facts of a program that was compiled here. `dims`: its sizes or, if it serves all, the first ones asked for."""
    scheduled = program.scheduled
    assert scheduled is not None, "a loaded program brings its report"
    sizes = {v.name: n for v, n in dims.items()}  # by name: a program for all sizes may have closer bounds
    here = {v: sizes[v.name] for v in program.dims}
    alive = tuple(program.arena.alive(here))
    memory = MemoryReport(program.sizes(here)[1], program.arena.lower_bound(here), program.constant_bytes, alive)
    host = tuple(_where(g.nodes[0].locs, g.nodes[0].op.name) for g in scheduled.fusion.groups if g.kind == "host")
    shown = dict(sorted(sizes.items()))
    kernels = kernel_reports(scheduled, program.symbols, here)
    return ProgramReport(shown, symbolic, tuple(passes), kernels, memory, program.compiled, host, dict(seconds))


def kernel_reports(
    program: ScheduledGraph, symbols: Mapping[str, str], dims: Mapping[Var, int]
) -> tuple[KernelReport, ...]:
    """The unique kernels of a program in order of their first call."""
    env = as_env(dims)
    out = []
    for k, steps in zip(describe(program, symbols), unique_kernels(program).values()):
        moved = sum((const(v.type.nbytes) for v in steps[0].params), const(0))
        flops, nbytes = _count(steps[0].flops, env), _count(moved, env)
        out.append(KernelReport(k.name, k.symbol, len(steps), k.choice, k.parallel, flops, nbytes, k.calls))
    for s, k in zip(program.control, describe_control(program, [""] * len(program.control))):
        length = s.node.attrs.get("length")
        work = sum((const(inner.flops) * (1 if length is None else length) for inner in _kernels(s)), const(0))
        moved = sum((const(v.type.nbytes) for v in s.params), const(0))
        out.append(KernelReport(k.name, k.symbol, 1, k.choice, True, _count(work, env), _count(moved, env), k.calls))
    return tuple(out)


def _kernels(s: AnyStep) -> Iterator[Step]:
    """The kernels within a loop or branch."""
    if isinstance(s, Step):
        yield s
        return
    for b in s.bodies:
        for x in b.steps:
            yield from _kernels(x)


def _where(locs: Sequence[Loc], op: str) -> str:
    return f"{op} at {', '.join(map(str, locs))}" if locs else op


def _count(n: int | Expr, env: Mapping[Expr, Expr]) -> Count:
    d = resolve(const(n), env)
    number = d if isinstance(d, int) else value(d)
    return repr(d) if number is None else int(number)
