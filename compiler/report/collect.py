"""Fills reports: a program with its native code as a ProgramReport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dnnc.backends.runtime.program import Program
from dnnc.ir.expr import Expr, Var, const, value
from dnnc.ir.shapes import as_env, resolve
from dnnc.ir.types import Dim
from dnnc.report import Count, KernelReport, MemoryReport, ProgramReport
from dnnc.report.log import Laps, Log

if TYPE_CHECKING:
    from dnnc.passes.base import PassRecord

__all__ = ["Laps", "Log", "kernel_reports", "program_report"]


def program_report(
    program: Program,
    dims: Mapping[Var, int],
    symbolic: bool,
    passes: Sequence[PassRecord],
    seconds: Mapping[str, float],
    fallbacks: tuple[str, ...],
) -> ProgramReport:
    """Facts of a program that was compiled. `dims`: its sizes or, if it serves all, the first ones asked for."""
    sizes = {v.name: n for v, n in dims.items()}  # by name: a program for all sizes may have closer bounds
    here = {v: sizes[v.name] for v in program.dims}
    alive = tuple(program.arena.alive(here))
    memory = MemoryReport(program.sizes(here)[1], program.arena.lower_bound(here), program.constant_bytes, alive)
    shown = dict(sorted(sizes.items()))
    kernels = kernel_reports(program, here)
    return ProgramReport(shown, symbolic, tuple(passes), kernels, memory, program.compiled, fallbacks, dict(seconds))


def kernel_reports(program: Program, dims: Mapping[Var, int]) -> tuple[KernelReport, ...]:
    """The unique kernels of a program that was compiled, in order of their first call."""
    env, out = as_env(dims), []
    for k in program.kernels:
        flops, nbytes = (_count(n, env) for n in program.work[k.symbol])
        out.append(KernelReport(k.name, k.symbol, len(k.calls), k.choice, k.parallel, flops, nbytes, k.calls))
    return tuple(out)


def _count(n: Dim, env: Mapping[Expr, Expr]) -> Count:
    d = resolve(const(n), env)
    number = d if isinstance(d, int) else value(d)
    return repr(d) if number is None else int(number)
