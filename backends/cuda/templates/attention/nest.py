"""What a lowered attention computes, read off its naive nest: the ground that its schedules build on.

    for batch, rows:                             the nest has the scores three times: for the largest, the sum of
                                                 weights, the mean
        top = max over keys of score(sum over depth of Q[b, m, d] * K[b, n, d])
        total = sum over keys of exp(score - top)
        for cols: y[..] = epilogue(sum over keys of exp(score - top) * V[b, n, e], total)

`score` is what stands between the sum of products and the softmax: a scale, a mask. Output loops on which only Q
depends are rows, those of V alone columns, all others batch loops. So transposes of any operand or of the result are
nothing but other index expressions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dnnc.backends.cuda.templates.contraction.nest import Axis, Contraction, Operand
from dnnc.ir.dtype import DType, f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Const, Expr, Load, Op, Var, cast, free, load, op, substitute, value, walk
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, For, Kernel, Stmt, Store, call, walk_stmts
from dnnc.passes.schedule.loops import split
from dnnc.passes.schedule.problem import Problem
from dnnc.passes.schedule.state import Schedule


@dataclass(frozen=True)
class Attention:
    """`score` says in terms of `dots[0]` what goes into the softmax; `store` writes an element from `mixed[0]`, the sum
    of weighted values, and `inverse[0]`, one over the sum of weights (NaN for rows without keys).
    """

    kernel: Kernel
    batch: Axis
    keys: Axis
    depth: Axis
    q: Operand
    k: Operand
    v: Operand
    score: Expr
    dots: Buffer
    mixed: Buffer
    inverse: Buffer
    store: Store

    @property
    def rows(self) -> Axis:
        return self.q.axis

    @property
    def cols(self) -> Axis:
        return self.v.axis

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Batch, M, N, D, E."""
        return self.batch.size, self.rows.size, self.keys.size, self.depth.size, self.cols.size

    @property
    def products(self) -> Contraction:
        """Queries times keys, as the staging of tiles wants it."""
        return Contraction(self.kernel, self.batch, self.depth, self.q, self.k, self.dots, self.store, False)

    @property
    def mean(self) -> Contraction:
        """Weights times values. The weights are in registers: only their side counts."""
        return Contraction(self.kernel, self.batch, self.keys, self.q, self.v, self.mixed, self.store, False)

    def stored_as(self, t: DType) -> Attention:
        """The same with operands in the type in which tiles of them are kept."""
        return replace(self, q=_stored(self.q, t), k=_stored(self.k, t), v=_stored(self.v, t))


def _stored(o: Operand, t: DType) -> Operand:
    e = o.value
    if isinstance(e, Op) and e.name == f"cast_{f32}" and isinstance(x := e.args[0], Load) and x.dtype is t:
        return replace(o, value=x)
    return o if e.dtype is t else replace(o, value=cast(e, t))


def attention_of(problem: Problem) -> Attention | None:
    """The attention of a problem of constant sizes, with scores in f32; None when its nest has another form."""
    if problem.kind != "attention" or problem.lowered.dims:
        return None
    s = Schedule(problem.kernel)
    try:
        for name, n in _groups(s):
            s.apply(split, name, n, (name + "g", name + "c"))
    except ScheduleError:
        return None
    found = _read(s.collapse())
    return found if found is not None and min(found.sizes) > 0 else None


def _groups(s: Schedule) -> list[tuple[str, int]]:
    """Output loops of which an index takes the quotient `i // n`: several axes in one, as a reshape leaves them."""
    outer, inner = _walk(s.body)
    found: dict[str, int] = {}
    for x in (
        x
        for st in inner
        if isinstance(st, (For, Store))
        for y in walk_stmts((st,))
        if isinstance(y, Store)
        for x in walk(y.value)
    ):
        if isinstance(x, Op) and x.name == "//" and isinstance(v := x.args[0], Var) and any(v is o.var for o in outer):
            n = value(x.args[1])
            if n is not None and (value(s.loop(v.name).extent) or 0) % n == 0:
                found[v.name] = n
    return list(found.items())


def _walk(b: Block) -> tuple[list[For], list[Stmt]]:
    """The loops around the one store, and the other statements in them, in order."""
    outer: list[For] = []
    others: list[Stmt] = []
    while True:
        inner = b[-1] if b else None
        if not isinstance(inner, For) or not any(
            isinstance(s, Store) and s.buf.space == "global" for s in walk_stmts(inner.body)
        ):
            return outer, [*others, *b]
        outer.append(inner)
        others += b[:-1]
        b = inner.body


def _read(s: Schedule) -> Attention | None:
    """The parts of the nest as it stands."""
    outer, body = _walk(s.body)
    if (
        len(body) != 10
        or not isinstance(store := body[9], Store)
        or any(value(x.lo) != 0 or value(x.extent) is None for x in outer)
    ):
        return None
    steps = [x for k in (0, 3, 6) if (x := _reduction(body[k : k + 3])) is not None]
    if len(steps) < 3:
        return None
    top, *sums = steps
    total, mixed, loop, inner = _by_use(sums, store)
    scores = _reduction(inner[:3]) if len(inner) == 4 else None
    if scores is None or not isinstance(last := inner[3], Store) or last.buf is not mixed:
        return None
    dots, depth, update = scores
    products = _factors(update, dots)
    weighted = _factors((last,), mixed)
    if products is None or weighted is None:
        return None
    score, of_top = _exponent(weighted[0])
    if score is None or not isinstance(of_top, Load) or of_top.buf is not top[0] or mixed.dtype is not f32:
        return None
    inverse = Buffer("inverse", f32, mixed.shape, "register")
    end = _end(store, mixed, total, inverse)
    return (
        None
        if end is None
        else _sorted(
            s.kernel.with_body(s.body), outer, loop, depth, (*products, weighted[1]), score, (dots, mixed, inverse), end
        )
    )


def _by_use(sums: list[tuple[Buffer, For, Block]], store: Store) -> tuple[Buffer, Buffer, For, Block]:
    """Return the memory of the first of the sums of weights and weighted values (any order), and all of the second."""
    quotients = [x.args for x in walk(store.value) if isinstance(x, Op) and x.name == "/"]
    swapped = any(a is load(sums[0][0], (0,)) for a, _ in quotients)
    total, mixed = sums[::-1] if swapped else sums
    return total[0], *mixed


def _reduction(b: list[Stmt] | Block) -> tuple[Buffer, For, Block] | None:
    """`acc: f32[1]; acc[0] = ..; for ..: body`"""
    if len(b) != 3:
        return None
    alloc, init, loop = b
    if not (
        isinstance(alloc, Alloc)
        and isinstance(init, Store)
        and init.buf is alloc.buf
        and isinstance(init.value, Const)
        and isinstance(loop, For)
    ):
        return None
    return (
        (alloc.buf, loop, loop.body)
        if value(loop.lo) == 0 and value(loop.extent) is not None and alloc.buf.space == "register"
        else None
    )


def _factors(b: Block, acc: Buffer) -> tuple[Expr, Expr] | None:
    """x and y of `acc[0] = fma(x, y, acc[0])`"""
    if (
        len(b) != 1
        or not isinstance(s := b[0], Store)
        or s.buf is not acc
        or not isinstance(e := s.value, Op)
        or e.name != "fma"
    ):
        return None
    return (e.args[0], e.args[1]) if isinstance(e.args[2], Load) and e.args[2].buf is acc else None


def _exponent(e: Expr) -> tuple[Expr | None, Expr | None]:
    """x and y of `exp(x - y)`"""
    if isinstance(e, Op) and e.name == "exp" and isinstance(d := e.args[0], Op) and d.name == "-":
        return d.args[0], d.args[1]
    return None, None


def _end(store: Store, mixed: Buffer, total: Buffer, inverse: Buffer) -> Store | None:
    """`mixed / total` becomes `mixed * inverse`, and `isnan(total)` is asked of the inverse, which is NaN with it."""
    m, t, i = (load(x, (0,)) for x in (mixed, total, inverse))
    made = substitute(store.value, {op("/", m, t): m * i, call("isnan", t): call("isnan", i)})
    return None if any(x is t for x in walk(made)) else Store(store.buf, store.idx, made)


def _sorted(
    kernel: Kernel,
    outer: list[For],
    keys: For,
    depth: For,
    values: tuple[Expr, Expr, Expr],
    score: Expr,
    buffers: tuple[Buffer, Buffer, Buffer],
    store: Store,
) -> Attention | None:
    """Give every loop its side."""
    q, k, v = (free(e) for e in values)
    rows = tuple(o for o in outer if o.var in q and o.var not in k | v)
    cols = tuple(o for o in outer if o.var in v and o.var not in q | k)
    batch = tuple(o for o in outer if o not in rows and o not in cols)
    if {o.var for o in cols} & free(score) or depth.var in free(score) or any(x is keys.var for x in q):
        return None
    operands = (
        Operand(values[0], (), Axis(rows)),
        Operand(values[1], (), Axis((keys,))),
        Operand(values[2], (), Axis(cols)),
    )
    return Attention(kernel, Axis(batch), Axis((keys,)), Axis((depth,)), *operands, score, *buffers, store)
