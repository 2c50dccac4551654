"""`@dnnc.jit`: a function of array code that is compiled when it is called, once for each structure, dtype and shape of its arguments."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import numpy as np

from dnnc.array.core import Array, evaluate, from_buffer
from dnnc.array.creation import asarray
from dnnc.array.promotion import real_of
from dnnc.driver import compile_graph
from dnnc.frontends.trace import Spec, is_traced, traced, tracing
from dnnc.frontends.trace.tracer import Traced
from dnnc.frontends.trace.tree import Branch, Fixed, Rules, Tree, flatten, key_of, unflatten
from dnnc.ir.errors import InputError
from dnnc.options import CompileOptions, make_options

PROGRAMS = 64  # kept by one function


class Jitted:
    """A compiled function; see `jit`. `traces` counts how often it was traced."""

    def __init__(self, fn: Callable[..., Any], static: Sequence[str], options: CompileOptions, programs: int) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._signature, self._static = fn, inspect.signature(fn), frozenset(static)
        self._options, self._limit = options, programs
        self._programs: OrderedDict[Any, tuple[Any, Traced]] = OrderedDict()
        self._lock = threading.RLock()
        self.traces = 0
        unknown = sorted(self._static - set(self._signature.parameters))
        if unknown:
            raise InputError(f"static: {fn.__name__} has no argument {', '.join(unknown)}; it has {', '.join(self._signature.parameters)}")

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return self._fn(*args, **kwargs)  # a part of the program that is being traced
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        leaves, tree = self._flat(bound.arguments)
        arrays = [x if isinstance(x, (Array, np.ndarray)) else asarray(x) for _, x in leaves]
        if any(is_traced(a) for a in arrays):
            raise InputError(f"{self._fn.__name__}: an argument belongs to a function whose trace has ended; give its results back by return")
        lazy = [a for a in arrays if isinstance(a, Array)]
        if lazy:
            evaluate(*lazy)
        made = [_buffer(a) for a in arrays]
        key = tree, tuple((a.dtype, a.shape) for a in arrays)
        program, result = self._program(key, bound, [n for n, _ in leaves], [Spec(a.shape, a.dtype) for a in arrays])
        return _restored(result, program(*made) if program is not None else ())

    def _flat(self, arguments: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], Tree]:
        """The arrays of a call by their paths, and what is around them."""
        leaves: list[tuple[str, Any]] = []
        trees: list[Tree] = []
        for name, value in arguments.items():
            if name in self._static:
                trees.append(Fixed(key_of(value, name), value))
                continue
            found, tree = flatten(value, name, Rules())
            leaves += found
            trees.append(tree)
        return leaves, Branch(dict, tuple(arguments), tuple(trees))

    def _program(self, key: Any, bound: inspect.BoundArguments, names: list[str], specs: list[Spec]) -> tuple[Any, Traced]:
        with self._lock:
            found = self._programs.get(key)
            if found is not None:
                self._programs.move_to_end(key)
                return found
            self.traces += 1
            result = traced(self._called, Branch(tuple, (0, 1), (Branch(tuple, (0,), (key[0],)), Branch(dict, (), ()))), specs, _names(names))
            result.graph.name = self._fn.__name__ if self._fn.__name__.isidentifier() else "traced"
            g = result.graph
            labels = [v.name for v in g.inputs], [v.name for v in g.outputs]
            made = compile_graph(g, labels, self._options) if g.outputs else None
            self._programs[key] = made, result
            if len(self._programs) > self._limit:
                self._programs.popitem(last=False)
            return made, result

    def _called(self, arguments: dict[str, Any]) -> Any:
        again = inspect.BoundArguments(self._signature, OrderedDict(arguments))
        return self._fn(*again.args, **again.kwargs)


def _names(paths: Sequence[str]) -> list[str]:
    return [p.replace(".", "_") for p in paths]


def _buffer(a: Any) -> np.ndarray[Any, Any]:
    """The contents as a program takes them: complex numbers as pairs."""
    data: np.ndarray[Any, Any] = a._contents() if isinstance(a, Array) else a.astype(a.dtype.newbyteorder("="), copy=False)
    if data.dtype.kind != "c":
        return data
    return np.ascontiguousarray(data).reshape(*data.shape, 1).view(real_of(data.dtype))


def _restored(result: Traced, made: Any) -> Any:
    many = made if isinstance(made, (tuple, list)) else (made,)
    arrays = [from_buffer(m.view(d)[..., 0] if d.kind == "c" else m) for m, d in zip(many, result.dtypes)]
    return unflatten(result.results, arrays)


def jit(fn: Callable[..., Any] | None = None, /, *, static: str | Sequence[str] = (), programs: int = PROGRAMS, **options: Any) -> Any:
    """Compile a function of array code when it is called: `@dnnc.jit`, or `@dnnc.jit(static=("n",), threads=1)`.

    Args:
        fn: takes and gives arrays, or dicts, lists, tuples and dataclasses of arrays. Numbers and strings among its arguments are fixed:
            another value is another program.
        static: names of arguments that are passed on as they are; they must be hashable.
        programs: how many are kept; those of structures, dtypes, shapes and fixed values used last.
        **options: see CompileOptions.

    Returns:
        A function that takes arrays of NumPy, `dnnc.array` or DLPack and gives arrays of `dnnc.array`. Within a function that is traced it is
        a part of that one's program.

    Raises:
        InputError: `static` names no argument, or an option is unknown.
    """
    opts = make_options(options)
    names = (static,) if isinstance(static, str) else tuple(static)
    if programs < 1:
        raise InputError(f"programs={programs}: expected at least 1")
    if fn is None:
        return lambda f: Jitted(f, names, opts, programs)
    return Jitted(fn, names, opts, programs)
