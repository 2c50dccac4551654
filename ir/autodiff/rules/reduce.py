"""Rules of reductions and running sums, in graph ops that fuse. Half types are widened: sums and counts are float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.autodiff.rules.common import count, keep, narrow, spread, wide
from dnnc.ir.errors import GradientError
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Node
from dnnc.ir.graph.expand import inline
from dnnc.ir.shapes import normalize_axes, normalize_axis
from dnnc.ir.types import product

Rule = Callable[[Builder, Node, Sequence[Any], Sequence[int]], Mapping[int, Any]]
Axes = tuple[int, ...]


def reduction(cotangent: Callable[..., Any]) -> Rule:
    """The rule `cotangent(b, x, y, g, axes)`, with y and g in wide types and beside x: reduced axes have size 1.

    What it returns broadcasts to x.
    """

    def rule(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
        (x,), (g,) = n.inputs, cotangents
        assert x is not None
        given = n.attrs["axes"]
        axes = tuple(range(x.type.rank)) if given is None else tuple(sorted(normalize_axes(given, x.type.rank)))
        y, g = (keep(b, v, x, axes) for v in (n.output, g))
        found = cotangent(b, x, wide(b, y), wide(b, g), axes)
        return {0: spread(b, narrow(b, found, x.type.dtype), x.type.shape)}

    return rule


def _mean(b: Builder, x: Any, y: Any, g: Any, axes: Axes) -> Any:
    return b.div(g, count(b, x, axes, g.type.dtype))


def _l2(b: Builder, x: Any, y: Any, g: Any, axes: Axes) -> Any:
    """0 for a row of zeros."""
    flat = b.equal(y, 0.0)
    zero, one = (b.constant(v, dtype=y.type.dtype) for v in (0.0, 1.0))
    return b.mul(wide(b, x), b.where(flat, zero, b.div(g, b.where(flat, one, y))))


def _log_sum_exp(b: Builder, x: Any, y: Any, g: Any, axes: Axes) -> Any:
    """0 for a row of -inf."""
    least = b.constant(-float("inf"), dtype=y.type.dtype)
    top = b.where(b.equal(y, least), b.constant(0.0, dtype=y.type.dtype), y)
    return b.mul(g, b.exp(b.sub(wide(b, x), top)))


def _extreme(b: Builder, x: Any, y: Any, g: Any, axes: Axes) -> Any:
    """Equal elements share."""
    zero, one = (b.constant(v, dtype=y.type.dtype) for v in (0.0, 1.0))
    hit = b.equal(wide(b, x), y)
    ties = b.reduce_sum(b.where(hit, one, zero), axes=axes, keepdims=True)
    return b.where(hit, b.div(g, ties), zero)


def _prod(b: Builder, x: Any, y: Any, g: Any, axes: Axes) -> Any:
    """The product of the others: of those before an element and of those behind it."""
    rank, shape = x.type.rank, x.type.shape
    order = (*(k for k in range(rank) if k not in axes), *axes)
    rows = (*(shape[k] for k in range(rank) if k not in axes), product(tuple(shape[k] for k in axes)))
    v = wide(b, x)
    same = order == tuple(range(rank))
    moved = b.reshape(v if same else b.transpose(v, perm=order), shape=rows)
    others = b.mul(*(b.cumprod(moved, axis=len(rows) - 1, exclusive=True, reverse=r) for r in (False, True)))
    others = b.reshape(others, shape=tuple(shape[k] for k in order))
    others = others if same else b.transpose(others, perm=tuple(order.index(k) for k in range(rank)))
    return b.mul(g, others)


total = reduction(lambda b, x, y, g, axes: g)
mean = reduction(_mean)
extreme = reduction(_extreme)
prod = reduction(_prod)
l1 = reduction(lambda b, x, y, g, axes: b.mul(g, b.sign(wide(b, x))))
l2 = reduction(_l2)
sum_square = reduction(lambda b, x, y, g, axes: b.mul(b.mul(g, 2.0), wide(b, x)))
log_sum = reduction(lambda b, x, y, g, axes: b.mul(g, b.exp(b.neg(y))))
log_sum_exp = reduction(_log_sum_exp)


# --- running sums and products ----------------------------------------------------------------------------------------


def cumsum(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
    return {0: b.cumsum(cotangents[0], **{**n.attrs, "reverse": not n.attrs["reverse"]})}


def cumprod(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
    x = n.inputs[0]
    assert x is not None
    found = b.cumprod_backward(wide(b, x), wide(b, cotangents[0]), **n.attrs)
    return {0: narrow(b, found, x.type.dtype)}


def cumprod_backward(b: Builder, n: Node, cotangents: Sequence[Any], needed: Sequence[int]) -> Mapping[int, Any]:
    """The rule of a form without quotients and conditions, which is right for all orders at zeros.

    The cotangent of x[j] is the product of the elements before j, times s[j] = g[j] + x[j + 1] * s[j + 1]; that
    recurrence is log2(size) steps of doubled distance (Hillis and Steele 1986). An exclusive product has g[j + 1] in
    the place of g[j].
    """
    x, g = n.inputs
    (c,) = cotangents
    assert x is not None and g is not None
    axis, reverse = normalize_axis(n.attrs["axis"], x.type.rank), n.attrs["reverse"]
    size = x.type.shape[axis]
    if not isinstance(size, int):
        raise GradientError(
            f"the second derivative of cumprod needs a fixed size of the axis {axis}, which is {size}; fix it with dims"
        )
    body = Graph("cumprod_backward")
    inner_x, inner_g, inner_c = (body.add_input(name, v.type) for name, v in (("x", x), ("g", g), ("c", c)))
    inside = Builder(body)

    def shifted(v: Any, distance: int) -> Any:
        """Element j is that at j + distance in the direction of the product; 0 where there is none."""
        pads = [0] * (2 * x.type.rank)
        pads[axis] = distance if reverse else -distance
        pads[axis + x.type.rank] = -pads[axis]
        return inside.pad(v, pads=tuple(pads))

    factor = shifted(inner_x, 1)
    total = shifted(inner_g, 1) if n.attrs["exclusive"] else inner_g
    distance = 1
    while distance < size:
        total = inside.add(total, inside.mul(factor, shifted(total, distance)))
        factor = inside.mul(factor, shifted(factor, distance))
        distance *= 2
    before = inside.cumprod(inner_x, axis=axis, exclusive=True, reverse=reverse)
    found = pullback(body, {inside.mul(before, total): inner_c}, [inner_x, inner_g], n.locs)
    body.outputs = [v for v in found if v is not None]
    made = iter(inline(b, body, [x, g, c]))
    return {k: next(made) for k, v in enumerate(found) if v is not None}
