"""Products, convolutions, pooling, norms, reductions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.export.arithmetic import where
from dnnc.export.call import Call, Convert
from dnnc.ir.dtype import DType, f64, i8, i32, i64, u8
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.ops.window import window

# --- reductions -------------------------------------------------------------------------------------------------------


def reduce(op: str) -> Convert:
    def convert(c: Call) -> str:
        axes, keep = c.attrs["axes"], int(c.attrs["keepdims"])
        t = c.dtype
        run = c.w.type_for(op, t)
        x = c.w.cast(c.x(), t, run)
        if axes == ():  # ONNX takes no axes for all of them: reduce one of one element
            made = c.w.op(op, c.w.op("Unsqueeze", x, c.w.ints([0])), c.w.ints([0]), keepdims=0)
        else:
            made = c.w.op(op, x, None if axes is None else c.w.ints(axes), keepdims=keep)
        return c.w.cast(made, run, c.out.dtype)

    return convert


def arg(op: str) -> Convert:
    def convert(c: Call) -> str:
        attrs = {
            "axis": c.attrs["axis"],
            "keepdims": int(c.attrs["keepdims"]),
            "select_last_index": int(c.attrs["select_last"]),
        }
        return c.w.cast(c.w.typed(op, c.dtype, c.x(), keeps=False, **attrs), i64, c.out.dtype)

    return convert


def running(op: str) -> Convert:
    def convert(c: Call) -> str:
        run = c.w.type_for(op, c.dtype)
        axis = c.w.number(c.attrs["axis"], i64)
        exclusive, reverse = int(c.attrs["exclusive"]), int(c.attrs["reverse"])
        made = c.w.op(op, c.w.cast(c.x(), c.dtype, run), axis, exclusive=exclusive, reverse=reverse)
        return c.w.cast(made, run, c.dtype)

    return convert


# --- contractions -----------------------------------------------------------------------------------------------------


def matmul(c: Call) -> str:
    a, b, out = c.type(0).dtype, c.type(1).dtype, c.out.dtype
    if {a, b} <= {i8, u8} and out is i32:
        return c.w.op("MatMulInteger", c.x(0), c.x(1))  # type: ignore[no-any-return]
    x, y = c.w.cast(c.x(0), a, out), c.w.cast(c.x(1), b, out)
    return c.w.typed("MatMul", out, x, y)


def gemm(c: Call) -> str:
    attrs = {
        "alpha": c.attrs["alpha"],
        "beta": c.attrs["beta"],
        "transA": int(c.attrs["trans_a"]),
        "transB": int(c.attrs["trans_b"]),
    }
    return c.w.typed("Gemm", c.dtype, *c.inputs, **attrs)


def attention(c: Call) -> str:
    """softmax(q k^T * scale + mask) v in the register type. masked_rows="zero": fully masked rows are 0."""
    w, t, rank = c.w, c.dtype, c.type(0).rank
    wide = t.computed
    q, k, v = (w.cast(c.x(n), t, wide) for n in range(3))
    turned = w.op("Transpose", k, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = w.typed("Mul", wide, w.op("MatMul", q, turned), w.number(c.attrs["scale"], wide))
    mask = c.maybe(3)
    if mask is not None:
        scores = w.typed("Add", wide, scores, w.cast(mask, c.type(3).dtype, wide))
    weights = w.typed("Softmax", wide, scores, axis=-1)
    if c.attrs["masked_rows"] == "zero":
        top = w.op("ReduceMax", scores, w.ints([-1]), keepdims=1)
        none = w.op("Equal", top, w.number(float("-inf"), wide))
        weights = where(w, none, w.number(0, wide), weights, wide)
    return w.cast(w.op("MatMul", weights, v), wide, t)


def _numbers(values: Any, what: str) -> list[int] | None:
    """An attribute of plain integers."""
    if values is None:
        return None
    if not all(isinstance(v, int) for v in values):
        raise UnsupportedError(f"{what} of symbolic size have no form in ONNX: fix the dims by dims=")
    return list(values)


def _padded(c: Call, x: str, fill: Any, always: bool = False) -> tuple[str, list[int] | None]:
    """Return an operand and the pads left to the operator: negative and unsupported ones become a Pad."""
    pads = c.attrs["pads"]
    rank = c.type(0).rank - 2
    plain = pads is None or (all(isinstance(p, int) and p >= 0 for p in pads) and not always)
    if plain:
        return x, _numbers(pads, "pads")
    begin, end = tuple(pads[:rank]), tuple(pads[rank:])
    sizes = c.w.dims((0, 0, *begin, 0, 0, *end))
    run = c.w.type_for("Pad", c.dtype)
    made = c.w.op("Pad", c.w.cast(x, c.dtype, run), sizes, c.w.number(fill, run))
    return c.w.cast(made, run, c.dtype), None


def conv(c: Call) -> str:
    if c.attrs["panel"]:
        _refuse("a convolution by panels")  # layouts make these, of groups
    w, a = c.w, c.attrs
    x, pads = _padded(c, c.x(0), 0)
    attrs = {
        "strides": _numbers(a["strides"], "strides"),
        "pads": pads,
        "dilations": _numbers(a["dilations"], "dilations"),
        "group": a["group"],
    }
    have, filters, out = c.dtype, c.type(1).dtype, c.out.dtype
    bias = c.maybe(2)
    if {have, filters} <= {i8, u8} and out is i32:
        y: str = w.op("ConvInteger", x, c.x(1), **attrs)
        shape = (-1, *(1,) * (c.out.rank - 2))
        return y if bias is None else w.op("Add", y, w.op("Reshape", w.cast(bias, c.type(2).dtype, out), w.ints(shape)))
    run = w.type_for("Conv", out) if out.is_float else f64
    given = [
        w.cast(x, have, run),
        w.cast(c.x(1), filters, run),
        None if bias is None else w.cast(bias, c.type(2).dtype, run),
    ]
    return w.cast(w.op("Conv", *given, **attrs), run, out)


def conv_transpose(c: Call) -> str:
    a, rank = c.attrs, c.type(0).rank - 2
    pads = _numbers(a["pads"], "pads")
    names = ("strides", "dilations", "output_padding")
    attrs: dict[str, Any] = {n: _numbers(a[n], n) for n in names}
    attrs["group"] = a["group"]
    if pads is None or all(p >= 0 for p in pads):
        return c.w.typed("ConvTranspose", c.dtype, *c.inputs, pads=pads, **attrs)
    y = c.w.typed(
        "ConvTranspose", c.dtype, *c.inputs, **attrs
    )  # what the pads cut off, and where they are negative, what they add
    sizes = [0, 0, *(-p for p in pads[:rank]), 0, 0, *(-p for p in pads[rank:])]
    return (
        c.w.typed("Pad", c.dtype, y, c.w.ints(sizes))
        if c.maybe(2) is None
        else _refuse("a transposed convolution with negative pads and a bias")
    )


def conv_backward_filter(c: Call) -> str:
    """A convolution of the channels of x, as images with a channel for each sample, by those of the cotangent.

    Its strides are the dilations, its dilations the strides; of what it gives, the size of the filters is kept.
    """
    a, w = c.attrs, c.w
    n, channels, *sizes = c.type(0).shape
    kernel, group, rank = _numbers(a["kernel"], "filters"), a["group"], len(sizes)
    x, pads = _padded(c, c.x(), 0)
    if pads is None and a["pads"] is not None:  # they are in x
        begin, end = a["pads"][:rank], a["pads"][rank:]
        sizes = [unwrap(const(s) + p + q) for s, p, q in zip(sizes, begin, end)]
    per, last = unwrap(const(channels) // group), range(2, 2 + rank)
    apart = w.op("Reshape", x, w.dims((n, group, per, *sizes)))
    turned = w.op("Transpose", apart, perm=[2, 1, 0, *range(3, 3 + rank)])
    images = w.op("Reshape", turned, w.dims((per, unwrap(const(n) * group), *sizes)))
    filters = w.op("Transpose", c.x(1), perm=[1, 0, *last])
    swapped: dict[str, Any] = {
        "strides": _numbers(a["dilations"], "dilations"),
        "dilations": _numbers(a["strides"], "strides"),
    }
    y = w.typed("Conv", c.dtype, images, filters, pads=pads, group=group, **swapped)
    kept = w.typed("Slice", c.dtype, y, w.ints([0] * rank), w.ints(kernel or ()), w.ints(list(last)))
    return w.op("Transpose", kept, perm=[1, 0, *last])  # type: ignore[no-any-return]


def _refuse(what: str) -> str:
    raise UnsupportedError(f"{what} has no form in ONNX")


# --- pooling ----------------------------------------------------------------------------------------------------------


def _window(c: Call) -> dict[str, Any]:
    a = c.attrs
    return {
        "kernel_shape": list(a["kernel"]),
        "strides": _numbers(a["strides"], "strides"),
        "dilations": _numbers(a["dilations"], "dilations"),
    }


def _wide_pads(c: Call) -> bool:
    """Is there a pad as large as the window? ONNX Runtime takes none."""
    rank, pads = c.type(0).rank - 2, c.attrs["pads"] or ()
    dilations = c.attrs["dilations"] or (1,) * rank
    return any(
        isinstance(p, int) and p >= (c.attrs["kernel"][k % rank] - 1) * dilations[k % rank] + 1
        for k, p in enumerate(pads)
    )


def lowest(t: DType) -> Any:
    return -np.inf if t.is_float else t.range[0]


def max_pool(c: Call) -> str:
    t = c.dtype if c.dtype.is_float or c.dtype in (i8, u8) else f64
    x, pads = _padded(c, c.x(), lowest(c.dtype), _wide_pads(c))
    return c.w.cast(c.w.typed("MaxPool", t, c.w.cast(x, c.dtype, t), pads=pads, **_window(c)), t, c.dtype)


def max_pool_index(c: Call) -> str:
    """The second result of MaxPool: places in the whole of x."""
    if _wide_pads(c) or any(not isinstance(p, int) or p < 0 for p in c.attrs["pads"] or ()):
        return _refuse("the places of maxima with negative pads, or pads as large as the window,")
    t = c.dtype if c.dtype.is_float or c.dtype in (i8, u8) else f64
    run = c.w.type_for("MaxPool", t)
    x = c.w.cast(c.x(), c.dtype, run)
    return c.w.op("MaxPool", x, outputs=2, pads=_numbers(c.attrs["pads"], "pads"), **_window(c))[1]  # type: ignore[no-any-return]


def avg_pool(c: Call) -> str:
    """Where AveragePool does not count as we do, the sum of the window is divided by counts, which are constants."""
    uncounted, pads = c.attrs["uncounted"] or (), c.attrs["pads"] or ()
    include = bool(c.attrs["count_include_pad"])
    plain = all(isinstance(p, int) and p >= 0 for p in pads) and not _wide_pads(c)
    if plain and not (include and any(uncounted)):
        sides = _numbers(pads or None, "pads")
        return c.w.typed("AveragePool", c.dtype, c.x(), pads=sides, count_include_pad=int(include), **_window(c))
    shape = c.type(0).shape[2:]
    if not all(isinstance(d, int) for d in (*shape, *pads)):
        return _refuse("an average over windows that reach out of images of symbolic size")
    x, _ = _padded(c, c.x(), 0, always=True)
    mean = c.w.typed("AveragePool", c.dtype, x, **_window(c))
    with np.errstate(divide="ignore"):
        return c.w.typed("Mul", c.dtype, mean, c.w.constant(math.prod(c.attrs["kernel"]) / _counts(c), c.dtype))


def _counts(c: Call) -> Any:
    """How many elements of each window count: along each axis, multiplied."""
    a, out = c.attrs, c.out.shape[2:]
    win = window(len(out), a["kernel"], a["strides"], a["pads"], a["dilations"])
    none = a["uncounted"] or (0,) * len(out)
    total: Any = np.ones((1, 1))
    for k, (n, made) in enumerate(zip(c.type().shape[2:], out)):
        at = (
            np.arange(int(str(made)))[:, None] * win.strides[k]
            + np.arange(int(str(win.kernel[k]))) * win.dilations[k]
            - int(str(win.begin[k]))
        )
        size = int(str(n))
        counted = at < size + int(str(win.end[k])) - none[k] if a["count_include_pad"] else (at >= 0) & (at < size)
        total = total[..., None] * counted.sum(1)
    return total


def lp_pool(c: Call) -> str:
    x, pads = _padded(c, c.x(), 0, _wide_pads(c))
    return c.w.typed("LpPool", c.dtype, x, pads=pads, p=c.attrs["p"], **_window(c))


# --- norms ------------------------------------------------------------------------------------------------------------


def layer_norm(c: Call) -> str:
    t = c.dtype
    if t is f64:
        return _normed(c, c.attrs["axis"])
    return c.w.typed("LayerNormalization", t, *c.inputs, axis=c.attrs["axis"], epsilon=c.attrs["epsilon"])


def _normed(c: Call, axis: int) -> str:
    """(x - mean) / sqrt(var + epsilon) * scale + bias in float64, for which ONNX's operator computes in float32."""
    w, t = c.w, c.dtype
    y = _standard(c, tuple(range(axis % c.type().rank, c.type().rank)))
    y = w.op("Mul", y, c.x(1))
    bias = c.maybe(2)
    return y if bias is None else w.typed("Add", t, y, bias)


def _standard(c: Call, axes: tuple[int, ...]) -> str:
    w, t = c.w, c.dtype
    wide = t.computed
    x, over = w.cast(c.x(), t, wide), w.ints(axes)
    centered = w.op("Sub", x, w.op("ReduceMean", x, over, keepdims=1))
    var = w.op("ReduceMean", w.op("Mul", centered, centered), over, keepdims=1)
    y = w.op("Div", centered, w.op("Sqrt", w.op("Add", var, w.number(c.attrs["epsilon"], wide))))
    return w.cast(y, wide, t)


def rms_norm(c: Call) -> str:
    w, t = c.w, c.dtype
    wide, rank = t.computed, c.type().rank
    x, over = w.cast(c.x(), t, wide), w.ints(range(c.attrs["axis"] % rank, rank))
    mean = w.op("ReduceMean", w.op("Mul", x, x), over, keepdims=1)
    y = w.op("Div", x, w.op("Sqrt", w.op("Add", mean, w.number(c.attrs["epsilon"], wide))))
    return w.cast(w.op("Mul", y, w.cast(c.x(1), c.type(1).dtype, wide)), wide, t)


def mean_variance_norm(c: Call) -> str:
    rank, axes = c.type().rank, c.attrs["axes"]
    return _standard(c, tuple(range(rank)) if axes is None else tuple(a % rank for a in axes))


def lrn(c: Call) -> str:
    return c.w.typed("LRN", c.dtype, c.x(), **{n: c.attrs[n] for n in ("size", "alpha", "beta", "bias")})


def batch_norm(c: Call) -> str:
    return c.w.typed("BatchNormalization", c.dtype, *c.inputs, epsilon=c.attrs["epsilon"])


def group_norm(c: Call) -> str:
    if c.w.opset < 21:
        return _refuse(f"group_norm at opset {c.w.opset}, which scales by group; give opset=21 or later: group_norm")
    return c.w.typed("GroupNormalization", c.dtype, *c.inputs, num_groups=c.attrs["groups"], epsilon=c.attrs["epsilon"])


def softmax(op: str) -> Convert:
    """Computed in the type of registers, as here; ONNX's rounds each step in a half type."""
    return lambda c: c.w.cast(
        c.w.op(op, c.w.cast(c.x(), c.dtype, c.dtype.computed), axis=c.attrs["axis"]), c.dtype.computed, c.dtype
    )


REDUCE = {
    "reduce_sum": "ReduceSum", "reduce_mean": "ReduceMean", "reduce_prod": "ReduceProd", "reduce_l1": "ReduceL1",
    "reduce_sum_square": "ReduceSumSquare",
    "reduce_l2": "ReduceL2", "reduce_log_sum": "ReduceLogSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin",
    "reduce_log_sum_exp": "ReduceLogSumExp",
}  # fmt: skip

LAYERS: dict[str, Convert] = {
    **{name: reduce(op) for name, op in REDUCE.items()},
    "argmax": arg("ArgMax"),
    "argmin": arg("ArgMin"),
    "cumsum": running("CumSum"),
    "cumprod": running("CumProd"),
    "matmul": matmul,
    "gemm": gemm,
    "attention": attention,
    "conv": conv,
    "conv_transpose": conv_transpose,
    "conv_backward_filter": conv_backward_filter,
    "max_pool": max_pool,
    "max_pool_index": max_pool_index,
    "avg_pool": avg_pool,
    "lp_pool": lp_pool,
    "global_avg_pool": lambda c: c.w.typed("GlobalAveragePool", c.dtype, c.x()),
    "global_max_pool": lambda c: c.w.typed("GlobalMaxPool", c.dtype, c.x()),
    "global_lp_pool": lambda c: c.w.typed("GlobalLpPool", c.dtype, c.x(), p=c.attrs["p"]),
    "softmax": softmax("Softmax"),
    "log_softmax": softmax("LogSoftmax"),
    "rounded_softmax": lambda c: c.w.typed("Softmax", c.dtype, c.x(), axis=-1),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "mean_variance_norm": mean_variance_norm,
    "lrn": lrn,
    "batch_norm": batch_norm,
    "instance_norm": lambda c: c.w.typed("InstanceNormalization", c.dtype, *c.inputs, epsilon=c.attrs["epsilon"]),
    "group_norm": group_norm,
    "lp_norm": lambda c: c.w.typed("LpNormalization", c.dtype, c.x(), axis=c.attrs["axis"], p=c.attrs["p"]),
}
