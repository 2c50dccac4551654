"""Schedule primitive `quads`: four steps of an integer sum become one `dot4` of a vector of results.

    for l in range(16):                                        acc[i, 0:+16] = dot4(acc[i, 0:+16],
        for q in range(4):                                 ->      a[i, 4*k:+4], b[k, 0:+64])
            acc[i, l] = acc[i, l] + cast(a[i, 4*k + q]) * cast(b[k, 4*l + q])

Bytes of `a` are the same for all lanes, those of `b` lie one behind the other. Sums of integers have no order. Two
steps of a sum of bfloat16 products become `acc + dot2(a, b)` in the same way.
"""

from __future__ import annotations

from dnnc.ir.dtype import DType, bf16, f32, i8, i32, u8
from dnnc.ir.encodings import neighbours
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, extent, free, load, substitute, value
from dnnc.ir.loops.stmt import Block, For, Store, call
from dnnc.passes.schedule.loops import guarded, guards_of, is_reduction
from dnnc.passes.schedule.state import edit, only


def quads(b: Block, lane: str, quad: str) -> Block:
    """The loop `lane`, in which stands the loop `quad` of four or two steps and nothing else, as one statement."""

    def go(s: For) -> Block:
        inner = only(s)
        conds, body = guards_of(inner.body)
        lanes, st = value(s.extent), body[0]
        if (
            inner.var.name != quad
            or lanes is None
            or len(body) != 1
            or any({s.var, inner.var} & free(c) for c in conds)
            or not isinstance(st, Store)
            or st.buf.dtype not in (i32, f32)
            or not is_reduction(st)
        ):
            raise ScheduleError(f"{lane} and {quad} are no loops over lanes and steps of a sum in i32 or f32")
        assert isinstance(st.value, Op)
        own = next(a for a in st.value.args if isinstance(a, Load) and a.buf is st.buf)
        a, w = factors_of([a for a in st.value.args if a is not own], st.buf.dtype, s.var)
        steps = neighbours(w.dtype)
        if value(inner.extent) != steps:
            raise ScheduleError(f"{quad} has {inner.extent!r} steps, {steps} products of {w.dtype} are one instruction")
        first: dict[Expr, Expr] = {s.var: s.lo, inner.var: inner.lo}
        _check(s.var, inner.var, a, 0, 1)
        _check(s.var, inner.var, w, steps, 1)
        if inner.var in free_of(own) or _step(own, s.var) != 1:
            raise ScheduleError(f"{lane} is not the unit stride of {own!r}")
        acc, x, y = (
            load(v.buf, [substitute(i, first) for i in v.idx], n)
            for v, n in ((own, lanes), (a, steps), (w, steps * lanes))
        )
        assert isinstance(acc, Load)
        total = call("dot4", acc, x, y) if st.buf.dtype is i32 else acc + call("dot2", x, y)
        return guarded(conds, (Store(st.buf, acc.idx, total, lanes),))

    return edit(b, lane, go)


def factors_of(terms: list[Expr], sums: DType, lane: Var) -> tuple[Load, Load]:
    """The factors of a product, of which `terms` are those of an fma: that which all lanes share, that of each lane."""
    if len(terms) == 1 and isinstance(terms[0], Op) and terms[0].name == "*":
        terms = list(terms[0].args)
    loads: list[Load] = []
    for f in terms:
        if isinstance(f, Op) and f.name == f"cast_{sums}" and isinstance(f.args[0], Load):
            loads.append(f.args[0])
    loads.sort(key=lambda x: lane in free_of(x))
    types = tuple(x.dtype for x in loads)
    if types not in (((u8, i8), (i8, i8)) if sums is i32 else ((bf16, bf16),)):
        raise ScheduleError(f"{terms!r} are no factors of bytes, the second i8, or of bf16")
    return loads[0], loads[1]


def free_of(x: Load) -> frozenset[Var]:
    return frozenset().union(*(free(i) for i in x.idx))


def _step(x: Load, v: Var) -> int | None:
    """How far a load moves along its last axis with v; None where it is no constant, or along other axes too."""
    n = (value(extent(v)) or 1) - 1
    ends = [[substitute(i, {v: const(k)}) for i in x.idx] for k in (0, n)]
    moved = [value(e - s) for s, e in zip(*ends)]
    return moved[-1] // n if n and not any(moved[:-1]) and moved[-1] is not None and moved[-1] % n == 0 else None


def _check(lane: Var, quad: Var, x: Load, along_lane: int, along_quad: int) -> None:
    steps = _step(x, lane) if lane in free_of(x) else 0, _step(x, quad)
    if steps != (along_lane, along_quad):
        raise ScheduleError(f"{x!r} moves by {steps} with {lane.name} and {quad.name}, not by {along_lane, along_quad}")
