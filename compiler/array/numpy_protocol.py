"""NumPy's functions on arrays: `np.exp(x)`, `np.concatenate([x, y])` and their like run as `dnnc.array`'s of that name.

NumPy asks arrays that are not its own by `__array_ufunc__` (NEP 13) and `__array_function__` (NEP 18). A function that
`dnnc.array` lacks is an error that names the nearest one: nothing is copied to the host unasked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from dnnc.array.errors import TypeInputError
from dnnc.array.methods import SYNONYMS, nearest

REDUCED = {
    "add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "logical_and": "all", "logical_or": "any",
}  # fmt: skip
ACCUMULATED = {"add": "cumsum", "multiply": "cumprod"}
# NumPy's names of arguments, where ours differ
ARGUMENTS = {"ddof": "correction", "a_min": "min", "a_max": "max", "newshape": "shape", "x1": "x", "arr": "x"}
# Arguments that say how, not what: NumPy's own default or not, the result is the same.
IGNORED = ("order", "casting", "kind", "subok", "out", "copy")


def ufunc(fn: np.ufunc, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a universal function. TypeInputError where there is none of its name, method or arguments."""
    named = dict(kwargs)
    out = named.pop("out", (None,))
    dtype = named.pop("dtype", None)
    if method == "__call__":
        made = _called(fn.__name__, named)(*inputs)
    elif method == "reduce" and fn.__name__ in REDUCED:
        named.setdefault("axis", 0)
        made = _known(REDUCED[fn.__name__], f"{fn.__name__}.reduce")(*inputs, **named)
    elif method == "accumulate" and fn.__name__ in ACCUMULATED:
        made = _known(ACCUMULATED[fn.__name__], f"{fn.__name__}.accumulate")(*inputs, **{"axis": 0, **named})
    elif method == "outer" and len(inputs) == 2:
        xp = import_module("dnnc.array")
        a, b = map(xp.asarray, inputs)
        made = _called(fn.__name__, named)(a.reshape(a.shape + (1,) * b.ndim), b)
    else:
        raise TypeInputError(f"numpy.{fn.__name__}.{method} does not take dnnc arrays; use functions of dnnc.array")
    if dtype is not None:
        made = made.astype(dtype)
    (into,) = out if len(out) == 1 else (None,)
    return made if into is None else _written(into, made, fn.__name__)


def _called(name: str, named: Mapping[str, Any]) -> Callable[..., Any]:
    if named:
        raise TypeInputError(f"numpy.{name} of dnnc arrays takes no {', '.join(named)}=")
    return _known(name, name)


def _written(into: Any, made: Any, name: str) -> Any:
    """`out=`: an array of ours takes the values."""
    if not isinstance(into, import_module("dnnc.array").Array):
        raise TypeInputError(f"numpy.{name}: out= is a NumPy array; a dnnc array becomes one by x.numpy()")
    into[...] = made
    return into


def function(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of another function of NumPy, by our own of its name."""
    name = fn.__name__
    if name in _PLAIN:
        return _PLAIN[name](*args)
    if fn is np.where and len(args) == 1:
        name = "nonzero"
    title = f"{fn.__module__.removeprefix('numpy').lstrip('.')}.{name}".lstrip(".")
    own = _known(name, title, fn.__module__.removeprefix("numpy").lstrip("."))
    given = [_operand(a) for a in args]
    named = {k: _operand(v) for k, v in kwargs.items()}
    order = _order(fn)
    if order is None:
        return own(*given, **named)
    bound = order.bind(*given, **named)
    positions, names = _parameters(own)
    first, rest = [], {}
    for k, (argument, value) in enumerate(bound.arguments.items()):
        if order.parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL:
            first += value
        elif k < positions:
            first.append(value)
        elif order.parameters[argument].kind is inspect.Parameter.VAR_KEYWORD:
            rest.update(value)
        else:
            rest[ARGUMENTS.get(argument, argument)] = value
    for argument in [a for a in rest if a not in names]:
        value = rest.pop(argument)
        default = order.parameters[argument].default if argument in order.parameters else None
        if argument not in IGNORED and value is not default and value is not np._NoValue and value is not None:
            raise TypeInputError(f"numpy.{title} of dnnc arrays takes no {argument}=; it takes {', '.join(names)}")
        if argument == "out" and value is not None:
            return _written(value, own(*first, **rest), title)
    return own(*first, **{k: v for k, v in rest.items() if v is not np._NoValue})


def _operand(a: Any) -> Any:
    """NumPy arrays as ours, also within sequences."""
    if isinstance(a, np.ndarray):
        return import_module("dnnc.array").asarray(a)
    if isinstance(a, (list, tuple)) and any(isinstance(x, np.ndarray) for x in a):
        return type(a)(map(_operand, a))
    return a


@cache
def _order(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The arguments of a function of NumPy; None where it does not say."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


@cache
def _parameters(own: Callable[..., Any]) -> tuple[int, list[str]]:
    """How many arguments are taken by position alone, and the names of the others."""
    parameters = inspect.signature(own).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY,)
    count = sum(p.kind in positional for p in parameters)
    if count:
        return count, [p.name for p in parameters if p.kind not in positional]
    return 1, [p.name for p in parameters][1:]


@cache
def _known(name: str, title: str, module: str = "") -> Callable[..., Any]:
    """Our function of a name of NumPy's."""
    xp = import_module("dnnc.array")
    space = getattr(xp, module, None) if module else xp
    names = xp.__all__ if not module else getattr(space, "__all__", ())
    for n in (name, SYNONYMS.get(name, name)):
        if n in names and callable(found := getattr(space, n)):
            return found  # type: ignore[no-any-return]
    raise TypeInputError(
        f"dnnc.array has no counterpart of numpy.{title}{nearest(name, names)}; x.numpy() gives a NumPy array"
    )


_PLAIN: dict[str, Callable[..., Any]] = {
    "shape": lambda x: x.shape,
    "ndim": lambda x: x.ndim,
    "size": lambda x: x.size,
    "copy": lambda x: x.copy(),
}
