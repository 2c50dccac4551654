"""`dnnc.nn.init`: first values of parameters, written in place, as in PyTorch.

Each function takes the array to fill, gives it back, and draws by `key`, or by the default generator of `dnnc.random`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc import random
from dnnc.array.core import Array, from_buffer, moved
from dnnc.array.creation import eye, full
from dnnc.array.elementwise import add, less, multiply, where
from dnnc.array.linalg import diagonal, qr
from dnnc.array.manipulation import expand_dims, matrix_transpose, reshape
from dnnc.array.promotion import kind_of
from dnnc.array.searching import argsort
from dnnc.ir.errors import InputError, a_type


def _fill(tensor: Array, new: Array) -> Array:
    """Write new contents of the same shape, dtype and device."""
    made = moved(new.astype(tensor.dtype), tensor.device)
    tensor._written(made._parts)
    return tensor


def _checked(what: str, tensor: Any, axes: int = 0) -> Array:
    if not isinstance(tensor, Array) or kind_of(tensor.dtype) != "f":
        got = f"one of {tensor.dtype}" if isinstance(tensor, Array) else a_type(tensor)
        raise InputError(f"{what}: expected an array of float numbers, got {got}")
    if tensor.ndim < axes:
        raise InputError(f"{what}: expected at least {axes} axes, got shape {tensor.shape}")
    return tensor


def _drawn(tensor: Array) -> str:
    """The dtype of draws."""
    return "float64" if tensor.dtype.itemsize == 8 else "float32"


def uniform_(tensor: Array, a: float = 0.0, b: float = 1.0, *, key: Any = None) -> Array:
    """Numbers of [a, b)."""
    x = _checked("uniform_", tensor)
    return _fill(x, random.uniform(random.next_key(key, "uniform_"), x.shape, _drawn(x), float(a), float(b)))


def normal_(tensor: Array, mean: float = 0.0, std: float = 1.0, *, key: Any = None) -> Array:
    """Normal numbers."""
    x = _checked("normal_", tensor)
    drawn = random.normal(random.next_key(key, "normal_"), x.shape, _drawn(x))
    return _fill(x, add(multiply(drawn, float(std)), float(mean)))


def trunc_normal_(
    tensor: Array, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, *, key: Any = None
) -> Array:
    """Normal numbers of [a, b]."""
    x = _checked("trunc_normal_", tensor)
    low, high = (a - mean) / std, (b - mean) / std
    drawn = random.truncated_normal(random.next_key(key, "trunc_normal_"), low, high, x.shape, _drawn(x))
    return _fill(x, add(multiply(drawn, float(std)), float(mean)))


def constant_(tensor: Array, val: float) -> Array:
    """One number."""
    x = _checked("constant_", tensor)
    return _fill(x, from_buffer(np.full(x.shape, val, x.dtype)))


def zeros_(tensor: Array) -> Array:
    return constant_(tensor, 0.0)


def ones_(tensor: Array) -> Array:
    return constant_(tensor, 1.0)


def eye_(tensor: Array) -> Array:
    """The identity matrix."""
    x = _checked("eye_", tensor, 2)
    return _fill(x, eye(*x.shape, dtype=x.dtype))


def dirac_(tensor: Array, groups: int = 1) -> Array:
    """Filters [O, C, ...] that keep the channels of each group."""
    x = _checked("dirac_", tensor, 3)
    out, channels, *kernel = x.shape
    if out % groups:
        raise InputError(f"dirac_: {out} filters do not divide into {groups} groups")
    rows = reshape(eye(out // groups, channels, dtype=x.dtype), (1, out // groups, channels, *(1,) * len(kernel)))
    made = multiply(rows, full((groups, 1, 1, *kernel), 0.0, dtype=x.dtype))
    made[(slice(None), slice(None), slice(None), *(n // 2 for n in kernel))] = rows[(..., *(0 for _ in kernel))]
    return _fill(x, reshape(made, x.shape))


# --- by the number of connections -------------------------------------------------------------------------------------


def fans(tensor: Array) -> tuple[int, int]:
    """How many inputs an output reads, and outputs an input serves, of a weight [out, in, ...]."""
    x = _checked("fans", tensor, 2)
    field = math.prod(x.shape[2:])
    return x.shape[1] * field, x.shape[0] * field


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """How much an activation shrinks the deviation, inverted. InputError: an activation without one."""
    gains = {"tanh": 5 / 3, "relu": math.sqrt(2), "selu": 3 / 4, "sigmoid": 1.0, "linear": 1.0}
    gains.update({f"conv{'_transpose' if t else ''}{k}d": 1.0 for t in (0, 1) for k in (1, 2, 3)})
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in gains:
        raise InputError(f"calculate_gain: {nonlinearity!r}: expected {', '.join([*gains, 'leaky_relu'])}")
    return gains[nonlinearity]


def xavier_uniform_(tensor: Array, gain: float = 1.0, *, key: Any = None) -> Array:
    """Uniform numbers of deviation gain * sqrt(2 / (fan in + fan out)) (Glorot and Bengio, 2010)."""
    bound = gain * math.sqrt(6 / sum(fans(tensor)))
    return uniform_(tensor, -bound, bound, key=key)


def xavier_normal_(tensor: Array, gain: float = 1.0, *, key: Any = None) -> Array:
    """Normal numbers of deviation gain * sqrt(2 / (fan in + fan out))."""
    return normal_(tensor, 0.0, gain * math.sqrt(2 / sum(fans(tensor))), key=key)


def _kaiming(tensor: Array, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise InputError(f"mode={mode!r}: expected 'fan_in' or 'fan_out'")
    return calculate_gain(nonlinearity, a) / math.sqrt(fans(tensor)[mode == "fan_out"])


def kaiming_uniform_(
    tensor: Array, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", *, key: Any = None
) -> Array:
    """Uniform numbers of deviation gain / sqrt(fan) (He et al., 2015); `a` is the slope of `leaky_relu`."""
    bound = math.sqrt(3) * _kaiming(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, key=key)


def kaiming_normal_(
    tensor: Array, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", *, key: Any = None
) -> Array:
    """Normal numbers of deviation gain / sqrt(fan)."""
    return normal_(tensor, 0.0, _kaiming(tensor, a, mode, nonlinearity), key=key)


def orthogonal_(tensor: Array, gain: float = 1.0, *, key: Any = None) -> Array:
    """A (semi-)orthogonal matrix [first axis, others] times the gain (Saxe et al., 2013), by a QR decomposition."""
    x = _checked("orthogonal_", tensor, 2)
    rows, columns = x.shape[0], math.prod(x.shape[1:])
    flat = random.normal(random.next_key(key, "orthogonal_"), (max(rows, columns), min(rows, columns)), _drawn(x))
    q, r = qr(flat)
    q = multiply(q, expand_dims(where(less(diagonal(r), 0.0), -1.0, 1.0), axis=0))
    q = matrix_transpose(q) if rows < columns else q
    return _fill(x, reshape(multiply(q, float(gain)), x.shape))


def sparse_(tensor: Array, sparsity: float, std: float = 0.01, *, key: Any = None) -> Array:
    """Normal numbers of which each column has this share of zeros, at random places (Martens, 2010)."""
    x = _checked("sparse_", tensor, 2)
    first, second = random.split(random.next_key(key, "sparse_"))
    zeros = math.ceil(sparsity * x.shape[0])
    drawn = multiply(random.normal(first, x.shape, _drawn(x)), float(std))
    ranks = argsort(argsort(random.uniform(second, x.shape, "float64"), axis=0), axis=0)
    return _fill(x, where(less(ranks, zeros), 0.0, drawn))
