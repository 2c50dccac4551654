"""A load, seen from the tensor that it reads: the sum of what all places that read an element send back to it.

    t[i] = sum over r of x[2*i + r]        ->   cot x[j] = sum over r of cot t[(j - r) // 2] where (j - r) % 2 == 0
    t[i] = x[table[i]]                     ->   cot x[table[i]] += cot t[i]

An index that is affine, or made of digits of an affine number, is solved for its variables: those that it fixes are
replaced, the others are summed over. So each element of the result gathers its updates. Where an index cannot be solved
(it is read from memory, clamped, or has a symbolic divisor), the updates are scattered, in the order of the loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast as typed

from dnnc.ir.autodiff.scalar import masked, split
from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.expr import (
    Const,
    Expr,
    Load,
    Op,
    Var,
    const,
    extent,
    free,
    load,
    maximum,
    minimum,
    rebuild,
    select,
    substitute,
    terms,
    unwrap,
    value,
    var,
    walk,
)
from dnnc.ir.te import Scatter, Stage, Tensor


def transposed(stage: Stage, at: Load, weight: Expr) -> Tensor:
    """The sum of `weight` over all places of a stage that read an element, for each element of the tensor `at` reads.

    `weight` is an expression of the stage's axes, reduced ones included. The result has the dtype of registers.
    """
    t = typed(Tensor, at.buf)
    condition, weight = split(weight)
    conditions = [*conjuncts(condition), *(conjuncts(stage.where) if stage.where is not None else [])]
    facts = tuple(c for c in conditions if not _loads(c))
    prefix = "j"
    while any(v.name.startswith(prefix) for v in (*stage.axes, *stage.reduce)):
        prefix += "j"
    axes = tuple(var(f"{prefix}{k}", lo=0, hi=unwrap(const(d) - 1)) for k, d in enumerate(t.shape))
    solver = _Solver((*stage.axes, *stage.reduce), stage.axes, f"{prefix}q")
    if not solver.solve([_bare(i, facts) for i in at.idx], axes):
        return _scattered(stage, at, weight, conditions, axes)
    every = [c for e in (*conditions, *solver.conditions) for c in conjuncts(substitute(e, solver.env))]
    # the parts of a condition may all be evaluated
    where = all_of([c for c in every if not _loads(c)] + [in_range(c) for c in every if _loads(c)])
    number, always = substitute(weight, solver.env), not conjuncts(where)
    if not solver.left:
        made = Stage(axes, number if always else masked(where, in_range(number)))
    else:
        made = Stage(axes, number, tuple(solver.left), "sum", None if always else where)
    return Tensor("cotangent", t.dtype.computed, t.shape, stage=made)


def _scattered(stage: Stage, at: Load, weight: Expr, conditions: Sequence[Expr], axes: tuple[Var, ...]) -> Tensor:
    """Updates in the order of the stage's loops; those whose condition does not hold add 0 to the first element."""
    t = typed(Tensor, at.buf)
    where = all_of([in_range(c) for c in conditions])
    always = not conjuncts(where)
    places = [maximum(minimum(in_range(i), d - 1), 0) for i, d in zip(at.idx, t.shape)]  # both arms may be evaluated
    index = at.idx if always else tuple(select(where, i, 0) for i in places)
    update = weight if always else masked(where, in_range(weight))
    put = Scatter((*stage.axes, *stage.reduce), index, update, "sum")
    wide = t.dtype.computed
    return Tensor("cotangent", wide, t.shape, stage=Stage(axes, const(0.0, wide), updates=put))


class _Solver:
    """Solves `index(variables) == j` for as many variables as it can; `left` are the others."""

    def __init__(self, variables: Sequence[Var], results: Sequence[Var], prefix: str) -> None:
        self.left, self.results, self.prefix = list(variables), frozenset(results), prefix
        self.env: dict[Expr, Expr] = {}
        self.conditions: list[Expr] = []

    def solve(self, index: Sequence[Expr], at: Sequence[Var]) -> bool:
        """False where some axis has an index that cannot be inverted."""
        todo = list(zip(index, at))
        while todo:
            now = [(substitute(e, self.env), j) for e, j in todo]
            simple = next((k for k, (e, _) in enumerate(now) if isinstance(e, Var) or not self.unknown(e)), None)
            k = simple if simple is not None else next((k for k, (e, _) in enumerate(now) if self.invertible(e)), 0)
            if not self.invert(*now[k]):
                return False
            todo.pop(k)
        return True

    def unknown(self, e: Expr) -> list[Var]:
        return [v for v in free(e) if v in self.left]

    def single(self, e: Expr) -> list[tuple[Var, int]]:
        """The variables that occur in one term of an affine number only, with their coefficients."""
        ts, _ = terms(e)
        return [
            (t, c)
            for t, c in ts
            if isinstance(t, Var) and t in self.left and not any(t in free(o) for o, _ in ts if o is not t)
        ]

    def invertible(self, e: Expr) -> bool:
        if isinstance(e, Op) and e.name in ("//", "%"):
            return value(e.args[1]) is not None and self.invertible(e.args[0]) and bounds(e.args[0])[0] is not None
        read = any(isinstance(x, Load) and self.unknown(x) for x in walk(e))
        return not read and bool(self.single(e))

    def invert(self, e: Expr, j: Expr) -> bool:
        """Fix variables so that e == j; False where it cannot be done."""
        if not self.unknown(e):
            self.conditions.append(e.eq(j))
            return True
        if not self.invertible(e):
            return False
        return self.digit(e, j) if isinstance(e, Op) and e.name in ("//", "%") else self.affine(e, j)

    def digit(self, e: Op, j: Expr) -> bool:
        a, d = e.args[0], value(e.args[1])
        assert d is not None
        lo, hi = bounds(a)
        if e.name == "//":  # a // d == j  ->  a == j*d + q, 0 <= q < d
            return self.invert(a, j * d + self.fresh(d))
        if lo is None or lo < 0 or hi is None:
            return False
        self.conditions.append(j < d)  # a % d == j  ->  a == q*d + j
        return self.invert(a, self.fresh(hi // d + 1) * d + j)

    def affine(self, e: Expr, j: Expr) -> bool:
        _, c0 = terms(e)
        own = self.single(e)
        t, c = max(own, key=lambda tc: abs(tc[1]))
        others = e - t * c
        lo, hi = bounds(others - c0)
        if c > 1 and lo == 0 and hi is not None and hi < c:  # digits: 5*a + b == j, b < 5  ->  a == j // 5, b == j % 5
            self.fix(t, (j - c0) // c)
            return self.invert(others, (j - c0) % c + c0)
        # of a window the axis of the result is fixed, and the kernel's is summed over
        t, c = max(own, key=lambda tc: (tc[0] in self.results, _extent(tc[0])))
        left = j - (e - t * c)
        left, c = (left, c) if c > 0 else (const(0) - left, -c)
        if c > 1:
            low = bounds(left)[0]
            up = 0 if low is None or low >= 0 else -(low // c)  # dividends stay positive
            self.conditions.append(((left + up * c) % c).eq(0))
            left = (left + up * c) // c - up
        self.fix(t, left)
        return True

    def fresh(self, many: int) -> Var:
        q = var(f"{self.prefix}{len(self.left)}_{len(self.env)}", lo=0, hi=many - 1)
        self.left.append(q)
        return q

    def fix(self, v: Var, e: Expr) -> None:
        self.left.remove(v)
        self.env = {k: substitute(x, {v: e}) for k, x in self.env.items()}
        self.conditions = [substitute(c, {v: e}) for c in self.conditions]
        self.env[v] = e
        self.conditions += [const(0) <= e, e < extent(v)]


def _extent(v: Var) -> float:
    n = value(extent(v))
    return float("inf") if n is None else n


def _bare(e: Expr, facts: tuple[Expr, ...]) -> Expr:
    """An index without checks, and without clamps that the conditions around it make idle."""
    e = rebuild(e, lambda x: _bare(x, facts))
    if isinstance(e, Op) and e.name == "guard":
        return e.args[0]
    if isinstance(e, Op) and e.name in ("min", "max") and e.dtype is i64:
        for a, b in (e.args, e.args[::-1]):
            if nonneg(b - a if e.name == "min" else a - b, facts):
                return a
    return e


def _loads(e: Expr) -> bool:
    return any(isinstance(x, Load) for x in walk(e))


def in_range(e: Expr) -> Expr:
    """Loads that stay inside of their tensors even where nobody wants the value."""
    if isinstance(e, Load):
        return load(e.buf, [maximum(minimum(in_range(i), d - 1), 0) for i, d in zip(e.idx, e.buf.shape)])
    return rebuild(e, in_range)


def conjuncts(c: Expr) -> list[Expr]:
    """The conditions that a condition is made of by `&`; none where it always holds."""
    if isinstance(c, Op) and c.name == "&":
        return [*conjuncts(c.args[0]), *conjuncts(c.args[1])]
    return [] if isinstance(c, Const) and c.value else [c]


def all_of(conditions: Sequence[Expr]) -> Expr:
    r: Expr = const(True, boolean)
    for c in dict.fromkeys(conditions):
        r = r & c
    return r
