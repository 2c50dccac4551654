"""`dnnc.array`: arrays that are computed when they are looked at, in the names of the Python array API standard.

    import dnnc.array as xp
    x = xp.asarray([1.0, 2.0, 3.0])
    y = xp.mean(xp.square(x - xp.mean(x)))      # nothing has run
    float(y)                                     # one program, kept for expressions of the same structure

What happens in between: `lazy.py` (values and programs), `expressions.py` (from a graph to a program in milliseconds).
"""
# ruff: noqa: I001  (this file is the list of the public names, by the module that has them)

import math as _math

import numpy as _np

from dnnc.array import fft as fft
from dnnc.array import linalg as linalg
from dnnc.array.bits import (
    bitwise_and as bitwise_and,
    bitwise_invert as bitwise_invert,
    bitwise_left_shift as bitwise_left_shift,
    bitwise_or as bitwise_or,
    bitwise_right_shift as bitwise_right_shift,
    bitwise_xor as bitwise_xor,
)
from dnnc.array.core import Array as Array
from dnnc.array.core import evaluate as evaluate
from dnnc.array.creation import (
    arange as arange,
    asarray as asarray,
    empty as empty,
    empty_like as empty_like,
    eye as eye,
    from_dlpack as from_dlpack,
    full as full,
    full_like as full_like,
    linspace as linspace,
    meshgrid as meshgrid,
    ones as ones,
    ones_like as ones_like,
    tril as tril,
    triu as triu,
    zeros as zeros,
    zeros_like as zeros_like,
)
from dnnc.array.errors import make_public as make_public, public as public
from dnnc.array.distribution import (
    bincount as bincount,
    histogram as histogram,
    interp as interp,
    median as median,
    percentile as percentile,
    quantile as quantile,
)
from dnnc.array.einsum import einsum as einsum
from dnnc.array.elementwise import (
    abs as abs,
    acos as acos,
    acosh as acosh,
    add as add,
    angle as angle,
    asin as asin,
    asinh as asinh,
    astype as astype,
    atan as atan,
    atan2 as atan2,
    atanh as atanh,
    ceil as ceil,
    clip as clip,
    conj as conj,
    copysign as copysign,
    cos as cos,
    cosh as cosh,
    divide as divide,
    equal as equal,
    erf as erf,
    exp as exp,
    exp2 as exp2,
    expm1 as expm1,
    floor as floor,
    floor_divide as floor_divide,
    greater as greater,
    greater_equal as greater_equal,
    hypot as hypot,
    imag as imag,
    isfinite as isfinite,
    isinf as isinf,
    isnan as isnan,
    less as less,
    less_equal as less_equal,
    log as log,
    log1p as log1p,
    log2 as log2,
    log10 as log10,
    logaddexp as logaddexp,
    logical_and as logical_and,
    logical_not as logical_not,
    logical_or as logical_or,
    logical_xor as logical_xor,
    maximum as maximum,
    minimum as minimum,
    multiply as multiply,
    negative as negative,
    nextafter as nextafter,
    not_equal as not_equal,
    positive as positive,
    pow as pow,
    real as real,
    reciprocal as reciprocal,
    remainder as remainder,
    round as round,
    sign as sign,
    signbit as signbit,
    sin as sin,
    sinh as sinh,
    sqrt as sqrt,
    square as square,
    subtract as subtract,
    tan as tan,
    tanh as tanh,
    trunc as trunc,
    where as where,
)
from dnnc.array.info import __array_namespace_info__
from dnnc.array.info import finfo as finfo
from dnnc.array.info import iinfo as iinfo
from dnnc.array.info import isdtype as isdtype
from dnnc.array.joining import (
    array_split as array_split,
    column_stack as column_stack,
    concatenate as concatenate,
    dsplit as dsplit,
    dstack as dstack,
    hsplit as hsplit,
    hstack as hstack,
    pad as pad,
    split as split,
    vsplit as vsplit,
    vstack as vstack,
)
from dnnc.array.linalg import matmul as matmul, tensordot as tensordot, vecdot as vecdot
from dnnc.array.manipulation import (
    broadcast_arrays as broadcast_arrays,
    broadcast_shapes as broadcast_shapes,
    broadcast_to as broadcast_to,
    can_cast as can_cast,
    concat as concat,
    expand_dims as expand_dims,
    flip as flip,
    matrix_transpose as matrix_transpose,
    moveaxis as moveaxis,
    permute_dims as permute_dims,
    repeat as repeat,
    reshape as reshape,
    result_type as result_type,
    roll as roll,
    squeeze as squeeze,
    stack as stack,
    take as take,
    take_along_axis as take_along_axis,
    tile as tile,
    unstack as unstack,
)
from dnnc.array.promotion import BFLOAT16 as _BFLOAT16
from dnnc.array.numeric import (
    allclose as allclose,
    array as array,
    array_equal as array_equal,
    average as average,
    cross as cross,
    cumprod as cumprod,
    cumsum as cumsum,
    diag as diag,
    diagonal as diagonal,
    dot as dot,
    gradient as gradient,
    inner as inner,
    isclose as isclose,
    kron as kron,
    logsumexp as logsumexp,
    nan_to_num as nan_to_num,
    outer as outer,
    ptp as ptp,
    ravel as ravel,
    swapaxes as swapaxes,
    trace as trace,
    transpose as transpose,
    vdot as vdot,
)
from dnnc.array.methods import name_absent as _name_absent
from dnnc.array.methods import no_name as _no_name
from dnnc.array.nans import (
    nanargmax as nanargmax,
    nanargmin as nanargmin,
    nanmax as nanmax,
    nanmean as nanmean,
    nanmin as nanmin,
    nanprod as nanprod,
    nanstd as nanstd,
    nansum as nansum,
    nanvar as nanvar,
)
from dnnc.array.searching import (
    argmax as argmax,
    argmin as argmin,
    argsort as argsort,
    isin as isin,
    nonzero as nonzero,
    searchsorted as searchsorted,
    sort as sort,
    top_k as top_k,
    unique as unique,
    unique_all as unique_all,
    unique_counts as unique_counts,
    unique_inverse as unique_inverse,
    unique_values as unique_values,
)
from dnnc.array.selection import (
    argpartition as argpartition,
    choose as choose,
    compress as compress,
    divmod as divmod,
    extract as extract,
    partition as partition,
    put as put,
)
from dnnc.array.statistical import (
    all as all,
    any as any,
    count_nonzero as count_nonzero,
    cumulative_prod as cumulative_prod,
    cumulative_sum as cumulative_sum,
    diff as diff,
    max as max,
    mean as mean,
    min as min,
    prod as prod,
    std as std,
    sum as sum,
    var as var,
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
    raise _no_name("dnnc.array", name, __all__)


__all__ = [n for n in dir() if not n.startswith("_")] + ["__array_api_version__", "__array_namespace_info__"]

_name_absent(Array, [n for n in __all__ if callable(globals().get(n))])
