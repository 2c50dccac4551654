"""Special arguments of jitted functions: donated ones, whose memory results take, and bound parameters.

A parameter, an argument or an array that the function captures, is packed when the function is first called with it,
and again when a call brings another array. A donated array is dead afterwards; of shared memory a copy is donated.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

import numpy as np

from dnnc.array.core import Array, from_data
from dnnc.array.devices import HOST, DeviceData, on_host
from dnnc.backends.registry import backend_class
from dnnc.backends.runtime.arrays import is_read_only
from dnnc.bound import from_constant, holder
from dnnc.compile_graph import compile_graph
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph
from dnnc.ir.target import parse_target
from dnnc.options import CompileOptions


@dataclass(frozen=True)
class Roles:
    """A function's arguments that are donated, those that are parameters, and captured arrays, by name."""

    function: str
    donate: frozenset[str]
    parameters: frozenset[str]
    captured: Mapping[str, Any]

    def check(self, known: Sequence[str]) -> None:
        """InputError where there is no such argument, or one is both."""
        for what, names in (("donate", self.donate), ("parameters", self.parameters)):
            unknown = sorted(names - set(known))
            if unknown:
                raise InputError(
                    f"{what}: {self.function} has no argument {', '.join(unknown)}; it has {', '.join(known)}"
                )
        both = sorted(self.donate & self.parameters)
        if both:
            raise InputError(f"{self.function}: {', '.join(both)} cannot be donated and stay a parameter")

    def compile(
        self,
        graph: Graph,
        labels: tuple[list[str], list[str]],
        paths: Sequence[str],
        buffers: Sequence[Any],
        opts: CompileOptions,
    ) -> BoundProgram:
        """The program of a traced function, called with all buffers in order."""
        first = [p.split(".")[0] for p in paths]
        if self.donate:
            opts = replace(opts, dims=dict(opts.dims), donate=self._pairs(graph, labels, first))
        for name, a in self.captured.items():
            from_constant(graph, holder(graph, name, a), name)
        labels = [*labels[0], *self.captured], labels[1]
        # This frame keeps no list of all buffers: an error that compiling stores keeps it alive, and a donated array
        # that a second list refers to would be copied.
        every = enumerate((*buffers, *self.contents()))
        held = {k: b for k, b in every if k >= len(first) or first[k] in self.parameters}
        del every
        bring = (lambda b: b) if backend_class(parse_target(opts.target).kind).numbered else on_host
        made = compile_graph(graph, labels, opts, parameters={labels[0][k]: bring(b) for k, b in held.items()})
        return BoundProgram(made, labels[0], held, bring)

    def _pairs(self, graph: Graph, labels: tuple[list[str], list[str]], first: Sequence[str]) -> dict[str, str]:
        """Pair donated arrays, in the order of the arguments, with the first free output of their type.

        InputError: an argument fits none.
        """
        pairs: dict[str, str] = {}
        for name in [n for n in dict.fromkeys(first) if n in self.donate]:
            arrays = [k for k, n in enumerate(first) if n == name]
            for k in arrays:
                t = graph.inputs[k].type
                free = [
                    o
                    for o, v in zip(labels[1], graph.outputs)
                    if o not in pairs.values() and (v.type.dtype, v.type.shape) == (t.dtype, t.shape)
                ]
                if free:
                    pairs[labels[0][k]] = free[0]
            if arrays and not any(labels[0][k] in pairs for k in arrays):
                types = ", ".join(str(graph.inputs[k].type) for k in arrays[:3])
                raise InputError(
                    f"donate: no result of {self.function} has the type of {name} ({types}), so none can take its "
                    "memory"
                )
        return pairs

    def given(
        self, paths: Sequence[str], arrays: Sequence[Any], buffers: list[Any], values: Sequence[Any]
    ) -> list[Any]:
        """Return a call's buffers, copies for shared donated ones, captures last. `values`: the user's `arrays`."""
        if not self.donate:
            return [*buffers, *self.contents()]
        out = list(buffers)
        for k, (path, a) in enumerate(zip(paths, arrays)):
            if path.split(".")[0] not in self.donate:
                continue
            buffers[k] = None  # references are counted
            if isinstance(out[k], np.ndarray):
                if isinstance(a, Array) and not is_alone(a, out, k):
                    out[k] = out[k].copy()
            elif values[k] is not a:  # of another library, which sees the result
                if is_read_only(values[k]):
                    raise InputError(f"{self.function}: {path} is donated, but read-only: give a copy")
            elif a.device != HOST:
                out[k] = None
                out[k] = a.__dnnc_own__()
        return [*out, *self.contents()]

    def run(
        self, program: Any, paths: Sequence[str], arrays: Sequence[Any], buffers: list[Any], values: Sequence[Any]
    ) -> Any:
        """Return a call's results. No frame that was there while the program was compiled refers to their memory: an
        error that compiling stores keeps those, and the next call would copy what it is donated.
        """
        got = program(*self.given(paths, arrays, buffers, values))
        self.bury(paths, arrays)
        return got

    def contents(self) -> list[Any]:
        """What the captured arrays hold now, computed if it is not yet."""
        return [a._contents() if isinstance(a, Array) else a for a in self.captured.values()]

    def bury(self, paths: Sequence[str], arrays: Sequence[Any]) -> None:
        """Let the arrays of donated arguments raise errors from now on."""
        for path, a in zip(paths, arrays):
            if isinstance(a, Array) and path.split(".")[0] in self.donate:
                a._parts = Gone(path, self.function)  # type: ignore[assignment]
                a._pairs = None


def is_alone(a: Array, buffers: list[Any], k: int) -> bool:
    """True if only this array and the buffer list refer to the memory: no array, lazy value or NumPy view."""
    if len(a._parts) != 1 or a._parts[0].call is not None or a._parts[0].data is not buffers[k]:
        return False
    data = buffers[k]
    whole = data.base is None or (isinstance(data.base, np.ndarray) and data.base.base is None)
    del data
    return (
        whole
        and buffers[k].flags.writeable
        and all(n <= alone for n, alone in zip(references(a, buffers, k), fewest()))
    )


def references(a: Array, buffers: list[Any], k: int) -> tuple[int, int, int, int]:
    """Count the references to the value (and its tuple), its data, and the base of which the data is a view."""
    base = buffers[k].base
    return (
        sys.getrefcount(a._parts),
        sys.getrefcount(a._parts[0]),
        sys.getrefcount(buffers[k]),
        0 if base is None else sys.getrefcount(base),
    )


@cache
def fewest() -> tuple[int, int, int, int]:
    """What `references` says of an array that nobody else sees: Pythons count what is on the way differently."""
    a = from_data(np.zeros(4, np.float32)[:2], np.dtype(np.float32))
    return references(a, [a._parts[0].data], 0)


class Gone:
    """Stands for the contents of an array that was donated: looking at them is an error."""

    def __init__(self, path: str, function: str) -> None:
        self.path, self.function = path, function

    def _fail(self, *_: Any) -> NoReturn:
        raise InputError(
            f"this array was donated to {self.function} as {self.path}, and its memory holds a result of it: use that, "
            f"or give {self.function} a copy"
        )

    __iter__ = __len__ = __getitem__ = __bool__ = _fail


def is_same(a: Any, b: Any) -> bool:
    """True for the same buffer. Foreign device arrays are wrapped anew in each call; a held one keeps its memory."""
    if a is b or not (isinstance(a, DeviceData) and isinstance(b, DeviceData)):
        return a is b
    return (a.place, a.address, a.shape, a.dtype) == (b.place, b.address, b.shape, b.dtype)


class BoundProgram:
    """A program whose arguments may be bound: called with all, it binds those anew that are others than before."""

    def __init__(self, program: Any, names: Sequence[str], held: dict[int, Any], bring: Callable[[Any], Any]) -> None:
        """`bring`: makes of a buffer what the program can be bound to."""
        self.program, self.names, self.held, self._bring = program, names, held, bring
        self.stale = False
        self._lock = threading.Lock()  # a call must not see what another thread binds meanwhile

    def __call__(self, *buffers: Any) -> Any:
        if not self.held:
            return self.program(*buffers)
        with self._lock:
            changed = {k: buffers[k] for k, old in self.held.items() if not is_same(buffers[k], old)}
            if changed or self.stale:
                self.program.refit({self.names[k]: self._bring(b) for k, b in changed.items()})
                self.held, self.stale = {**self.held, **changed}, False
            return self.program(*(b for k, b in enumerate(buffers) if k not in self.held))
