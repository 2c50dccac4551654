"""Arrays from data, and from nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.array.core import (
    Array,
    array_of,
    as_operand,
    cast,
    from_buffer,
    from_data,
    moved,
    placed,
    scalar,
    wrapped,
)
from dnnc.array.devices import HOST, device_name, home, imported
from dnnc.array.elementwise import add, multiply
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import apply
from dnnc.array.operators import NUMBERS
from dnnc.array.promotion import DEFAULTS, DType, dtype_of, promoted, real_of
from dnnc.array.sizes import size, symbolic
from dnnc.backends.runtime.arrays import is_device_array
from dnnc.ir.dtype import from_numpy, i64
from dnnc.ir.errors import a_type

Shape = Any  # an integer or a sequence of them


def shape_of(shape: Shape) -> tuple[int, ...]:
    """A shape as a tuple of integers."""
    given = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    made = tuple(map(size, given))
    if any(type(d) is int and d < 0 for d in made):
        raise ValueInputError(f"shape={shape!r}: sizes are not negative")
    return made


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Array:
    """An array of a number, of nested sequences of numbers, or of an array of any library.

    Args:
        obj: what to take.
        dtype: of the result; by default that of `obj`, of Python numbers the default of their kind.
        device: "cpu", "cuda:0" and the like; by default that of `obj` where it is an array, else the host.
        copy: False shares the memory of `obj` (do not write to it while the result is in use), and raises ValueError if
            that is impossible. Otherwise the contents are copied, since evaluation comes later.
    """
    wanted = None if dtype is None else dtype_of(dtype)
    if isinstance(obj, Array):
        return _again(obj, wanted, device, copy)
    if isinstance(obj, (list, tuple)) and _has_arrays(obj):
        if copy is False:
            raise ValueInputError("asarray: arrays in a sequence cannot become one array without a copy")
        return _again(_stacked(obj), wanted, device, None)
    if _lies_on_device(obj):
        return _again(_shared(obj, copy is not False), wanted, device, False if copy is False else None)
    a, where = _taken(obj, wanted), home(device)
    if copy is False and (
        not isinstance(obj, np.ndarray)
        or (a.base is not obj and a is not obj)
        or not a.flags.c_contiguous
        or where not in (None, HOST)
    ):
        raise ValueInputError(f"{a_type(obj)} cannot become an array on {where or HOST} without a copy")
    shared = (a is obj or a.base is not None) and not isinstance(obj, (list, tuple, *NUMBERS))
    return from_buffer(a.copy() if shared and copy is not False and where in (None, HOST) else a, where)


def _again(x: Array, dtype: DType | None, device: Any, copy: bool | None) -> Array:
    """An array as one of a type on a device, by default its own."""
    dtype, device = dtype or x.dtype, x.device if device is None else device_name(device)
    if copy is False and (dtype != x.dtype or device != x.device):
        raise ValueInputError(
            f"an array of {x.dtype} on {x.device} cannot be one of {dtype} on {device} without a copy"
        )
    y = cast(moved(x, device), dtype)
    return array_of(*x._parts) if y is x and copy else y


def _lies_on_device(obj: Any) -> bool:
    """Is it an array of another library on a CUDA device?"""
    if isinstance(obj, (np.ndarray, np.generic, list, tuple, *NUMBERS)):
        return False

    return is_device_array(obj)


def _shared(obj: Any, copy: bool) -> Array:
    """An array with the elements of another library's array on a device."""
    data = imported(obj)
    data = data.place.copied(data) if copy else data
    dtype = dtype_of(data.dtype)
    return from_data(data.viewed((*data.shape, 2), real_of(dtype)) if dtype.kind == "c" else data, dtype)


def _taken(obj: Any, dtype: DType | None) -> np.ndarray[Any, Any]:
    if not isinstance(obj, (np.ndarray, np.generic, list, tuple, *NUMBERS)) and hasattr(obj, "__dlpack__"):
        obj = np.from_dlpack(obj)
    if isinstance(obj, int) and dtype is not None:
        wrapped(obj, dtype)
    if isinstance(obj, int) and dtype is None and not -(1 << 63) <= obj < 1 << 63:
        raise ValueInputError(f"{obj} is no int64: give a dtype")
    try:
        a = np.asarray(obj)
    except (TypeError, ValueError) as e:
        raise ValueInputError(
            f"{a_type(obj)} cannot become an array: {e}; nested sequences must have equal lengths and hold numbers"
        ) from None
    dtype_of(a.dtype)
    return a if dtype is None else a.astype(dtype, copy=False)


def _has_arrays(obj: Any) -> bool:
    return isinstance(obj, Array) or (isinstance(obj, (list, tuple)) and any(map(_has_arrays, obj)))


def _stacked(obj: Any) -> Array:
    """Nested sequences of arrays and numbers as one lazy array, whose parts keep their histories."""
    flat: list[Any] = []
    shape = _gathered(obj, flat)
    dtype = promoted(*(x.dtype if isinstance(x, Array) else x for x in flat))
    made = [cast(x, dtype) if isinstance(x, Array) else scalar(x, dtype) for x in flat]
    own = made[0].shape
    if any(x.shape != own for x in made):
        raise ValueInputError(f"asarray: arrays of shapes {', '.join(str(x.shape) for x in made)} do not stack")
    parts = []
    for ps in zip(*(x._parts for x in made)):
        rows = [apply("reshape", p, shape=(1, *own)) for p in ps]
        whole = apply("concat", *rows, axis=0) if len(rows) > 1 else rows[0]
        parts.append(apply("reshape", whole, shape=(*shape, *own)))
    return array_of(*parts)


def _gathered(obj: Any, flat: list[Any]) -> tuple[int, ...]:
    """The arrays and numbers of nested sequences, in order; the shape of the sequences."""
    if not isinstance(obj, (list, tuple)):
        x = as_operand(obj)
        if not isinstance(x, (Array, *NUMBERS)):
            raise ValueInputError(f"asarray: expected arrays and numbers in a sequence, got {a_type(x)}")
        flat.append(x)
        return ()
    shapes = [_gathered(x, flat) for x in obj]
    if len(set(shapes)) != 1:
        raise ValueInputError("asarray: nested sequences must have equal lengths, and hold elements")
    return (len(obj), *shapes[0])


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """Import an array by DLPack, without a copy unless `copy` asks for one or `device` is another device."""
    if isinstance(x, Array):
        return _again(x, None, device, copy)
    if _lies_on_device(x):
        return _again(_shared(x, bool(copy)), None, device, False if copy is False else None)
    a = np.from_dlpack(x)
    return _again(from_buffer(a.copy() if copy else a), None, device, False if copy is False else None)


def borrowed(x: Any) -> Array:
    """Borrow a foreign array while nobody writes to it: device elements are shared, others go through asarray."""
    return from_dlpack(x) if _lies_on_device(x) else asarray(x)


# --- from nothing -----------------------------------------------------------------------------------------------------


def full(shape: Shape, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of a shape that is filled with one value."""
    wanted = (
        dtype_of(dtype)
        if dtype is not None
        else promoted(fill_value.dtype if isinstance(fill_value, Array) else fill_value)
    )
    if isinstance(fill_value, Array):
        number = cast(fill_value if device is None else moved(fill_value, device_name(device)), wanted)
        return array_of(*(apply("expand", p, shape=shape_of(shape)) for p in number._parts))
    return placed(
        array_of(*(apply("expand", p, shape=shape_of(shape)) for p in scalar(fill_value, wanted)._parts)), home(device)
    )


def zeros(shape: Shape, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of zeros."""
    return full(shape, 0, dtype=DEFAULTS["f"] if dtype is None else dtype, device=device)


def ones(shape: Shape, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of ones."""
    return full(shape, 1, dtype=DEFAULTS["f"] if dtype is None else dtype, device=device)


def empty(shape: Shape, *, dtype: Any = None, device: Any = None) -> Array:
    """Zeros: memory is taken when the array is computed."""
    return zeros(shape, dtype=dtype, device=device)


def full_like(x: Array, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of the shape of x that is filled with one value."""
    return full(
        x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=x.device if device is None else device
    )


def zeros_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of zeros of the shape and dtype of x."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of ones of the shape and dtype of x."""
    return full_like(x, 1, dtype=dtype, device=device)


def empty_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of the shape and dtype of x; its elements are zero."""
    return zeros_like(x, dtype=dtype, device=device)


def _line(n: int) -> Array:
    """0, 1, ..., n - 1"""
    return array_of(apply("iota", shape=(n,), axis=0, dtype=i64))


def arange(start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None) -> Array:
    """Values from start to stop, stop excluded, in steps of step."""
    where = home(device)
    if stop is None:
        start, stop = 0, start
    wanted = promoted(start, stop, step) if dtype is None else dtype_of(dtype)
    if symbolic(start, stop, step):
        return placed(_open_range(start, stop, step, wanted), where)
    n = max(math.ceil((stop - start) / step), 0)
    if wanted.kind in "iu" and all(isinstance(v, int) for v in (start, stop, step)):
        n = len(range(start, stop, step))
        if wanted.kind == "i" and (not n or -(1 << 63) <= start + n * step < 1 << 63):
            return placed(cast(add(multiply(_line(n), step), start), wanted), where)
        return from_buffer(np.array([start + k * step for k in range(n)], wanted), where)
    return placed(cast(add(multiply(cast(_line(n), DEFAULTS["f"]), step), start), wanted), where)


def _open_range(start: Any, stop: Any, step: Any, dtype: DType) -> Array:
    """Return a range whose ends are unknown sizes; it is assumed to hold one element for each step."""
    if not all(isinstance(v, int) or symbolic(v) for v in (start, stop)) or type(step) is not int or not step:
        raise ValueInputError(
            f"arange({start}, {stop}, {step}): expected sizes, and a step that is an integer, where one of them is not "
            "known"
        )
    n = (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step
    if n < 0:
        raise ValueInputError(f"arange({start}, {stop}, {step}): {n} elements")
    return cast(add(multiply(_line(n), step), start), dtype)


def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True
) -> Array:
    """num evenly spaced values from start to stop."""
    wanted = promoted(start, stop, 0.0) if dtype is None else dtype_of(dtype)
    inner = promoted(start, stop, 0.0)
    steps = max(num - 1 if endpoint else num, 1)
    t = multiply(cast(_line(num), real_of(inner)), (stop - start) / steps)
    line = cast(add(t, start), inner)
    if endpoint and num > 1:  # the last one is `stop` itself
        last = array_of(apply("equal", _line(num)._parts[0], apply("full", shape=(), value=num - 1, dtype=i64)))
        end = scalar(stop, inner)
        line = array_of(*(apply("where", last._parts[0], q, p) for p, q in zip(line._parts, end._parts)))
    return placed(cast(line, wanted), home(device))


def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Array:
    """A matrix with ones on its k-th diagonal and zeros elsewhere."""
    wanted = DEFAULTS["f"] if dtype is None else dtype_of(dtype)
    columns = n_rows if n_cols is None else n_cols
    if not symbolic(n_rows, columns):
        k = max(min(k, columns), -n_rows)
    return placed(
        cast(array_of(apply("eye", rows=n_rows, columns=columns, k=k, dtype=from_numpy(real_of(wanted)))), wanted),
        home(device),
    )


def tril(x: Array, /, k: int = 0) -> Array:
    """Lower triangle of matrices: elements above the k-th diagonal become zero."""
    return _triangle(x, k, False)


def triu(x: Array, /, k: int = 0) -> Array:
    """Upper triangle of matrices: elements below the k-th diagonal become zero."""
    return _triangle(x, k, True)


def _triangle(x: Array, k: int, upper: bool) -> Array:
    if not symbolic(*x.shape[-2:]):
        k = max(min(k, x.shape[-1]), -x.shape[-2])
    return array_of(*(apply("trilu", p, k=k, upper=upper) for p in x._parts))


def meshgrid(*arrays: Array, indexing: str = "xy") -> tuple[Array, ...]:
    """Coordinate arrays from coordinate vectors."""
    if indexing not in ("xy", "ij"):
        raise ValueInputError(f"indexing={indexing!r}: expected 'xy' or 'ij'")
    order = list(range(len(arrays)))
    if indexing == "xy" and len(arrays) > 1:
        order[:2] = [1, 0]
    shape = tuple(arrays[k].size for k in order)
    return tuple(_spread(a, order.index(k), shape) for k, a in enumerate(arrays))


def _spread(a: Array, axis: int, shape: Sequence[int]) -> Array:
    own = tuple(a.size if k == axis else 1 for k in range(len(shape)))
    return array_of(*(apply("expand", apply("reshape", p, shape=own), shape=tuple(shape)) for p in a._parts))
