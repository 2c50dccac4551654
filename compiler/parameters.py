"""Parameters of a compiled model: arrays that belong to somebody else, and what programs read of them.

A program compiles once, knowing of its parameters only shapes and dtypes. Its *table* holds the addresses of what its kernels read: the
user's memory where they read it as it lies, else what the prologue made of it (transposed, packed). `refit` makes new tables; a call that
runs meanwhile keeps the one that it began with. A program of a device has it all behind its constants, to be loaded there.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.cuda.arrays import is_device_array
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph, Value
from dnnc.signature import TensorSpec, converted

if TYPE_CHECKING:
    from dnnc.backends.cuda.native import CudaNative
    from dnnc.backends.llvm.native import Native

Array = np.ndarray[Any, Any]


def flat(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their paths: `{"params": {"w": a}}` -> `{"params_w": a}`."""
    from dnnc.frontends.trace.tree import Rules, flatten

    leaves, _ = flatten(tree, "", Rules())
    return {path.replace(".", "_"): a for path, a in leaves}


class Table:
    """Addresses of the arrays that a program reads of its parameters; keeps these alive."""

    __slots__ = ("address", "arrays", "pointers")

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = arrays
        self.pointers: Any = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        self.address: int = ctypes.addressof(self.pointers)


class Parameters:
    """The parameters of one model; its programs for different sizes share them."""

    def __init__(self, values: Mapping[str, Value], arrays: Mapping[str, Any]) -> None:
        """`values`: by users' names, what stands for them in the graph; `arrays`: their first contents."""
        self._values = dict(values)
        self._arrays = {n: _checked(n, v, arrays[n]) for n, v in values.items()}
        self._tables: dict[int, tuple[weakref.ref[Native], Table]] = {}
        self._devices: list[weakref.ref[CudaNative]] = []  # programs of a device
        self._lock = threading.RLock()
        self.bound = 0  # how often tables were made

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(n, str(v.type.dtype.numpy), tuple(int(str(d)) for d in v.type.shape)) for n, v in self._values.items())

    @property
    def arrays(self) -> Mapping[str, Array]:
        """What is bound now, by users' names."""
        return dict(self._arrays)

    def held(self, name: str) -> Array:
        """What is bound now, by the name of the value that stands for it in the graph."""
        return next(self._arrays[n] for n, v in self._values.items() if v.name == name)

    def table(self, native: Native) -> Table:
        """The table of a program, made when it is asked for first."""
        found = self._tables.get(id(native))
        if found is not None and found[0]() is native:
            return found[1]
        with self._lock:
            made = self._made(native, self._arrays)
            self._tables[id(native)] = weakref.ref(native), made
            return made

    def refit(self, changed: Mapping[str, Any]) -> None:
        """Bind other arrays, and make anew what was made of parameters. InputError names one that does not fit; then all stays as it was."""
        if not set(changed) <= set(self._values):
            changed = flat(changed)
        for name in changed:
            if name not in self._values:
                raise InputError(f"refit: there is no parameter {name!r}; there are {', '.join(self._values)}")
        with self._lock:
            arrays = {**self._arrays, **{n: _checked(n, self._values[n], a) for n, a in changed.items()}}
            natives = [n for r, _ in self._tables.values() if (n := r()) is not None]
            for d in self._on_devices():
                d.bind(self._by_value(arrays))
            tables = {id(n): (weakref.ref(n), self._made(n, arrays)) for n in natives}
            self._arrays, self._tables = arrays, tables

    def _made(self, native: Native, arrays: Mapping[str, Array]) -> Table:
        assert native.prologue is not None
        self.bound += 1
        return Table(native.prologue.run(self._by_value(arrays)))

    def _by_value(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {v.name: arrays[n] for n, v in self._values.items()}

    def load(self, native: CudaNative) -> None:
        """Put what a program of a device reads of parameters behind its constants, now and at each refit."""
        if native.prologue is None:
            return
        with self._lock:
            native.bind(self._by_value(self._arrays))
            self._devices.append(weakref.ref(native))

    def _on_devices(self) -> list[CudaNative]:
        self._devices = [r for r in self._devices if r() is not None]
        return [n for r in self._devices if (n := r()) is not None]


def _checked(name: str, v: Value, a: Any) -> Array:
    """An array as a parameter: itself if it is contiguous, else a copy. InputError where dtype or shape differ."""
    if is_device_array(a):
        from dnnc.backends.cuda.arrays import to_host

        a = to_host(a)
    given = converted(a, name, v.type.dtype.numpy, None, "parameter")
    if given.shape != v.type.shape:
        raise InputError(f"parameter {name}: expected shape {list(v.type.shape)}, got {list(given.shape)}")
    return given


def with_parameters(graph: Graph, names: Sequence[str], wanted: Mapping[str, Any]) -> tuple[Graph, list[str], Parameters]:
    """A graph whose inputs of these users' names are parameters, the names of its other inputs, and the parameters.

    Raises:
        InputError: there is no such input, its size is symbolic, or the array does not fit.
    """
    values = dict(zip(names, graph.inputs))
    for n in wanted:
        if n not in values:
            raise InputError(f"parameters: the model has no input {n!r}; it has {', '.join(names) or 'none'}")
        if not values[n].type.static:
            raise InputError(f"parameters: {n} is {values[n].type}; a parameter has a fixed size")
    made = graph.copy()
    same = dict(zip(names, made.inputs))
    made.bind_inputs({same[n].name for n in wanted})
    return made, [n for n in names if n not in wanted], Parameters({n: same[n] for n in names if n in wanted}, wanted)


def frozen(graph: Graph, contents: Callable[[str], Array]) -> Graph:
    """A graph whose parameters are constants with these contents, by the names of the prologue's inputs. It must not have been compiled yet."""
    made = graph.copy()
    assert made.prologue is not None and not len(made.prologue), "passes have been at work"
    for v, held in list(made.parameters.items()):
        c = made.constant(contents(held.name), None, v.locs, v.type)
        made.replace_all_uses(v, c)
        name = v.name
        made.erase_parameter(v)
        made.rename(c, name)
    made.prologue = None
    return made
