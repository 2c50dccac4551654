"""ATen's backward operators that torch does not take apart: pull-backs of the forms of their forward operators.

Such an operator knows the arguments of its forward operator, mostly by the same names. So its form is the cotangent
that `dnnc.ir.autodiff` finds for the forward form, in a graph of its own, and only what that reads of the forward
operator is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dnnc.frontends.torch.call import Call
from dnnc.frontends.torch.joins import bordered
from dnnc.frontends.torch.linear import later, lowered, matched, shared_heads
from dnnc.frontends.torch.nn import adaptive, avg_pool, convolution, max_pool
from dnnc.frontends.torch.resize import interpolate, upsample
from dnnc.ir.autodiff.reverse import pullback, zeros
from dnnc.ir.dtype import i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.expand import inline, prune
from dnnc.ir.types import product

Converter = Callable[[Call], Any]
Forward = Callable[[Builder, Sequence[Value]], Any]


def pulled(
    c: Call, forward: Forward, operands: Sequence[Value], g: Value, needed: Sequence[int], result: Value | None = None
) -> dict[int, Value]:
    """Cotangents of a function's operands, by their numbers.

    Args:
        c: the call to build for.
        forward: builds the function, of one result.
        operands: of it.
        g: the cotangent of its result.
        needed: numbers of the operands that are wanted.
        result: the function's result, where it is at hand.
    """
    inner = Graph("backward")
    b = Builder(inner, locs=c.b.locs)
    xs = [inner.add_input(f"x{k}", v.type) for k, v in enumerate(operands)]
    y = forward(b, xs)
    seed = inner.add_input("g", y.type)
    found = pullback(inner, {y: seed}, [xs[k] for k in needed], c.b.locs)
    inner.outputs = [zeros(Builder(inner), xs[k].type) if v is None else v for k, v in zip(needed, found)]
    given = [*operands, c.cast(g, y.type.dtype)]
    if result is not None:
        inner.replace_all_uses(y, inner.add_input("y", y.type))
        given.append(c.cast(result, y.type.dtype))
    prune(inner)
    locs = c.b.locs
    made = inline(c.b, inner, given)
    c.b.locs = locs
    return dict(zip(needed, made))


def of(forward: Converter, x: str = "self", grad: str = "grad_output") -> Converter:
    """The backward operator of a forward operator with one tensor: by the names of the latter's arguments."""

    def convert(c: Call) -> Any:
        def build(b: Builder, xs: Sequence[Value]) -> Any:
            args = {**c.args, "self": xs[0]}
            return forward(Call(b, c.op, args, c.fakes, [c.fakes[grad]], c.dims, frozenset((0,))))

        return pulled(c, build, [c.x(x)], c.x(grad), [0])[0]

    return convert


def sized(forward: Converter, name: str = "input_size") -> Converter:
    """The same for an operator that is linear, and knows of its operand the sizes alone."""

    def convert(c: Call) -> Any:
        g = c.x("grad_output" if "grad_output" in c.args else "grad")
        x = zeros(c.b, c.type())

        def build(b: Builder, xs: Sequence[Value]) -> Any:
            fake = c.fakes["grad_output" if "grad_output" in c.args else "grad"]
            args = {**c.args, "self": xs[0], "x": xs[0]}
            return forward(Call(b, c.op, args, c.fakes, [fake], c.dims, frozenset((0,))))

        return pulled(c, build, [x], g, [0])[0]

    return convert


def convolution_backward(c: Call) -> Any:
    x, w, g = c.x("input"), c.x("weight"), c.x("grad_output")
    wanted = [k for k in (0, 1) if c.args["output_mask"][k] and c.wants(k)]

    def build(b: Builder, xs: Sequence[Value]) -> Any:
        args = {**c.args, "input": xs[0], "weight": xs[1], "bias": None}
        return convolution(Call(b, c.op, args, c.fakes, [c.fakes["grad_output"]], c.dims, frozenset((0,))))

    made = pulled(c, build, [x, w], g, wanted) if wanted else {}
    bias = c.b.reduce_sum(g, axes=(0, *range(2, g.type.rank))) if c.wants(2) else None
    return made.get(0), made.get(1), bias


def max_pool_backward(c: Call) -> Any:
    """dnnc::max_pool_backward"""
    return of(max_pool(len(c.ints("kernel_size"))), x="x")(c)


def adaptive_max_backward(c: Call) -> Any:
    """Each cotangent goes to the place in its plane that an index names."""
    x, g, at = c.x(), c.x("grad_output"), c.cast(c.x("indices"), i64)
    rank = 2 if "2d" in str(c.op) else 3
    lead, plane = x.type.shape[:-rank], product(x.type.shape[-rank:])
    flat = (*lead, product(g.type.shape[-rank:]))
    rows, places = c.b.reshape(g, shape=flat), c.b.reshape(at, shape=flat)
    start = c.b.full(shape=(*lead, plane), value=0.0, dtype=g.type.dtype)
    y = c.b.scatter_elements(start, places, rows, axis=len(lead), reduction="add")
    return c.b.reshape(y, shape=x.type.shape)


def attention_backward(c: Call) -> Any:
    """dnnc::attention_backward: of softmax(scale * q k^T + mask) v."""
    q, k, v, g, y = (c.x(n) for n in ("query", "key", "value", "grad_out", "out"))
    mask, scale, dtype = c.opt("attn_mask"), c.get("scale"), q.type.dtype
    size = q.type.shape[-1]
    if scale is None and not isinstance(size, int):
        raise UnsupportedError("attention over heads of unknown size; give it a scale")
    factor = 1 / math.sqrt(int(size)) if scale is None else float(scale)  # type: ignore[arg-type]
    hidden = None if mask is None else lowered(c, mask, dtype)
    if c.flag("is_causal"):
        future = later(c, q.type.shape[-2], k.type.shape[-2], dtype)
        hidden = future if hidden is None else c.b.add(hidden, future)
    more = [] if hidden is None else [hidden]

    def build(b: Builder, xs: Sequence[Value]) -> Any:
        inside = Call(b, c.op, c.args, c.fakes, c.outs, c.dims, frozenset((0,)))
        keys, values = (matched(inside, shared_heads(inside, t, xs[0]), xs[0]) for t in xs[1:3])
        return b.attention(xs[0], keys, values, *xs[3:], scale=factor, masked_rows="nan" if mask is None else "zero")

    made = pulled(c, build, [q, k, v, *more], g, [i for i in range(3) if c.wants(i)], y)
    return tuple(made.get(i) for i in range(len(c.outs)))


def shrunk(c: Call) -> Any:
    """hardshrink, softshrink: 0 between the bounds, bounds included."""
    x, g = c.x(), c.x("grad_out" if "grad_out" in c.args else "grad_output")
    bound, zero = c.scalar(c.number("lambd", 0.5), x.type.dtype), c.scalar(0.0, g.type.dtype)
    return c.b.where(c.b.greater(c.b.abs(x), bound), g, zero)


def distances_backward(c: Call) -> Any:
    """Of the distances of rows x1 to rows x2, by x1; 0 where two rows are equal."""
    b, g, d, p = c.b, c.x("grad"), c.x("cdist"), float(c.number("p"))
    x, y = c.x("x1"), c.x("x2")
    zero, one = (c.scalar(v, x.type.dtype) for v in (0.0, 1.0))
    if math.isinf(p):
        raise UnsupportedError("the gradient of largest differences of rows")
    if p == 0:
        return b.mul(x, zero)
    equal = b.equal(d, zero)
    rate = b.where(equal, zero, b.div(g, b.pow(b.where(equal, one, d), c.scalar(p - 1, x.type.dtype))))
    if p == 2:
        return b.sub(b.mul(x, b.reduce_sum(rate, axes=(-1,), keepdims=True)), b.matmul(rate, y))
    off = b.sub(b.unsqueeze(x, axes=(x.type.rank - 1,)), b.unsqueeze(y, axes=(y.type.rank - 2,)))
    size = b.abs(off)
    power = b.pow(b.where(b.equal(size, zero), one, size), c.scalar(p - 1, x.type.dtype))
    each = b.mul(b.mul(b.sign(off), power), b.unsqueeze(rate, axes=(rate.type.rank,)))
    return b.reduce_sum(each, axes=(-2,))


def weight_norm_backward(c: Call) -> Any:
    """Of w = v * g / norm(v), the norm over all axes but one: cotangents of v and g."""
    b, w, v, g, norm = c.b, c.x("grad_w"), c.x("saved_v"), c.x("saved_g"), c.x("saved_norms")
    axis = c.axis(rank=v.type.rank)
    norm = b.reshape(c.cast(norm, v.type.dtype), shape=g.type.shape)
    along = b.div(
        b.reduce_sum(b.mul(w, v), axes=tuple(k for k in range(v.type.rank) if k != axis), keepdims=True), norm
    )
    return b.mul(b.div(g, norm), b.sub(w, b.mul(v, b.div(along, norm)))), along


BACKWARD: dict[str, Converter] = {
    "convolution_backward": convolution_backward,
    "dnnc::max_pool_backward": max_pool_backward,
    **{f"max_pool{k}d_with_indices_backward": of(max_pool(k)) for k in (2, 3)},
    **{f"avg_pool{k}d_backward": of(avg_pool(k)) for k in (2, 3)},
    **{f"_adaptive_avg_pool{k}d_backward": of(adaptive(k)) for k in (2, 3)},
    **{f"adaptive_max_pool{k}d_backward": adaptive_max_backward for k in (2, 3)},
    **{f"replication_pad{k}d_backward": of(bordered("edge")) for k in (1, 2, 3)},
    **{f"upsample_nearest{k}d_backward": sized(upsample("nearest", k)) for k in (1, 2, 3)},
    **{f"_upsample_nearest_exact{k}d_backward": sized(upsample("nearest", k, centred=True)) for k in (1, 2, 3)},
    "upsample_linear1d_backward": sized(upsample("linear", 1)),
    "upsample_bilinear2d_backward": sized(upsample("linear", 2)),
    "upsample_trilinear3d_backward": sized(upsample("linear", 3)),
    "upsample_bicubic2d_backward": sized(upsample("cubic", 2)),
    "dnnc::interpolate_backward": sized(interpolate),
    "dnnc::attention_backward": attention_backward,
    "_weight_norm_interface_backward": weight_norm_backward,
    "_cdist_backward": distances_backward,
    "hardshrink_backward": shrunk,
    "softshrink_backward": shrunk,
}
