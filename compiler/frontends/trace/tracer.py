"""From a function of array code to a graph: it runs once, with placeholders for its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dnnc.array.core import Array, array_of, from_buffer, joined, taken_apart
from dnnc.array.creation import borrowed
from dnnc.array.devices import neutral
from dnnc.array.lazy import Lazy, placeholder
from dnnc.array.lines import raised_at
from dnnc.array.promotion import DType, real_of
from dnnc.frontends.trace.regions import Region
from dnnc.frontends.trace.spec import Spec
from dnnc.ir.checks import function
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import DnncError, InputError
from dnnc.ir.graph import Graph
from dnnc.ir.types import TensorType
from dnnc.pytree import Leaf, Rules, Tree, flatten, unflatten

_TRACING: ContextVar[bool] = ContextVar("dnnc_tracing", default=False)


class Keys(Protocol):
    """Where draws without a key take keys from, in turn; see `dnnc.random`."""

    def next(self) -> Array: ...

    def each(self, number: Array) -> Keys:
        """Those within the body of a loop: others in each iteration. `number`: int64[], the iteration."""
        ...


KEYS: ContextVar[Keys | None] = ContextVar("dnnc_keys", default=None)


@contextmanager
def keys_of_iteration(number: Lazy) -> Iterator[None]:
    """Within it, a body of a loop is traced whose iteration is `number`."""
    around = KEYS.get()
    token = KEYS.set(None if around is None else around.each(array_of(number)))
    try:
        yield
    finally:
        KEYS.reset(token)


@dataclass(frozen=True)
class Traced:
    """A traced function: graph over argument leaves, structure of results. Complex arrays: real, last axis of 2.

    `tracked`: it captures an array that depends on one that requires a gradient, whose contents now are a constant.
    """

    graph: Graph
    results: Tree
    dtypes: tuple[DType, ...]
    tracked: bool = False


def tracing() -> bool:
    """Is a function being traced?"""
    return _TRACING.get()


def is_traced(x: Any) -> bool:
    return isinstance(x, Array) and any(p.traced for p in x._parts)


def trace(fn: Callable[..., Any], /, *specs: Any, **named: Any) -> Graph:
    """The graph of a function of array code.

    Args:
        fn: takes arrays, or dicts, lists, tuples and dataclasses of arrays, and gives such. It runs once.
        *specs: its arguments, with a Spec (or an array as an example) for each array. Other values are passed on as
            they are. Sizes that are names
            stay open: the graph is one for all of them.
        **named: the same for keyword arguments.

    Returns:
        A graph whose inputs are the arrays of the arguments and whose outputs are those of the results, in order. A
        complex array is one of real numbers with a last axis of size 2.

    Raises:
        DnncError: a graph cannot express the function; names the line and the cure.
    """
    function(fn, "trace", specs, named)
    leaves, tree = flatten((specs, named), "", Rules((Spec,), any=True))
    shapes = [x for x in (*specs, *named.values()) if isinstance(x, (tuple, list)) and x and not leaves]
    for x in shapes:
        if all(isinstance(d, (int, str)) for d in x):
            raise InputError(f"trace: {x!r} holds no array; for an array of this shape give dnnc.Spec({tuple(x)!r})")
    return traced(fn, tree, [spec_of(x) for _, x in leaves], [_name(path, fn) for path, _ in leaves]).graph


def spec_of(x: Any) -> Spec:
    """Shape and dtype of an array; nothing of it is copied."""
    if isinstance(x, Spec):
        return x
    a = x if isinstance(x, (Array, np.ndarray, np.generic)) else borrowed(x)
    return Spec(a.shape, a.dtype)


def _name(path: str, fn: Any) -> str:
    """What a graph calls an argument: the path of `flatten` begins with 0 and a position, or with 1 and a keyword."""

    kind, first, *rest = path.split(".")
    if kind == "0":
        try:
            names = [
                p.name
                for p in inspect.signature(fn).parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
        except (TypeError, ValueError):
            names = []
        k = int(first)
        first = names[k] if k < len(names) else f"x{first}"
    return "_".join([first, *rest])


def argument(spec: Spec) -> tuple[Lazy, Array]:
    """A placeholder, and the array that stands for it."""
    real = from_numpy(real_of(spec.dtype))
    if spec.dtype.kind != "c":
        x = placeholder(TensorType(real, spec.shape))
        return x, array_of(x)
    x = placeholder(TensorType(real, (*spec.shape, 2)))
    return x, Array(taken_apart(x), spec.dtype)


def traced(fn: Callable[..., Any], tree: Tree, specs: Sequence[Spec], names: Sequence[str]) -> Traced:
    """Trace a function for the pair (positional, keyword arguments) of this structure."""
    inputs, arrays = [], []
    for s in specs:
        x, a = argument(s)
        inputs.append(x)
        arrays.append(a)
    args, kwargs = unflatten(tree, arrays)
    leaves, results = flatten(located(fn, args, kwargs), "", Rules(any=True))
    made = [x if isinstance(x, Array) else from_buffer(np.array(x)) for _, x in leaves]
    title = getattr(fn, "__name__", "")
    region = Region(title if title.isidentifier() else "traced", inputs, names)
    g = region.finish([value_of(a) for a in made])
    label = "result" if isinstance(results, Leaf) else "result_"
    for (path, _), v in zip(leaves, g.outputs):
        if v.node is not None:
            g.rename(v, label + path.replace(".", "_"))
    return Traced(g, results, tuple(a.dtype for a in made), region.tracked)


def value_of(a: Array) -> Lazy:
    """An array as one value."""
    return a._parts[0] if len(a._parts) == 1 else joined(a._parts)


def located(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function as one that is traced; errors name the line of the user's code."""
    token = _TRACING.set(True)
    try:
        with neutral():
            return fn(*args, **kwargs)
    except DnncError as e:
        line = raised_at(e.__traceback__)
        if line and e.args and isinstance(e.args[0], str) and line not in e.args[0]:
            e.args = (f"{line}: {e.args[0]}", *e.args[1:])
        raise
    except TypeError as e:
        if "__array_ufunc__" not in str(e):
            raise
        line = raised_at(e.__traceback__)
        raise InputError(
            f"{line}: NumPy cannot compute with an array of a traced function; use the function of dnnc.array in place "
            "of NumPy's"
        ) from e
    finally:
        _TRACING.reset(token)
