"""May the iterations of a loop run at once? In comes a loop, out comes what stands in the way, or nothing.

Two iterations must not write one element, nor may one read what another one writes. Shown from the indices: an index
that is `c*t + r` with every r in a range narrower than |c| tells t, `a // d` and `a % d` together tell a, and what
tells the loop's variable keeps its iterations apart. Tiles that overlap at an end, `min(f*v, n - f)`, write the same
values there: allowed in buffers that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from dnnc.ir.bounds import bounds, index_form
from dnnc.ir.expr import Expr, Load, Op, Ref, Var, free, op, rebuild, substitute, value, walk
from dnnc.ir.linear import lane_offsets
from dnnc.ir.loops import tiles
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Eval, For, If, Let, Store, exprs

Place = tuple[tuple[Expr, ...], int]  # index, lanes


def obstacle(loop: For) -> str:
    """Why the iterations of a loop may not run at once; empty when they may."""
    found = _Found()
    found.scan(loop.body, {})
    if found.barrier:
        return "it holds a barrier"
    for buf, places in found.written.items():
        if buf in found.own:
            continue
        if buf.space in ("register", "local", "tile"):
            return f"it writes {buf.name}, of which every thread has its own"
        read = found.read.get(buf, [])
        if not any(loop.var in free(i) for idx, _ in places for i in idx):
            return f"every iteration writes {buf.name}"
        limited = [*found.limited.get(buf, places), *found.limited_read.get(buf, read)]
        if not any(_apart(x, loop.var, found.inner, overlap=not read) for x in ([*places, *read], limited)):
            return f"iterations may {'read' if read else 'write'} the same elements of {buf.name} as others write"
    return ""


class _Found:
    """What a block touches, with lets replaced by their values."""

    def __init__(self) -> None:
        self.inner: set[Var] = set()
        self.own: set[Buffer] = set()
        self.written: dict[Buffer, list[Place]] = {}
        self.limited: dict[
            Buffer, list[Place]
        ] = {}  # the same, a vector that ends at a limit as its first and its last element
        self.read: dict[Buffer, list[Place]] = {}
        self.limited_read: dict[Buffer, list[Place]] = {}
        self.barrier = False

    def scan(self, b: Block, lets: dict[Expr, Expr]) -> None:
        for s in b:
            if isinstance(s, Eval) and s.name in tiles.EFFECTS:
                self.scan(tiles.meaning(s), lets)
                continue
            values = [substitute(e, lets) if lets else e for e in exprs(s)]
            for e in values:
                for x in walk(e):
                    if isinstance(x, (Load, Ref)) and not (isinstance(s, Eval) and s.name == "prefetch"):
                        self.read.setdefault(x.buf, []).append((x.idx, x.lanes))
                        ends = _ends(x.idx, x.lanes, x.limit if isinstance(x, Load) else None)
                        self.limited_read.setdefault(x.buf, []).extend(ends)
            if isinstance(s, Alloc):
                self.own.add(s.buf)
            elif isinstance(s, Store):
                at = tuple(values[: len(s.idx)])
                self.written.setdefault(s.buf, []).append((at, s.lanes))
                limit = None if s.limit is None else substitute(s.limit, lets)
                self.limited.setdefault(s.buf, []).extend(_ends(at, s.lanes, limit))
            elif isinstance(s, Eval):
                self.barrier |= s.name == "barrier"
                for x in s.args if s.name != "prefetch" else ():
                    if isinstance(x, Ref):
                        for places in (self.written, self.limited):
                            places.setdefault(x.buf, []).append((x.idx, x.lanes))
            elif isinstance(s, Let):
                lets = {**lets, s.var: values[0]}
            elif isinstance(s, For):
                self.inner.add(s.var)
                self.scan(s.body, lets)
            elif isinstance(s, If):
                self.scan(s.then, lets)
                self.scan(s.other, lets)


def _ends(idx: tuple[Expr, ...], lanes: int, limit: Expr | None) -> list[Place]:
    """The first and the last element of a vector that ends at a limit; else all of it."""
    if limit is None or any(i.lanes > 1 for i in idx):
        return [(idx, lanes)]
    return [(idx, 1), ((*idx[:-1], idx[-1] + limit - 1), 1)]


def _apart(places: Sequence[Place], v: Var, inner: set[Var], overlap: bool) -> bool:
    """Do the axes of an index, equal for two accesses, tell that they come from one iteration of v?"""
    known: list[Expr] = []
    for axis in range(len(places[0][0])):
        forms = []
        for idx, lanes in places:
            i = _whole_tiles(idx[axis], v) if overlap else idx[axis]
            width = lanes if axis == len(idx) - 1 else 1
            if i.lanes > 1 and (found := lane_offsets(i, i.lanes)) is not None:
                i, width = found[1] + min(found[0]), max(found[0]) - min(found[0]) + 1
            forms.append(index_form(i, v, inner, width))
        first = forms[0]
        if first is None or any(f is None or f[:2] != first[:2] for f in forms):
            continue
        spread = max(f[3] for f in forms if f) - min(f[2] for f in forms if f)
        known += _digits(first[0], spread)
    return _tells(known, v, inner)


def _whole_tiles(e: Expr, v: Var) -> Expr:
    """`min(f*v, n - f)` -> `f*v`"""
    r = rebuild(e, lambda x: _whole_tiles(x, v))
    if isinstance(r, Op) and r.name == "min":
        vary = [a for a in r.args if v in free(a)]
        return vary[0] if len(vary) == 1 else r
    return r


def _digits(ts: Sequence[tuple[Expr, int]], width: int) -> list[Expr]:
    """The terms that a sum tells, coefficients ascending: each must outweigh all below it."""
    found = []
    for t, c in sorted(ts, key=lambda tc: abs(tc[1])):
        if width < abs(c):
            found.append(t)
        lo, hi = bounds(t)
        if lo is None or hi is None:
            return found if t is max(ts, key=lambda tc: abs(tc[1]))[0] and width < abs(c) else []
        if width >= abs(c):
            return []
        width += abs(c) * (hi - lo)
    return found


def _tells(known: list[Expr], v: Var, inner: set[Var]) -> bool:
    """Do the values of these expressions tell v's?"""
    facts = list(dict.fromkeys(known))
    k = 0
    while k < len(facts):
        t = facts[k]
        if t is v:
            return True
        new: list[Expr] = []
        if not isinstance(t, Op):
            form = index_form(t, v, inner, 1)
            new += _digits(form[0], form[3] - form[2]) if form is not None else []
        elif t.name in ("//", "%"):
            for u in facts:
                if isinstance(u, Op) and u.name in ("//", "%"):
                    new += _joined(t, u) + _joined(u, t)
        facts += [x for x in dict.fromkeys(new) if x not in facts]
        k += 1
    return False


def _joined(q: Op, r: Op) -> list[Expr]:
    """Join digits: (a // d) % m and a % d -> a % (d*m); (a % (d*m)) // d and a % d -> a % (d*m); and without m."""
    (a, d), (b, e) = q.args, r.args
    if q.name == "//" and r.name == "%" and a is b and d is e:
        return [a]
    n, m = value(d), value(e)
    if n is None or m is None:
        return []
    if q.name == "%" and r.name == "%" and a is op("//", b, e):
        return [op("%", b, n * m)]
    if (
        q.name == "//"
        and r.name == "%"
        and n == m
        and isinstance(a, Op)
        and a.name == "%"
        and a.args[0] is b
        and (value(a.args[1]) or 1) % n == 0
    ):
        return [a]
    if q.name == "//" and r.name == "%" and n % m == 0 and b is op("//", a, n // m):
        return [b]
    return []
