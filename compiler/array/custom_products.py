"""Matrix products in tensor expressions: sums of products of two operands become the op `matmul`.

t[i, j] = sum over r of x[i, r] * w[r, j]; y[i, j] = max(t[i, j] + b[j], 0)
    -> t = matmul(x, w), and y of t and b, at its end
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dnnc.array.lazy import Lazy, apply
from dnnc.ir import te
from dnnc.ir.expr import Expr, Load, Op, Var, load, rebuild
from dnnc.ir.te import Scatter, Stage, Tensor


@dataclass(frozen=True)
class Product:
    """A stage that is a product: its operands by number, and for each axis of the stage its kind: "b" in both operands,
    "m" in the first, "n" in the second. `first` and `second`: the stage's axis of each operand axis, or -1 (summed).
    """

    stage: Tensor
    operands: tuple[int, int]
    kinds: str
    first: tuple[int, ...]
    second: tuple[int, ...]


def products(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Product]:
    """The products among the stages of expressions, in order."""
    found = (product(inputs, t) for t in te.stages(outputs))
    return [p for p in found if p is not None]


def product(inputs: Sequence[Tensor], t: Tensor) -> Product | None:
    s = t.stage
    assert s is not None
    if (
        s.combine != "sum"
        or len(s.reduce) != 1
        or s.where is not None
        or not (isinstance(s.value, Op) and s.value.name == "*")
    ):
        return None
    loads = [_bare(e) for e in s.value.args]
    if (
        not all(isinstance(x, Load) and x.buf in inputs and x.buf.dtype is t.dtype for x in loads)
        or not t.dtype.is_float
    ):
        return None
    places = {v: k for k, v in enumerate(s.axes)} | {s.reduce[0]: -1}
    axes = [tuple(places.get(i, -2) if isinstance(i, Var) else -2 for i in x.idx) for x in loads if isinstance(x, Load)]
    fits = all(len(set(a)) == len(a) and -2 not in a and -1 in a for a in axes) and set(axes[0]) | set(axes[1]) == {
        -1,
        *range(len(s.axes)),
    }
    if not fits:
        return None
    kinds = "".join("b" if k in axes[0] and k in axes[1] else "m" if k in axes[0] else "n" for k in range(len(s.axes)))
    if not set(kinds) & {"m", "n"}:  # of two vectors each: a sum over rows
        return None
    numbers = [inputs.index(x.buf) for x in loads if isinstance(x, Load) and isinstance(x.buf, Tensor)]
    return Product(t, (numbers[0], numbers[1]), kinds, axes[0], axes[1])


def _bare(e: Expr) -> Expr:
    """Without the conversion to the type in which registers compute."""
    return e.args[0] if isinstance(e, Op) and e.name.startswith("cast_") and isinstance(e.args[0], Load) else e


def multiplied(p: Product, x: Lazy, y: Lazy) -> Lazy:
    """Return the op's product [batch..., rows, terms] @ [batch..., terms, columns] in the stage's axis order."""
    batch, rows, columns = ([k for k, c in enumerate(p.kinds) if c == kind] for kind in "bmn")
    a = _ordered(x, p.first, [*batch, *rows, -1])
    b = _ordered(y, p.second, [*batch, -1, *columns])
    lead, terms = a.type.shape[: len(batch)], a.type.shape[-1]
    m, n = a.type.shape[len(batch) : -1], b.type.shape[len(batch) + 1 :]
    made = apply("matmul", _reshaped(a, (*lead, math.prod(m), terms)), _reshaped(b, (*lead, terms, math.prod(n))))
    order = [*batch, *rows, *columns]
    return _ordered(_reshaped(made, (*lead, *m, *n)), order, range(len(order)))


def _ordered(x: Lazy, have: Sequence[int], want: Sequence[int]) -> Lazy:
    perm = tuple(list(have).index(k) for k in want)
    return x if perm == tuple(range(len(perm))) else apply("transpose", x, perm=perm)


def _reshaped(x: Lazy, shape: tuple[Any, ...]) -> Lazy:
    return x if shape == x.type.shape else apply("reshape", x, shape=shape)


def replaced(outputs: Sequence[Tensor], known: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Expressions that read other tensors in place of some."""
    made: dict[Tensor, Tensor] = dict(known)
    memo: dict[Expr, Expr] = {}

    def expr(e: Expr) -> Expr:
        r = memo.get(e)
        if r is None:
            r = memo[e] = (
                load(tensor(e.buf), map(expr, e.idx))
                if isinstance(e, Load) and isinstance(e.buf, Tensor)
                else rebuild(e, expr)
            )
        return r

    def tensor(t: Tensor) -> Tensor:
        if t.stage is None:
            return made.get(t, t)
        if t not in made:
            s = t.stage
            if s.own is not None:
                made[s.own] = s.own
            put = s.updates and Scatter(
                s.updates.axes, tuple(map(expr, s.updates.index)), expr(s.updates.value), s.updates.combine
            )
            stage = Stage(s.axes, expr(s.value), s.reduce, s.combine, s.where and expr(s.where), s.own, put)
            made[t] = Tensor(t.name, t.dtype, t.shape, stage=stage)
        return made[t]

    return [tensor(t) for t in outputs]
