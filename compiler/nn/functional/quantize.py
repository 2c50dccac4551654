"""Rounding to the numbers of a quantized model while it trains; derivatives pass as if nothing was rounded."""

from __future__ import annotations

from functools import cache
from typing import Any

from dnnc.array.core import Array
from dnnc.array.elementwise import logical_and, multiply
from dnnc.array.errors import ValueInputError
from dnnc.array.promotion import dtype_of
from dnnc.frontends.trace.custom_rules import CustomVjp, custom_vjp
from dnnc.ir.dtype import from_numpy
from dnnc.nn.functional.operands import array, choice, op


def fake_quantize(
    input: Any, scale: Any, zero_point: Any = None, dtype: str = "int8", axis: int | None = None
) -> Array:
    """Round to the nearest (q - zero_point) * scale with q in the range of an integer type.

    The gradient is straight-through (Bengio et al., 2013): that of the identity where q is in the range, else 0. In
    inference mode `dnnc.to_onnx` writes QuantizeLinear and DequantizeLinear, which compile to integers.

    Args:
        input: float.
        scale: one number, or [n] along `axis`.
        zero_point: integers of `dtype` in the shape of the scale; None for 0.
        dtype: "int8" or "uint8".
        axis: of the input, along which the scales lie; None for one scale.

    Raises:
        InputError: dtypes or shapes do not fit.
    """
    what = "fake_quantize"
    kind = choice(what, "dtype", dtype, "int8", "uint8")
    x, s = array(what, "input", input), array(what, "scale", scale)
    if s.dtype != x.dtype:
        s = s.astype(x.dtype)
    expected = () if axis is None else (x.shape[axis],)
    if len(s.shape) != len(expected) or any(m != n for m, n in zip(s.shape, expected)):
        raise ValueInputError(f"{what}: scale must have shape {expected}, got {s.shape}")
    rounding = _rounding(kind, axis)
    if zero_point is None:
        return rounding(x, s)
    zero = array(what, "zero_point", zero_point, "iu")
    if zero.shape != s.shape:
        raise ValueInputError(f"{what}: zero_point must have the scale's shape {s.shape}, got {zero.shape}")
    return rounding(x, s, zero if zero.dtype == dtype_of(kind) else zero.astype(kind))


@cache
def _rounding(kind: str, axis: int | None) -> CustomVjp[Array]:
    """The function of (x, scale, zero) and its rule."""
    to = from_numpy(dtype_of(kind))
    low, high = to.range
    at = 0 if axis is None else axis

    def fake_quantized(x: Array, scale: Array, *zero: Array) -> Array:
        return op("dequantize_linear", op("quantize_linear", x, scale, *zero, dtype=to, axis=at), scale, *zero, axis=at)

    def forward(x: Array, scale: Array, *zero: Array) -> Any:
        along: Any = (slice(None), *(None,) * (x.ndim - 1 - at % x.ndim)) if axis is not None else ...
        q = x / scale[along]
        for z in zero:
            q = q + z.astype(x.dtype)[along]
        inside = logical_and(q >= low - 0.5, q <= high + 0.5)
        return fake_quantized(x, scale, *zero), (inside, *([None] * len(zero)))

    def backward(residuals: Any, g: Array) -> Any:
        inside, *zero = residuals
        return (multiply(g, inside.astype(g.dtype)), None, *zero)

    return custom_vjp(fake_quantized).defvjp(forward, backward)
