"""What the recipes share: trying a fusion of loops, finding unit-stride loops, the parallel outer loop."""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.pool import SERIAL_BELOW
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, free, substitute, walk
from dnnc.ir.loops.stmt import Block, For, Store, accesses, exprs, walk_stmts
from dnnc.passes.schedule.loops import annotate, fuse
from dnnc.passes.schedule.state import Schedule

# A part of a register tile's sums costs a pass over the tile, whose totals have left the L1 cache: about 180 cycles for
# 24 vectors, 8 % of parts of 192 additions. So parts are long, and only sums have them that are longer than others.
PART = 512  # additions at least that have a sum of their own
CHAIN = 2048  # additions one after another


def offsets(b: Block) -> list[Expr]:
    """The offset of every access to parameters in a block, stores included."""
    out = [x.buf.offset(x.idx) for x in accesses(b) if x.buf.space == "global"]
    return out + [s.buf.offset(s.idx) for s in walk_stmts(b) if isinstance(s, Store) and s.buf.space == "global"]


def _has_division(e: Expr, v: Var) -> bool:
    return any(isinstance(x, Op) and x.name in ("//", "%") and v in free(x) for x in walk(e))


def try_fuse(s: Schedule, outer: str, inner: str, name: str) -> bool:
    """Fuse two loops where no access becomes harder to compute: a row-major pair of axes becomes one axis."""
    mark = s.mark()
    try:
        s.apply(fuse, outer, inner, name)
    except ScheduleError:
        return False
    v = s.loop(name).var
    if any(_has_division(e, v) for e in offsets(s.body)) or _computes_with(s.body, v):
        s.restore(mark)
        return False
    s.collapse()
    return True


def _computes_with(b: Block, v: Var) -> bool:
    """Is v // n or v % n used outside of addresses (a guard, a value)?"""
    for st in walk_stmts(b):
        for e in exprs(st) if not isinstance(st, Store) else (st.value,):
            stack = [e]
            while stack:
                x = stack.pop()
                if isinstance(x, Load):
                    continue
                if isinstance(x, Op) and x.name in ("//", "%") and v in free(x):
                    return True
                stack += x.args if isinstance(x, Op) else ([t for t, _ in x.terms] if hasattr(x, "terms") else [])
    return False


def stride(e: Expr, v: Var) -> Expr:
    """How much an offset grows when v does by one, at v = 0."""
    return substitute(e, {v: const(1)}) - substitute(e, {v: const(0)})


def unit_stride(loop: For) -> bool:
    """Do the loads of a loop's body move by one element, or not at all, and some do?"""
    steps = [
        stride(x.buf.offset(x.idx), loop.var)
        for x in accesses(loop.body)
        if x.buf.space in ("global", "local") and loop.var in free(x.buf.offset(x.idx))
    ]
    return bool(steps) and all(x is const(1) for x in steps)


def worth(knobs: Mapping[str, int | str], work: int | Expr) -> int | Expr:
    """The work by which a kernel is shared among threads or not; the knob `serial`, where it is set, decides it."""
    return work if "serial" not in knobs else 0 if knobs["serial"] else SERIAL_BELOW


def parallel_outer(s: Schedule, names: list[str], work: int | Expr) -> None:
    """Fuse a perfect nest of loops into one and make it parallel, unless the work is too small."""
    if not names or (isinstance(work, int) and work < SERIAL_BELOW):
        return
    made = fused(s, names)
    if s.extent(made) != 1:
        s.apply(annotate, "parallel", made)


def fused(s: Schedule, names: list[str]) -> str:
    """Fuse the loops of a perfect nest into one, as far as they can be; the outermost loop that results."""
    names = list(names)
    while len(names) > 1:
        outer = s.loop(names[0])
        if len(outer.body) != 1 or not isinstance(outer.body[0], For) or outer.body[0].var.name != names[1]:
            break
        made = f"w{len(names)}"
        while s.has(made):
            made += "_"
        try:
            s.apply(fuse, names[0], names[1], made)
        except ScheduleError:  # the inner loop may be empty
            break
        names[:2] = [made]
    return names[0]
