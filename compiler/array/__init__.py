"""`dnnc.array`: arrays that are computed when they are looked at, in the names of the Python array API standard.

    import dnnc.array as xp
    x = xp.asarray([1.0, 2.0, 3.0])
    y = xp.mean(xp.square(x - xp.mean(x)))      # nothing has run
    float(y)                                     # one program, kept for expressions of the same structure

What happens in between: `lazy.py` (values and programs), `expressions.py` (from a graph to a program in milliseconds).
"""
# ruff: noqa: F401, I001  (this file is the list of the public names, by the module that has them)

import math as _math

import numpy as _np

from dnnc.array import fft as fft
from dnnc.array import linalg as linalg
from dnnc.array.core import Array as Array
from dnnc.array.core import evaluate as evaluate
from dnnc.array.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from dnnc.array.errors import make_public, public
from dnnc.array.distribution import bincount, histogram, interp, median, percentile, quantile
from dnnc.array.einsum import einsum
from dnnc.array.elementwise import (
    abs, acos, acosh, add, angle, asin, asinh, astype, atan, atan2, atanh, bitwise_and, bitwise_invert,
    bitwise_left_shift, bitwise_or,
    bitwise_right_shift, bitwise_xor, ceil, clip, conj, copysign, cos, cosh, divide, equal, erf, exp, exp2, expm1,
    floor, floor_divide, greater,
    greater_equal, hypot, imag, isfinite, isinf, isnan, less, less_equal, log, log1p, log2, log10, logaddexp,
    logical_and, logical_not, logical_or,
    logical_xor, maximum, minimum, multiply, negative, nextafter, not_equal, positive, pow, real, reciprocal, remainder,
    round, sign, signbit, sin,
    sinh, sqrt, square, subtract, tan, tanh, trunc, where,
)  # fmt: skip
from dnnc.array.info import __array_namespace_info__, finfo, iinfo, isdtype
from dnnc.array.joining import (
    array_split, column_stack, concatenate, dsplit, dstack, hsplit, hstack, pad, split, vsplit, vstack,
)  # fmt: skip
from dnnc.array.linalg import matmul, tensordot, vecdot
from dnnc.array.manipulation import (
    broadcast_arrays, broadcast_shapes, broadcast_to, can_cast, concat, expand_dims, flip, matrix_transpose, moveaxis,
    permute_dims, repeat, reshape,
    result_type, roll, squeeze, stack, take, take_along_axis, tile, unstack,
)  # fmt: skip
from dnnc.array.promotion import BFLOAT16 as _BFLOAT16
from dnnc.array.numeric import (
    allclose, array, array_equal, average, cumprod, cumsum, diag, diagonal, dot, inner, isclose, logsumexp, nan_to_num,
    outer, ptp, ravel, swapaxes, trace, transpose, vdot,
)  # fmt: skip
from dnnc.array.methods import name_absent as _name_absent
from dnnc.array.methods import nearest as nearest
from dnnc.array.searching import (
    argmax,
    argmin,
    argsort,
    isin,
    nonzero,
    searchsorted,
    sort,
    top_k,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)
from dnnc.array.statistical import (
    all,
    any,
    count_nonzero,
    cumulative_prod,
    cumulative_sum,
    diff,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)

__array_api_version__ = "2025.12"

make_public(globals())
for _module in (fft, linalg):
    _module.__dict__.update(
        {_n: public(getattr(_module, _n)) for _n in _module.__all__ if callable(getattr(_module, _n))}
    )
del make_public, public

bool = _np.dtype("bool")
int8, int16, int32, int64 = (_np.dtype(f"int{n}") for n in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (_np.dtype(f"uint{n}") for n in (8, 16, 32, 64))
bfloat16 = _BFLOAT16
float16, float32, float64 = (_np.dtype(f"float{n}") for n in (16, 32, 64))
complex64, complex128 = _np.dtype("complex64"), _np.dtype("complex128")

e, inf, nan, pi = _math.e, _math.inf, _math.nan, _math.pi
newaxis = None


def __getattr__(name: str) -> object:
    raise AttributeError(f"dnnc.array has no {name!r}{nearest(name, __all__)}")


__all__ = [n for n in dir() if not n.startswith("_")] + ["__array_api_version__", "__array_namespace_info__"]

_name_absent(Array, [n for n in __all__ if callable(globals().get(n))])
