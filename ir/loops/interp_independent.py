"""Loops that the interpreter may run side by side: iterations provably write different elements.

Widening changes only the speed: an iteration becomes one more row of the arrays. All others run in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dnnc.ir.bounds import index_form
from dnnc.ir.expr import Expr, Load, Op, Ref, Var, substitute, walk
from dnnc.ir.loops.interp_memory import PRIVATE
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Eval, For, Func, If, Let, Store, exprs, walk_stmts

SEQUENTIAL = ("range", "unroll", "vector")


@dataclass(slots=True)
class _Body:
    """What the body of a loop touches; lets are inlined, so that indices speak of loop variables only."""

    inner: set[Var] = field(default_factory=set)
    own: set[Buffer] = field(default_factory=set)
    touched: dict[Buffer, list[tuple[tuple[Expr, ...], int]]] = field(default_factory=dict)
    written: set[Buffer] = field(default_factory=set)

    def touch(self, buf: Buffer, idx: tuple[Expr, ...], lanes: int) -> None:
        self.touched.setdefault(buf, []).append((idx, lanes))

    def scan(self, block: Block, lets: dict[Expr, Expr]) -> bool:
        """False where something stands that must not be widened."""
        for s in block:
            if isinstance(s, Eval):
                if s.name != "prefetch":
                    return False
                continue
            if (isinstance(s, For) and s.kind not in SEQUENTIAL) or (
                isinstance(s, Alloc) and s.buf.space not in PRIVATE
            ):
                return False
            if isinstance(s, Alloc):
                self.own.add(s.buf)
            values = [substitute(e, lets) for e in exprs(s)]
            for e in values:
                if not self.expr(e):
                    return False
            if isinstance(s, Store):
                self.written.add(s.buf)
                self.touch(s.buf, tuple(values[: len(s.idx)]), s.lanes)
            elif isinstance(s, Let):
                lets = {**lets, s.var: values[0]}
            elif isinstance(s, For):
                self.inner.add(s.var)
                if not self.scan(s.body, {k: v for k, v in lets.items() if k is not s.var}):
                    return False
            elif isinstance(s, If) and not (self.scan(s.then, lets) and self.scan(s.other, lets)):
                return False
        return True

    def expr(self, e: Expr) -> bool:
        for x in walk(e):
            if isinstance(x, Ref) or (
                isinstance(x, Op) and (record := TABLE.get(x.name)) is not None and record.collective
            ):
                return False
            if isinstance(x, Load):
                self.touch(x.buf, x.idx, x.lanes)
        return True


def independent(loop: For) -> tuple[frozenset[Buffer], frozenset[Buffer]] | None:
    """Return buffers (touched, written) by independent iterations, if no two buffers alias; else None."""
    body = _Body()
    if not body.scan(loop.body, {}) or loop.var in body.inner:
        return None
    for buf in body.written - body.own:
        if not _apart(body.touched[buf], loop.var, body.inner):
            return None
    return frozenset(body.touched.keys() - body.own), frozenset(body.written - body.own)


def _apart(places: Sequence[tuple[tuple[Expr, ...], int]], v: Var, inner: set[Var]) -> bool:
    """True if each iteration of v has its own range c*v + r + (shared part), max r - min r < |c|, along an axis."""
    for axis in range(len(places[0][0])):
        forms = [index_form(idx[axis], v, inner, lanes if axis == len(idx) - 1 else 1) for idx, lanes in places]
        known = [f for f in forms if f is not None and all(t is v for t, _ in f[0])]
        if len(known) < len(forms) or len({(mine, outer) for mine, outer, _, _ in known}) > 1:
            continue
        c = sum(k for _, k in known[0][0])
        if max(hi for _, _, _, hi in known) - min(lo for _, _, lo, _ in known) < abs(c):
            return True
    return False


def writes(block: Block, funcs: dict[str, Func]) -> set[Buffer]:
    """The buffers that a block stores into, itself, by a copy, or through a called Func."""
    out: set[Buffer] = set()
    for s in walk_stmts(block):
        if isinstance(s, Store):
            out.add(s.buf)
        elif isinstance(s, Eval) and s.name in funcs:
            f = funcs[s.name]
            inside = writes(f.body, funcs)
            out |= {a.buf for p, a in zip(f.params, s.args) if p in inside and isinstance(a, Ref)}
        elif isinstance(s, Eval) and s.name != "prefetch":
            out |= {a.buf for a in s.args[:1] if isinstance(a, Ref)}
    return out
