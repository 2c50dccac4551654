"""The methods of NumPy's ndarray on arrays, as far as they make sense for values that are lazy and have no views.

Each is a function of `dnnc.array` by another spelling. What arrays lack is named with the nearest thing there is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dnnc.array.core import Array
    from dnnc.array.selection import Flat

# What other libraries call it: names of PyTorch, Chainer, CuPy and NumPy, and what stands here for them.
SYNONYMS = {
    "absolute": "abs", "amax": "max", "amin": "min", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin",
    "arcsinh": "asinh", "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh", "as_tensor": "asarray",
    "asanyarray": "asarray", "ascontiguousarray": "asarray", "asnumpy": "numpy", "bitwise_not": "bitwise_invert",
    "bmm": "matmul", "byte": "astype", "cat": "concat", "chunk": "array_split", "clamp": "clip", "clone": "copy",
    "contiguous": "copy", "cpu": "to_device", "cuda": "to_device", "double": "astype", "expand": "broadcast_to",
    "expand_as": "broadcast_to", "fabs": "abs", "flatnonzero": "nonzero", "float": "astype", "gather":
    "take_along_axis", "get": "numpy", "half": "astype", "index_select": "take", "int": "astype", "invert":
    "bitwise_invert", "left_shift": "bitwise_left_shift", "long": "astype", "masked_fill": "where", "mm": "matmul",
    "mod": "remainder", "movedim": "moveaxis", "mul": "multiply", "neg": "negative", "numel": "size", "permute":
    "permute_dims", "power": "pow", "requires_grad_": "requires_grad", "right_shift": "bitwise_right_shift", "rint":
    "round", "sub": "subtract", "t": "T", "tensor": "asarray", "to": "astype", "topk": "top_k", "true_divide": "divide",
    "type": "dtype", "unbind": "unstack", "unsqueeze": "expand_dims", "view": "reshape",
    "view_as": "reshape",
}  # fmt: skip


@cache
def function(name: str) -> Any:
    """A function of the namespace."""
    return getattr(import_module("dnnc.array"), name)


@cache
def selection() -> Any:
    return import_module("dnnc.array.selection")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; the nearest is clip`, or nothing where no name is near."""
    names = {n for n in known if not n.startswith("_")}
    same = SYNONYMS.get(name) or next((n for n in names if n.lower() == name.lower()), None)
    close = [same] if same in names else difflib.get_close_matches(name, names, 1, 0.6)
    return f"; the nearest is {close[0]}" if close else ""


def no_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error of a name that a module does not have."""
    return AttributeError(f"{module} has no {name!r}{nearest(name, known)}")


class Absent:
    """A name that other libraries' arrays have. No `__getattr__`: NumPy asks for two attributes in each conversion."""

    def __init__(self, near: str) -> None:
        self.near = near

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, array: Any, owner: type) -> Any:
        raise AttributeError(f"Array has no attribute {self.name!r}; the nearest is {self.near}")


def name_absent(array: type, functions: Iterable[str]) -> None:
    """Let the names of functions, and those of SYNONYMS, that an array class lacks name the nearest thing there is."""
    names = {n: f"dnnc.array.{n}" for n in functions}
    names.update((n, near if hasattr(array, near) else f"dnnc.array.{near}") for n, near in SYNONYMS.items())
    for name, near in names.items():
        if not hasattr(array, name):
            absent = Absent(near)
            setattr(array, name, absent)
            absent.__set_name__(array, name)


class Reduction(Protocol):
    """A method, for type checkers."""

    def __call__(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Array: ...


def _reduction(name: str) -> Reduction:
    def method(self: Any, axis: Any = None, *, keepdims: bool = False) -> Array:
        return function(name)(self, axis=axis, keepdims=keepdims)  # type: ignore[no-any-return]

    method.__name__ = name
    method.__qualname__ = f"Methods.{name}"
    method.__doc__ = f"`dnnc.array.{name}` of this array."
    return method  # type: ignore[return-value]


class Methods:
    """What `Array` inherits."""

    __slots__ = ()

    # --- reductions ---------------------------------------------------------------------------------------------------

    def sum(self, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
        return function("sum")(self, axis=axis, dtype=dtype, keepdims=keepdims)  # type: ignore[no-any-return]

    def prod(self, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
        return function("prod")(self, axis=axis, dtype=dtype, keepdims=keepdims)  # type: ignore[no-any-return]

    def mean(self, axis: Any = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
        x = self if dtype is None else function("astype")(self, dtype)
        return function("mean")(x, axis=axis, keepdims=keepdims)  # type: ignore[no-any-return]

    def var(self, axis: Any = None, *, ddof: float = 0, keepdims: bool = False) -> Array:
        """`ddof`: what is taken off the number of elements before dividing by it."""
        return function("var")(self, axis=axis, correction=ddof, keepdims=keepdims)  # type: ignore[no-any-return]

    def std(self, axis: Any = None, *, ddof: float = 0, keepdims: bool = False) -> Array:
        return function("std")(self, axis=axis, correction=ddof, keepdims=keepdims)  # type: ignore[no-any-return]

    def cumsum(self, axis: int | None = None, dtype: Any = None) -> Array:
        return function("cumsum")(self, axis, dtype)  # type: ignore[no-any-return]

    def cumprod(self, axis: int | None = None, dtype: Any = None) -> Array:
        return function("cumprod")(self, axis, dtype)  # type: ignore[no-any-return]

    max, min, ptp = _reduction("max"), _reduction("min"), _reduction("ptp")
    all, any = _reduction("all"), _reduction("any")
    argmax, argmin = _reduction("argmax"), _reduction("argmin")

    # --- elements -----------------------------------------------------------------------------------------------------

    def clip(self, min: Any = None, max: Any = None) -> Array:
        return function("clip")(self, min, max)  # type: ignore[no-any-return]

    def round(self, decimals: int = 0) -> Array:
        return function("round")(self, decimals)  # type: ignore[no-any-return]

    def conj(self) -> Array:
        return function("conj")(self)  # type: ignore[no-any-return]

    conjugate = conj

    def dot(self, other: Any) -> Array:
        return function("dot")(self, other)  # type: ignore[no-any-return]

    def copy(self) -> Array:
        """An array of its own: writing to one leaves the other as it is. The history goes on."""
        return function("positive")(self)  # type: ignore[no-any-return]

    def fill(self, value: Any) -> None:
        """Set all elements to a number."""
        self[...] = value  # type: ignore[index]

    def sort(self, axis: int = -1) -> None:
        """Sort in place, as NumPy does; `dnnc.array.sort` gives a new array."""
        self[...] = function("sort")(self, axis=axis)  # type: ignore[index]

    def argsort(self, axis: int = -1) -> Array:
        return function("argsort")(self, axis=axis)  # type: ignore[no-any-return]

    def nonzero(self) -> tuple[Array, ...]:
        return function("nonzero")(self)  # type: ignore[no-any-return]

    def searchsorted(self, v: Any, side: str = "left", sorter: Any = None) -> Array:
        return function("searchsorted")(self, v, side=side, sorter=sorter)  # type: ignore[no-any-return]

    def partition(self, kth: Any, axis: int = -1) -> None:
        """Sort in place, which is a partition; `dnnc.array.partition` gives a new array."""
        self[...] = function("partition")(self, kth, axis=axis)  # type: ignore[index]

    def argpartition(self, kth: Any, axis: int | None = -1) -> Array:
        return function("argpartition")(self, kth, axis=axis)  # type: ignore[no-any-return]

    def choose(self, choices: Any, mode: str = "raise") -> Array:
        return function("choose")(self, choices, mode=mode)  # type: ignore[no-any-return]

    def compress(self, condition: Any, axis: int | None = None) -> Array:
        return function("compress")(condition, self, axis=axis)  # type: ignore[no-any-return]

    def put(self, indices: Any, values: Any, mode: str = "raise") -> None:
        """Write values at places of all elements in order."""
        function("put")(self, indices, values, mode=mode)

    def __contains__(self, value: Any) -> bool:
        return selection().contains(self, value)  # type: ignore[no-any-return]

    # --- views --------------------------------------------------------------------------------------------------------

    @property
    def flat(self) -> Flat:
        """All elements in order, to be read, written and walked through."""
        return selection().Flat(self)  # type: ignore[no-any-return]

    @flat.setter
    def flat(self, value: Any) -> None:
        selection().Flat(self)[:] = value

    def view(self, dtype: Any = None) -> Array:
        """The bytes as elements of another dtype of the same size. It is a new array, as all results are."""
        return self.copy() if dtype is None else selection().view(self, dtype)

    # --- axes ---------------------------------------------------------------------------------------------------------

    def ravel(self) -> Array:
        return function("ravel")(self)  # type: ignore[no-any-return]

    flatten = ravel

    def transpose(self, *axes: Any) -> Array:
        """The axes in another order, given as a tuple or one by one; without any in reverse."""
        given = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes or None
        return function("transpose")(self, given)  # type: ignore[no-any-return]

    def swapaxes(self, axis1: int, axis2: int) -> Array:
        return function("swapaxes")(self, axis1, axis2)  # type: ignore[no-any-return]

    def squeeze(self, axis: Any = None) -> Array:
        return function("squeeze")(self, axis)  # type: ignore[no-any-return]

    def repeat(self, repeats: Any, axis: int | None = None) -> Array:
        return function("repeat")(self, repeats, axis=axis)  # type: ignore[no-any-return]

    def take(self, indices: Any, axis: int | None = None) -> Array:
        """Without an axis, of all elements in order."""
        x = function("ravel")(self) if axis is None else self
        return function("take")(x, function("asarray")(indices), axis=axis or 0)  # type: ignore[no-any-return]

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
        return function("diagonal")(self, offset, axis1, axis2)  # type: ignore[no-any-return]

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
        return function("trace")(self, offset, axis1, axis2)  # type: ignore[no-any-return]

    # --- habits of other libraries ------------------------------------------------------------------------------------

    def detach(self) -> Array:
        """The same values without their history: gradients end there."""
        return import_module("dnnc.frontends.trace.custom_rules").stop_gradient(self)  # type: ignore[no-any-return]
