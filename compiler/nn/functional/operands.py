"""What the functions of `dnnc.nn.functional` take: arrays of one float type, windows of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of
from dnnc.array.creation import asarray
from dnnc.array.elementwise import real_op
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.array.lazy import Lazy, Untracked, apply
from dnnc.array.promotion import DType, dtype_of, kind_of
from dnnc.array.sizes import plain
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import a_type
from dnnc.ir.ops import OPS

op = real_op
Ints = tuple[int, ...]


def array(what: str, name: str, x: Any, kinds: str = "f") -> Array:
    """An argument as an array. InputError where it is none, or not of such a kind of numbers."""
    if not isinstance(x, Array):
        if not isinstance(x, np.ndarray) and not hasattr(x, "__dlpack__"):
            raise TypeInputError(f"{what}: {name} must be an array, got {a_type(x)}; make one with dnnc.array.asarray")
        x = asarray(x)
    assert isinstance(x, Array)
    if kind_of(x.dtype) not in kinds:
        words = {"f": "float numbers", "iu": "integers", "b": "truth values", "fiu": "real numbers"}
        wanted = words.get(kinds, "real numbers or truth values")
        raise TypeInputError(f"{what}: {name} must hold {wanted}, got {x.dtype}; convert it with astype")
    return x


def arrays(what: str, kinds: str = "f", **given: Any) -> list[Any]:
    """Arguments as arrays of one type; None stays None. InputError where types differ."""
    quick, dtype = list(given.values()), None
    for x in quick:
        if x is not None:
            if type(x) is not Array or x._dtype.kind not in kinds or (dtype is not None and x._dtype is not dtype):
                break
            dtype = x._dtype
    else:
        return quick
    made = {name: None if x is None else array(what, name, x, kinds) for name, x in given.items()}
    types = {name: x.dtype for name, x in made.items() if x is not None}
    if len(set(types.values())) > 1:
        raise TypeInputError(
            f"{what}: expected arrays of one dtype, got {', '.join(f'{n} {d}' for n, d in types.items())}; convert "
            "them with astype, or a module with module.to(dtype)"
        )
    return list(made.values())


def rank_of(what: str, x: Array, *ranks: int, name: str = "input") -> int:
    """The number of axes. InputError unless it is one of `ranks`."""
    ndim = len(x._parts[0].type.shape)
    if ndim not in ranks:
        words = " or ".join(map(str, ranks))
        raise ValueInputError(f"{what}: {name} must have {words} axes, got shape {x.shape}")
    return ndim


def ints(what: str, name: str, value: Any, rank: int, low: int) -> Ints:
    """A number for each of `rank` axes. InputError where it is neither an integer nor so many, or below `low`."""
    if type(value) is int and value >= low:
        return (value,) * rank
    if type(value) is tuple and len(value) == rank:
        for v in value:
            if type(v) is not int or v < low:
                break
        else:
            return value
    given: tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
    given = given * rank if len(given) == 1 else given
    ok = all(hasattr(v, "__index__") and not isinstance(v, bool) and v.__index__() >= low for v in given)
    if len(given) != rank or not ok:
        raise ValueInputError(
            f"{what}: {name}={value!r}: expected an integer of at least {low}, or {rank} of them for {rank} axes"
        )
    return tuple(v.__index__() for v in given)


def choice(what: str, name: str, value: Any, *of: str) -> str:
    """One of some words. InputError for others."""
    if value not in of:
        raise ValueInputError(f"{what}: {name}={value!r}: expected {', '.join(map(repr, of))}")
    return str(value)


def written(x: Array, y: Array, inplace: bool) -> Array:
    """The result; in place the operand, which takes its value."""
    if not inplace:
        return y
    x._written(y._parts)
    return x


def detached(x: Array) -> Array:
    """The same numbers without a history: `backward` and gradients take them as constants."""
    made: list[Lazy] = []
    for p in x._parts:
        call = Untracked(OPS["stop_gradient"], (p,), {}, (p.type,))
        if call.traced:
            call.trace()
        made.append(Lazy(p.type, call))
    return Array(made, x.dtype)


def counted(n: Any) -> Array:
    """0, 1, ..., n - 1, which lives where it is used."""
    return array_of(apply("iota", shape=(plain(n),), axis=0))


def filled(shape: Sequence[Any], value: float, dtype: Any) -> Array:
    """An array of one number, which lives where it is used."""
    return array_of(apply("full", shape=tuple(map(plain, shape)), value=value, dtype=from_numpy(dtype_of(dtype))))


def typed(x: Array | None, dtype: DType) -> Array | None:
    """A parameter in the type of what it is applied to."""
    return x if x is None or x.dtype == dtype else x.astype(dtype)
