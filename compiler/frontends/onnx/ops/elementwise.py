"""Converters of element-wise operators: arithmetic, comparisons, logic, activations, casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.ops import strings
from dnnc.frontends.onnx.tensors import dtype_of
from dnnc.ir.dtype import boolean, f32, f64, i32
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import Value

Converter = Callable[[Call], Any]


def unary(op: str) -> Converter:
    return lambda c: c.b.op(op, c.x())


def operands(c: Call) -> tuple[Value, Value]:
    """Both operands; before opset 7 the second is aligned by `axis` when `broadcast` is set."""
    a, b = c.x(0), c.x(1)
    if c.opset < 7 and c.flag("broadcast") and b.type.rank:
        axis = c.integer("axis", a.type.rank - b.type.rank)
        trailing = a.type.rank - (axis + a.type.rank if axis < 0 else axis) - b.type.rank
        if trailing > 0:
            b = c.b.reshape(b, shape=(*b.type.shape, *(1,) * trailing))
    return a, b


def binary(op: str) -> Converter:
    return lambda c: c.b.op(op, *operands(c))


def variadic(op: str) -> Converter:
    def convert(c: Call) -> Value:
        xs = c.all()
        r = xs[0]
        for x in xs[1:]:
            r = c.b.op(op, r, x)
        return r

    return convert


def mean(c: Call) -> Any:
    total = variadic("add")(c)
    return total if len(c.items) == 1 else c.b.div(total, float(len(c.items)))


def power(c: Call) -> Any:
    """The result has the base's dtype; an integer base with a float exponent is computed in floats."""
    a, b = operands(c)
    base, exponent = a.type.dtype, b.type.dtype
    if base.is_int and exponent.is_float:
        wide = f64 if base.bits > 16 or exponent is f64 else f32
        return c.cast(c.b.pow(c.cast(a, wide), c.cast(b, wide)), base)
    return c.b.pow(a, c.cast(b, base))


def modulo(c: Call) -> Any:
    return c.b.op("fmod" if c.flag("fmod") else "mod", *operands(c))


def bit_shift(c: Call) -> Any:
    directions = {"LEFT": "shift_left", "RIGHT": "shift_right"}
    direction = c.text("direction")
    if direction not in directions:
        raise UnsupportedError(f"attribute direction must be LEFT or RIGHT, got {direction!r}")
    return c.b.op(directions[direction], c.x(0), c.x(1))


def clip(c: Call) -> Any:
    """Bounds are attributes before opset 11, then optional inputs, which need not be constant."""
    x = c.x()
    if c.opset < 11:
        if x.type.dtype.is_float:
            return c.b.clip(x, low=_finite(c.number("min", -np.inf)), high=_finite(c.number("max", np.inf)))
        raise UnsupportedError(f"before opset 11 Clip takes floats; got {x.type}")
    bounds = [_bound(c, 1), _bound(c, 2)]
    if all(known for known, _ in bounds):
        low, high = (v for _, v in bounds)
        return x if low is None and high is None else c.b.clip(x, low=low, high=high)
    for i, op in ((1, "max"), (2, "min")):
        limit = c.opt(i)
        if limit is not None:
            x = c.b.op(op, x, limit if limit.type.rank == 0 else c.b.reshape(limit, shape=()))
    return x


def _bound(c: Call, i: int) -> tuple[bool, Any]:
    """(is it known, its number or None for no bound)"""
    if not c.has(i):
        return True, None
    a = c.item(i).array
    if a is None:
        return False, None
    v = c.scalar(i, "a bound of Clip")
    return (False, None) if isinstance(v, float) and np.isnan(v) else (True, _finite(v))


def _finite(v: Any) -> Any:
    return None if isinstance(v, float) and np.isinf(v) else v


def is_inf(c: Call) -> Any:
    x = c.x()
    negative, positive = c.flag("detect_negative", True), c.flag("detect_positive", True)
    if negative and positive:
        return c.b.isinf(x)
    if not negative and not positive:
        return c.b.logical_and(c.b.isinf(x), c.const(False, boolean))
    zero = c.const(0.0, x.type.dtype)
    return c.b.logical_and(c.b.isinf(x), c.b.op("greater" if positive else "less", x, zero))


def prelu(c: Call) -> Any:
    x, slope = c.x(0), c.x(1)
    if c.opset < 7 and slope.type.rank == 1 and x.type.rank > 1 and slope.type.shape[0] != 1:
        slope = c.b.reshape(slope, shape=(*slope.type.shape, *(1,) * (x.type.rank - 2)))
    return c.b.prelu(x, slope)


def with_numbers(op: str, **defaults: float) -> Converter:
    """An activation with float attributes that are called as ours are."""
    return lambda c: c.b.op(op, c.x(), **{k: c.number(k, v) for k, v in defaults.items()})


def shrink(c: Call) -> Value:
    x = c.x()
    operand = c.cast(x, x.type.dtype if x.type.dtype.is_float else f32)
    y = c.b.shrink(operand, bias=c.number("bias", 0.0), lambd=c.number("lambd", 0.5))
    return c.cast(y, x.type.dtype)


def gelu(c: Call) -> Any:
    return c.b.gelu(c.x(), approximate=c.text("approximate", "none"))


def cast(c: Call) -> Value:
    """`to` is a number; opset 1 writes its name. `saturate` matters for 8-bit floats only."""
    to = c.dtype("to") if not isinstance(c.attrs.get("to"), str) else _named(c.text("to"))
    return _cast(c, to)


def _named(name: str) -> Any:

    if name.upper() not in onnx.TensorProto.DataType.keys():
        raise UnsupportedError(f"attribute to: there is no data type {name!r}")
    return dtype_of(onnx.TensorProto.DataType.Value(name.upper()), "attribute to")


def _cast(c: Call, to: Any) -> Value:
    x = c.x()
    if "s" in (x.type.dtype.kind, to.kind) and x.type.dtype is not to:
        made: Value = strings.cast(c, x, to)
        return made
    if to.name == "f8e8m0" and x.type.dtype is not to:
        return c.b.to_power(c.cast(x, f32), rounding=c.text("round_mode", "up"), saturate=c.flag("saturate", True))  # type: ignore[no-any-return]
    if to.is_int and to.bits < 8 and x.type.dtype.is_float:
        x = c.b.cast(x, to=i32)  # ONNX takes the low bits of the whole number; ours would saturate
    return x if x.type.dtype is to else c.b.cast(x, to=to, saturate=c.flag("saturate", True))


def cast_like(c: Call) -> Value:
    return _cast(c, c.type_of(1).dtype)


def equal(c: Call) -> Value:
    return c.b.string_equal(c.x(0), c.x(1)) if c.type_of(0).dtype.kind == "s" else binary("equal")(c)  # type: ignore[no-any-return]


def where(c: Call) -> Any:
    return c.b.where(c.x(0), c.x(1), c.x(2))


ELEMENTWISE: dict[str, Converter] = {
    **{name: unary(op) for name, op in {
        "Abs": "abs", "Neg": "neg", "Sign": "sign", "Reciprocal": "reciprocal", "Sqrt": "sqrt", "Floor": "floor",
        "Ceil": "ceil",
        "Round": "round", "Exp": "exp", "Log": "log", "Erf": "erf", "Sin": "sin", "Cos": "cos", "Tan": "tan",
        "Asin": "asin", "Acos": "acos",
        "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh", "Tanh": "tanh", "Asinh": "asinh", "Acosh": "acosh",
        "Atanh": "atanh",
        "Not": "logical_not", "BitwiseNot": "bitwise_not", "IsNaN": "isnan", "Relu": "relu", "Sigmoid": "sigmoid",
        "Softplus": "softplus",
        "Softsign": "softsign", "Mish": "mish", "HardSwish": "hard_swish",
    }.items()},
    **{name: binary(op) for name, op in {
        "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Less": "less", "LessOrEqual": "less_equal",
        "Greater": "greater", "GreaterOrEqual": "greater_equal", "And": "logical_and", "Or": "logical_or",
        "Xor": "logical_xor",
        "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
    }.items()},
    "Sum": variadic("add"), "Max": variadic("max"), "Min": variadic("min"), "Mean": mean,
    "Pow": power, "Mod": modulo, "BitShift": bit_shift, "Clip": clip, "IsInf": is_inf, "PRelu": prelu, "Gelu": gelu,
    "Shrink": shrink,
    "LeakyRelu": with_numbers("leaky_relu", alpha=0.01), "Elu": with_numbers("elu", alpha=1.0),
    "Celu": with_numbers("celu", alpha=1.0),
    "Selu": with_numbers("selu", alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "HardSigmoid": with_numbers("hard_sigmoid", alpha=0.2, beta=0.5), "Swish": with_numbers("swish", alpha=1.0),
    "ThresholdedRelu": with_numbers("thresholded_relu", alpha=1.0),
    "Equal": equal, "Cast": cast, "CastLike": cast_like, "Where": where,
}  # fmt: skip
