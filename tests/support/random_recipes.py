"""What random graphs are made of: each recipe adds a few fitting nodes to the graph of a Generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.ir.dtype import BY_NAME
from dnnc.ir.expr import Var, dim
from dnnc.ir.op import OpDef, Sample, Trait
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType
from support.random_control import CONTROL_RECIPES
from support.random_graphs import (
    ANY_SIZE,
    CONTROL,
    SIZES,
    Generator,
    Made,
    within,
)

NAMES = [
    n for n, d in OPS.items() if d.samples and n not in (*CONTROL, "pack", "decode_image")
]  # with samples; an image is no random bytes
UNARY = [n for n, d in OPS.items() if Trait.ELEMENTWISE in d.traits and len(d.samples[0].inputs) == 1 and n != "cast"]
BINARY = [
    n
    for n, d in OPS.items()
    if Trait.ELEMENTWISE in d.traits and len(d.samples[0].inputs) == 2 and d.compute is not None
]


def _kinds(op: OpDef) -> str:
    return "".join(sorted({s.inputs[0].dtype.kind for s in op.samples}))


def _unary(g: Generator) -> None:
    op = OPS[g.one_of(UNARY)]
    s: Sample = g.one_of(op.samples)
    m: Made | None = g.pick(s.inputs[0].dtype.kind if g.chance(0.5) else _kinds(op))
    if m is not None and m.dtype.is_float:
        m = g.into(m, *op.samples[0].domain)
    if m is not None and not (m.dtype.is_float and dict(s.attrs).get("low", 0) is None):
        g.add(op.name, m, **dict(s.attrs))


def _activation(g: Generator) -> None:
    m = g.pick("f")
    g.add(g.one_of(("relu", "relu", "sigmoid", "tanh", "gelu", "hard_swish", "swish", "leaky_relu", "softplus")), m)


def _binary(g: Generator) -> None:
    op = OPS[g.one_of(BINARY if g.chance(0.5) else ("add", "mul", "sub", "max", "min", "add", "mul"))]
    m = g.pick(_kinds(op))
    low, high = op.samples[0].domain
    other = g.like(m, g.one_of(_partners(m.shape)), low if m.dtype.is_float else -9, high)
    if m.dtype.is_float and low > 0:
        left = g.into(m, low, high)
    else:
        left = m
    if op.name in ("div", "mod", "fmod") and m.dtype.is_float:
        size = g.add("abs", other)
        other_ = size and g.add("add", size, g.number(m.dtype, 0.5))
    else:
        other_ = other
    if left is not None and other_ is not None:
        g.add(
            op.name,
            *((left, other_) if g.chance(0.7) or low > 0 or op.name in ("div", "mod", "fmod") else (other_, left)),
        )


def _partners(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes that broadcast with one: the same, a tail, ones in places, a scalar."""
    out: list[tuple[int, ...]] = [shape, shape, ()]
    out += [shape[k:] for k in range(1, len(shape))]
    out += [tuple(1 if k == j else d for j, d in enumerate(shape)) for k in range(len(shape))]
    out += [tuple(d if k == j else 1 for j, d in enumerate(shape)) for k in range(len(shape))]
    return out


def _diamond(g: Generator) -> None:
    m = g.pick("f")
    a = g.add(g.one_of(("sigmoid", "tanh", "relu", "neg", "abs", "softplus")), m)
    if a is not None:
        b = (
            g.add(g.one_of(("mul", "add", "sub", "max")), m, a)
            if g.chance(0.6)
            else g.add("concat", a, m, axis=-1)
            if m.shape
            else None
        )
        if b is not None and g.chance(0.3) and b.shape == m.shape:
            g.add("add", b, a)


def _same_shape(g: Generator) -> None:
    """Two values of one type that are there already: residual connections."""
    m = g.pick("fiu")
    fits = [x for x in g.pool if x.dtype is m.dtype and x.shape == m.shape]
    g.add(g.one_of(("add", "add", "mul", "sub", "max")), m, g.one_of(fits))


def _select(g: Generator) -> None:
    m = g.pick("fiu")
    c = g.add(g.one_of(("less", "greater", "equal", "less_equal")), m, g.like(m, g.one_of(_partners(m.shape))))
    if c is not None and g.chance(0.3):
        c = g.add("logical_and", c, g.source("b", g.one_of(_partners(c.shape)), BY_NAME["bool"]))
    if c is not None:
        g.add("where", c, m, g.like(m, g.one_of(_partners(m.shape))))


def _cast(g: Generator) -> None:
    m = g.pick("fiub")
    to = g.dtype("fiub") if g.chance(0.6) else BY_NAME["f32"]
    if m.dtype.is_float and not to.is_float and g.chance(0.7):
        s = g.add("floor", m)
        m = s if s is not None else m
    g.add("cast", m, to=to)


def _factors(g: Generator, n: int, rank: int) -> tuple[int, ...]:
    dims = [1] * rank
    left = max(n, 1)
    if n == 0:
        dims[g.below(rank)] = 0
    for p in (2, 3, 5, 7, 11, 13, 17, 31):
        while left % p == 0:
            dims[g.below(rank)] *= p
            left //= p
    dims[g.below(rank)] *= left
    return tuple(dims)


def _reshape(g: Generator) -> None:
    m = g.pick("fiub")
    g.add("reshape", m, shape=g.dims(_factors(g, m.exact.size, 1 + g.below(4))))


def _transpose(g: Generator) -> None:
    m = g.pick("fiub", 1)
    g.add("transpose", m, perm=tuple(int(p) for p in g.rng.permutation(len(m.shape))))


def _unit_dims(g: Generator) -> None:
    m = g.pick("fiub")
    if 1 in m.shape and g.chance(0.5):
        g.add("squeeze", m) if g.chance(0.3) else g.add(
            "expand", m, shape=g.dims(tuple(3 if d == 1 else d for d in m.shape))
        )
    elif g.chance(0.5):
        g.add("unsqueeze", m, axes=(g.below(len(m.shape) + 1),))
    else:
        g.add("tile", m, repeats=tuple(1 + g.below(2) for _ in m.shape))


def _concat(g: Generator) -> None:
    m = g.pick("fiub", 1)
    axis = g.below(len(m.shape))
    fits = [
        x
        for x in g.pool
        if x.dtype is m.dtype
        and len(x.shape) == len(m.shape)
        and all(a == b or k == axis for k, (a, b) in enumerate(zip(x.shape, m.shape)))
    ]
    g.add("concat", m, *(g.one_of(fits) for _ in range(1 + g.below(2))), axis=axis)


def _slice(g: Generator) -> None:
    m = g.pick("fiub", 1)
    starts: list[int] = []
    steps: list[int] = []
    shape: list[Any] = []
    for d, known in zip(m.shape, m.type.shape):
        if not isinstance(known, int):  # all of a symbolic axis
            starts, steps, shape = [*starts, 0], [*steps, 1], [*shape, known]
            continue
        step = g.one_of((1, 1, 1, 2, 3))
        start = g.below(max(d, 1))
        count = 1 + g.below(max(1, -(-(d - start) // step))) if d else 0
        count -= int(count > 0 and g.dims((count,)) != (count,))  # a part of a static axis is no N
        if g.chance(0.15) and d:
            start, step = start + (count - 1) * step, -step
        starts.append(start)
        steps.append(step)
        shape.append(count)
    g.add("slice", m, starts=tuple(starts), steps=tuple(steps), shape=tuple(shape))


def _pad(g: Generator) -> None:
    m = g.pick("fi", 1)
    mode = g.one_of(("constant", "constant", "reflect", "edge", "wrap"))
    g.add("pad", m, pads=tuple(g.below(3) for _ in range(2 * len(m.shape))), mode=mode)


def _gather(g: Generator) -> None:
    m = g.pick("fib", 1)
    axis = g.below(len(m.shape))
    n = m.shape[axis]
    if n:
        g.add("gather", m, g.source("i", g.shape(g.below(3)), g.dtype("i"), -n, n - 1), axis=axis)


def _reduce(g: Generator) -> None:
    names = (
        "reduce_sum",
        "reduce_mean",
        "reduce_max",
        "reduce_min",
        "reduce_sum",
        "reduce_mean",
        "reduce_l1",
        "reduce_l2",
        "reduce_sum_square",
        "reduce_prod",
    )
    op = g.one_of((*names, "reduce_log_sum_exp", "reduce_log_sum"))
    m: Made | None = g.pick("f" if op.startswith(("reduce_l", "reduce_m")) and g.chance(0.8) else _kinds(OPS[op]), 1)
    if m is None or (op == "reduce_log_sum" and (m := g.into(m, 0.1, 3.0)) is None):
        return
    axes = tuple(k for k in range(len(m.shape)) if g.chance(0.5)) or (len(m.shape) - 1,)
    g.add(op, m, axes=axes, keepdims=g.chance(0.5))


def _arg(g: Generator) -> None:
    m = g.pick("fiu", 1)
    g.add(
        g.one_of(("argmax", "argmin")), m, axis=g.below(len(m.shape)), keepdims=g.chance(0.5), select_last=g.chance(0.2)
    )


def _cumulative(g: Generator) -> None:
    m = g.pick("fi", 1)
    g.add("cumsum", m, axis=g.below(len(m.shape)), exclusive=g.chance(0.3), reverse=g.chance(0.3))


def _softmax(g: Generator) -> None:
    m: Made | None = g.pick("f", 1)
    if m is None:
        return
    if g.chance(0.3):
        m = g.add("mul", m, g.number(m.dtype, 0.25))
    if m is not None and g.chance(0.3):
        m = g.add("add", m, g.like(m, g.one_of(_partners(m.shape))))
    if m is not None:
        g.add(g.one_of(("softmax", "softmax", "log_softmax")), m, axis=-1 if g.chance(0.7) else g.below(len(m.shape)))


def _norm(g: Generator) -> None:
    m = g.pick("f", 1)
    kind = g.one_of(("layer", "layer", "rms", "mvn", "instance", "group", "batch", "lp", "lrn"))
    if kind == "layer":
        axis = g.below(len(m.shape))
        s = g.like(m, m.shape[axis:], 0.2, 2.0)
        g.add("layer_norm", m, s, *([g.like(m, m.shape[axis:])] if g.chance(0.7) else []), axis=axis, epsilon=1e-3)
    elif kind == "rms":
        g.add("rms_norm", m, g.like(m, m.shape[-1:], 0.2, 2.0), axis=-1, epsilon=1e-3)
    elif kind == "mvn":
        g.add(
            "mean_variance_norm", m, axes=tuple(k for k in range(len(m.shape)) if g.chance(0.6)) or None, epsilon=1e-3
        )
    elif kind == "lp":
        g.add("lp_norm", m, axis=g.below(len(m.shape)), p=1 + g.below(2))
    elif len(m.shape) >= 3:
        c = m.shape[1]
        p = [g.like(m, (c,), 0.2, 2.0) for _ in range(4)]
        if kind == "instance":
            g.add("instance_norm", m, p[0], p[1], epsilon=1e-2)
        elif kind == "group":
            g.add(
                "group_norm",
                m,
                p[0],
                p[1],
                groups=g.one_of([d for d in (1, 2, 3, 4, c) if d and c % d == 0]),
                epsilon=1e-2,
            )
        elif kind == "batch":
            g.add("batch_norm", m, *p, epsilon=1e-3)
        else:
            g.add("lrn", m, size=g.one_of((1, 3, 5)), alpha=0.1)


def _matmul(g: Generator) -> None:
    m = g.pick("f" if g.chance(0.9) else "i", 1)
    k = m.shape[-1]
    n = int(g.one_of(SIZES))
    batch = g.one_of(((), (), m.shape[:-2], (1,) * len(m.shape[:-2]))) if len(m.shape) > 2 else ()
    w = g.like(m, (*batch, k, n) if g.chance(0.9) else (k,), -0.5, 0.5) if m.dtype.is_float else g.like(m, (k, n))
    y = (
        g.add("matmul", m, w)
        if g.chance(0.85) or len(m.shape) < 2
        else g.add("matmul", g.like(m, (*m.shape[:-2], n, m.shape[-2])), m)
    )
    if y is not None and g.chance(0.5) and y.shape:
        y = g.add("add", y, g.like(y, g.one_of((y.shape[-1:], y.shape))))
    if y is not None and g.chance(0.3):
        _activate(g, y)
    elif y is not None and len(y.shape) == 3 and g.chance(0.3) and y.shape[-1] % 2 == 0:
        r = g.add("reshape", y, shape=g.dims((*y.shape[:-1], 2, y.shape[-1] // 2)))
        if r is not None:
            g.add("transpose", r, perm=g.one_of(((0, 2, 1, 3), (0, 2, 3, 1))))


def _activate(g: Generator, y: Made) -> Made | None:
    return g.add(g.one_of(("relu", "gelu", "sigmoid", "tanh", "hard_swish")), y)


def _gemm(g: Generator) -> None:
    m = g.pick("f", 2)
    if len(m.shape) != 2:
        return
    ta, tb, n = g.chance(0.3), g.chance(0.5), int(g.one_of(SIZES))
    k = m.shape[0 if ta else 1]
    w = g.like(m, (n, k) if tb else (k, n), -0.5, 0.5)
    g.add(
        "gemm",
        m,
        w,
        *([g.like(m, g.one_of(((n,), (1, n), ())))] if g.chance(0.7) else []),
        trans_a=ta,
        trans_b=tb,
        alpha=g.one_of((1.0, 0.5)),
    )


def _image(g: Generator, spatial: int) -> Made:
    fits = [m for m in g.pool if m.dtype.is_float and len(m.shape) == spatial + 2 and min(m.shape) > 0]
    if fits and g.chance(0.85):
        return g.one_of(fits)  # type: ignore[no-any-return]
    channels = int(g.one_of((1, 3, 4, 8, 16, 16, 17, 24, 32, 33)))
    size = tuple(int(g.one_of((1, 4, 5, 6, 7, 8, 9, 11) if spatial < 3 else (1, 3, 4))) for _ in range(spatial))
    if g.large:
        channels, size = int(g.one_of((3, 16, 32, 40, 64))), tuple(3 * d for d in size)
    batch = ANY_SIZE if g.any is not None and not g.large and channels <= 8 else g.one_of((1, 1, 2, 3))
    return g.source("f", (batch, channels, *size), None if g.chance(0.2) else BY_NAME["f32"])


def _conv(g: Generator) -> None:
    spatial = g.one_of((1, 2, 2, 2, 2, 3))
    x = _image(g, spatial)
    c = x.shape[1]
    out = int(g.one_of((1, 3, 8, 12, 16, 17, 32, 64) if g.large else (1, 3, 8, 12, 16, 17, 32)))
    group = 1
    if g.chance(0.3):
        group = g.one_of([d for d in (2, 4, c) if c % d == 0] or [1])
        out = c if group == c else group * g.one_of((1, 2, 4))
    kernel = tuple(g.one_of((1, 1, 2, 3, 3)) for _ in range(spatial))
    w = g.like(x, (out, c // group, *kernel), -0.5, 0.5)
    strides = tuple(g.one_of((1, 1, 2)) for _ in range(spatial))
    pads = tuple(g.one_of((0, 1, 1)) if k > 1 else 0 for k in kernel * 2)
    dilations = tuple(g.one_of((1, 1, 1, 2)) for _ in range(spatial))
    bias = [g.like(x, (out,))] if g.chance(0.6) else []
    y = g.add("conv", x, w, *bias, strides=strides, pads=pads, dilations=dilations, group=group)
    if y is not None and g.chance(0.5):
        y = _activate(g, y)
    if y is not None and y.shape == x.shape and g.chance(0.5):
        g.add("add", y, x)


def _conv_transpose(g: Generator) -> None:
    x = _image(g, 2)
    w = g.like(x, (x.shape[1], int(g.one_of((1, 3, 16))), g.one_of((1, 2, 3)), g.one_of((2, 3))), -0.5, 0.5)
    g.add("conv_transpose", x, w, strides=(g.one_of((1, 2)), g.one_of((1, 2, 3))))


def _pool(g: Generator) -> None:
    spatial = g.one_of((1, 2, 2, 2))
    x = _image(g, spatial)
    op = g.one_of(
        (
            "max_pool",
            "max_pool",
            "avg_pool",
            "avg_pool",
            "lp_pool",
            "global_avg_pool",
            "global_avg_pool",
            "global_max_pool",
        )
    )
    if op.startswith("global"):
        g.add(op, x)
        return
    kernel = tuple(g.one_of((1, 2, 3)) for _ in range(spatial))
    strides = tuple(g.one_of((1, 2, 2)) for _ in range(spatial))
    more = {"count_include_pad": g.chance(0.4)} if op == "avg_pool" else {}
    g.add(op, x, kernel=kernel, strides=strides, pads=tuple(g.below(2) if k > 1 else 0 for k in kernel * 2), **more)


def _image_movement(g: Generator) -> None:
    x = _image(g, 2)
    if g.chance(0.5):
        c = x.shape[1]
        g.add("depth_to_space", x, block=2, mode=g.one_of(("DCR", "CRD"))) if c % 4 == 0 else g.add(
            "space_to_depth", x, block=2
        )
    else:
        h, w = x.shape[2:]
        up = (2, -1, 4)
        g.add(
            "resize",
            x,
            shape=g.dims((*x.shape[:2], 2 * h, 2 * w)),
            coords=((1, 0, 1), (1, 0, 1), up, up),
            mode=g.one_of(("nearest", "linear")),
        )


def _sort(g: Generator) -> None:
    m = g.pick("fiu", 1)
    axis = g.below(len(m.shape))
    keep = (
        1 + g.below(m.shape[axis]) if m.shape[axis] and g.chance(0.5) and isinstance(m.type.shape[axis], int) else None
    )
    g.add("sort", m, axis=axis, descending=g.chance(0.5), **({} if keep is None else {"keep": keep}))


def _quantize(g: Generator) -> None:
    """To 8 bits and back, with one scale or one for each index of an axis, and something integer in between."""
    m = g.pick("f", 1)
    axis = g.below(len(m.shape))
    shape = () if g.chance(0.6) or not isinstance(m.type.shape[axis], int) else m.shape[axis : axis + 1]
    to = BY_NAME[g.one_of(("u8", "i8"))]
    scale, zero = g.source("f", shape, m.dtype, 0.02, 0.1), g.source(to.kind, shape, to, 0, 20)
    q = g.add("quantize_linear", m, scale, zero, dtype=to, axis=axis)
    if q is not None and g.chance(0.3):
        q = g.add(g.one_of(("relu", "max", "identity")), *([q] if g.chance(0.5) else [q, q])) or q
    if q is not None:
        g.add("dequantize_linear", q, scale, zero, axis=axis)


def _transform(g: Generator) -> None:
    m = g.pick("f", 1)
    axis = g.below(len(m.shape))
    if not isinstance(m.type.shape[axis], int) or not m.exact.size:
        return
    x = g.add("unsqueeze", m, axes=(len(m.shape),))
    y = x and g.add("dft", x, axis=axis, onesided=g.chance(0.5))
    if y is not None and g.chance(0.5):
        g.add("reduce_sum_square", y, axes=(len(m.shape),))


def _lookup(g: Generator) -> None:
    """Elements chosen by indices of the same rank, and put back."""
    m = g.pick("fi", 1)
    axis = g.below(len(m.shape))
    n = m.shape[axis]
    if not n or g.dims(m.shape) != m.shape:
        return
    at = (*m.shape[:axis], int(g.one_of((1, 2, n))), *m.shape[axis + 1 :])
    index = g.source("i", at, BY_NAME["i64"], -n, n - 1)
    y = g.add("gather_elements", m, index, axis=axis)
    if y is not None and g.chance(0.5):
        g.add("scatter_elements", m, index, y, axis=axis, reduction=g.one_of(("none", "add", "max")))


def _create(g: Generator) -> None:
    shape = g.shape(g.below(3))
    if g.chance(0.5):
        g.add("full", shape=shape, value=1.5)
    elif shape:
        g.add("iota", shape=shape, axis=g.below(len(shape)), dtype=g.dtype("fi"))


def _any_sample(g: Generator) -> None:
    """Any op on one of its samples."""
    add_sample(g, g.one_of(NAMES))


def add_sample(g: Generator, name: str) -> None:
    """An op on one of its samples, its operands made from values that are there; sizes that only the data tells get
    names of their own.
    """
    op = OPS[name]
    s: Sample = g.one_of(op.samples)
    if g.depth and (op.host is not None or Trait.HOST in op.traits):
        return
    stem = f"d{len(g.graph.dims)}"
    fresh = {
        v: dim(f"{stem}_{v.name}", v.lo, v.hi, v.div)
        for _, a in s.attrs
        for v in (a if isinstance(a, tuple) else (a,))
        if isinstance(v, Var)
    }  # type: ignore[arg-type]
    attrs = {
        k: tuple(fresh.get(v, v) for v in a) if isinstance(a, tuple) else fresh.get(a, a) if isinstance(a, Var) else a
        for k, a in s.attrs
    }
    operands = [_fitted(g, t, s.domain) for t in s.inputs]
    if all(m is not None for m in operands):
        g.add(op.name, *operands, **attrs)


def _fitted(g: Generator, t: TensorType, domain: tuple[float, float]) -> Made | None:
    """A value of exactly this type, in the domain: cut or repeated, cast and clipped from one that is there."""
    shape = tuple(int(str(d)) for d in t.shape)
    fits = [m for m in g.pool if m.dtype is t.dtype or (m.dtype.is_float and t.dtype.is_float)]
    if not fits or g.chance(0.5) or t.dtype.kind in "bs" or t.dtype.bits < 8:
        return g.source(t.dtype.kind, shape, t.dtype, *domain)
    m: Made | None = g.one_of(fits)
    n = int(np.prod(shape, dtype=np.int64))
    assert m is not None
    size = m.exact.size
    m = g.add("reshape", m, shape=(size,))
    if m is not None and size < n and size:
        m = g.add("tile", m, repeats=(-(-n // size),))
    if m is not None and m.exact.size > n:
        m = g.add("slice", m, starts=(0,), steps=(1,), shape=(n,))
    m = m and g.add("reshape", m, shape=shape)  # a symbolic size fits no sample
    if m is not None and m.dtype is not t.dtype:
        m = g.add("cast", m, to=t.dtype)
    if m is None or within(m, *domain):
        return m
    return g.add("clip", m, low=domain[0], high=domain[1]) if m.dtype.kind in "fiu" and m.exact.size else None


RECIPES: tuple[Callable[[Generator], None], ...] = (
    _unary, _unary, _activation, _activation, _binary, _binary, _binary, _diamond, _diamond, _same_shape, _same_shape,
    _select, _cast,
    _reshape, _transpose, _unit_dims, _concat, _slice, _pad, _gather, _reduce, _reduce, _arg, _cumulative, _softmax,
    _norm, _norm,
    _matmul, _matmul, _matmul, _gemm, _conv, _conv, _conv, _conv, _conv_transpose, _pool, _pool, _image_movement,
    _create, _sort, _quantize,
    _transform, _lookup, _any_sample, _any_sample, *CONTROL_RECIPES,
)  # fmt: skip
