"""Recipe for rows whose elements depend on earlier ones: rows in parallel, elements in order.

What an element reduces over the ones before it becomes vector accumulators where it walks memory in order.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.common import parallel_outer, unit_stride, worth
from dnnc.backends.llvm.templates.maps import lanes_for, shares
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, free, walk
from dnnc.ir.loops.stmt import Block, For, If, Kernel, Stmt, Store, walk_stmts
from dnnc.passes.lower.form import Scan
from dnnc.passes.schedule.loops import narrow
from dnnc.passes.schedule.memory import vector_reduce
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.state import Schedule

ORDER = ("lanes", "chains")


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    return [(("lanes", lanes_for(problem, target)), ("chains", 2))] if problem.kind == "sequence" else []


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Sums under way at once, vectors, and whether one thread does all."""
    out: list[Knobs] = []
    for first in candidates(problem, target):
        lanes = int(dict(first)["lanes"])
        sums = [varied(first, lanes=n, chains=c) for n in (lanes, lanes // 2, 2 * lanes) if n > 1 for c in (1, 2, 4, 8)]
        out += [*sums, *(varied(k, **one) for one in shares(problem) for k in (first, *sums))]
    return out


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    s.apply(unswitch).apply(narrow)
    for names in problem.lowered.reductions:
        if not s.has(names[-1]) or not unit_stride(s.loop(names[-1])):
            continue
        mark = s.mark()
        try:
            s.apply(vector_reduce, names[-1], int(knobs["lanes"]), int(knobs["chains"]))
        except ScheduleError:
            s.restore(mark)
    assert isinstance(problem.form, Scan)
    rows = [v.name for v in problem.form.outer if v not in problem.form.along]
    parallel_outer(s, rows, worth(knobs, problem.form.elements))
    return s.done()


def unswitch(b: Block) -> Block:
    """`for r: if c: s` -> `if c: for r: s` where c depends neither on r nor on s: finished rows cost nothing."""
    out: list[Stmt] = []
    for s in b:
        if isinstance(s, For):
            body = unswitch(s.body)
            conds: list[Expr] = []
            while (
                len(body) == 1
                and isinstance(inner := body[0], If)
                and not inner.other
                and _invariant(inner.cond, s, inner.then)
            ):
                conds.append(inner.cond)
                body = inner.then
            block: Block = (For(s.var, s.lo, s.hi, s.kind, body),)
            for c in reversed(conds):
                block = (If(c, block),)
            out += block
        elif isinstance(s, If):
            out.append(If(s.cond, unswitch(s.then), unswitch(s.other)))
        else:
            out.append(s)
    return tuple(out)


def _invariant(c: Expr, loop: For, body: Block) -> bool:
    written = {s.buf for s in walk_stmts(body) if isinstance(s, Store)}
    return loop.var not in free(c) and not any(isinstance(x, Load) and x.buf in written for x in walk(c))
