"""Parameters of a compiled model: arrays that belong to somebody else, and what programs read of them.

A program compiles once, knowing of its parameters only shapes and dtypes. Its *table* holds the addresses of what its
kernels read: the user's memory where they read it as it lies, else what the prologue made of it (transposed, packed).
`refit` makes new tables; a call that runs meanwhile keeps the one that it began with. A program of a device has it all
behind its constants, to be loaded there, but for arrays on that device that are read as they lie.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.runtime.arrays import device_array, is_device_array, kind_of, to_host
from dnnc.backends.runtime.device import DEFAULT_STREAM, Device, DeviceArray, Weights
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph, Value
from dnnc.pytree import Rules, flatten
from dnnc.signature import TensorSpec, converted

if TYPE_CHECKING:
    from dnnc.backends.runtime.program import Program

Array = np.ndarray[Any, Any]
Bind = Callable[[Any, Weights, Callable[[Any], Array]], None]  # see `Backend.bind_parameters`


def flat(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their paths: `{"params": {"w": a}}` -> `{"params_w": a}`."""
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

    def __init__(
        self, values: Mapping[str, Value], arrays: Mapping[str, Any], device: Callable[[], Device] | None = None
    ) -> None:
        """`values`: in the graph, by users' names; `arrays`: first contents; `device`: where programs read arrays."""
        self._values, self._device = dict(values), device
        self._arrays = {n: self._checked(n, arrays[n]) for n in values}
        self._tables: dict[int, tuple[weakref.ref[Program], Table]] = {}
        self._devices: list[tuple[weakref.ref[Program], Bind]] = []  # programs of a device
        self._weights: Weights | None = None  # what is bound now, where programs of a device read it
        self._lock = threading.RLock()
        self.bound = 0  # how often tables were made

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(n, str(v.type.dtype.numpy), tuple(int(str(d)) for d in v.type.shape))
            for n, v in self._values.items()
        )

    @property
    def on_host(self) -> list[Array]:
        """What is bound now and lies on the host."""
        return [a for a in self._arrays.values() if isinstance(a, np.ndarray)]

    @property
    def on_device(self) -> list[DeviceArray]:
        """What is bound now and lies on the device."""
        return [a for a in self._arrays.values() if not isinstance(a, np.ndarray)]

    def held(self, name: str) -> Array:
        """The contents of what is bound now, by the name of the value that stands for it in the graph."""
        return self._fetched(next(self._arrays[n] for n, v in self._values.items() if v.name == name))

    def table(self, native: Program) -> Table:
        """The table of a program, made when it is asked for first."""
        found = self._tables.get(id(native))
        if found is not None and found[0]() is native:
            return found[1]
        with self._lock:
            made = self._made(native, self._arrays)
            self._tables[id(native)] = weakref.ref(native), made
            return made

    def refit(self, changed: Mapping[str, Any]) -> None:
        """Bind other arrays and refit. InputError names one that does not fit and leaves everything as it was."""
        if not set(changed) <= set(self._values):
            changed = flat(changed)
        for name in changed:
            if name not in self._values:
                raise InputError(f"refit: there is no parameter {name!r}; there are {', '.join(self._values)}")
        with self._lock:
            arrays = {**self._arrays, **{n: self._checked(n, a) for n, a in changed.items()}}
            natives = [n for r, _ in self._tables.values() if (n := r()) is not None]
            weights = Weights(self._settled(arrays))
            for program, bind in self._on_devices():
                bind(program, weights, self._fetched)
            tables = {id(n): (weakref.ref(n), self._made(n, arrays)) for n in natives}
            self._arrays, self._tables, self._weights = arrays, tables, weights

    def _made(self, native: Program, arrays: Mapping[str, Array | DeviceArray]) -> Table:
        assert native.prologue is not None
        self.bound += 1
        return Table(native.prologue.run({v.name: self._fetched(arrays[n]) for n, v in self._values.items()}))

    def _settled(self, arrays: Mapping[str, Array | DeviceArray]) -> dict[str, Array | DeviceArray]:
        """Return arrays by prologue input, once their libraries' queued work is done: kernels read weights early."""
        if self._device is not None:
            device = self._device()
            queued = {
                s
                for a in arrays.values()
                if not isinstance(a, np.ndarray)
                for s in (kind_of(a.keep, device).stream, a.ready)
            }
            for stream in queued - {None}:
                device.synchronize(int(stream or 0))
        return {v.name: arrays[n] for n, v in self._values.items()}

    def _fetched(self, a: Array | DeviceArray) -> Array:
        """An array on the host."""
        if isinstance(a, np.ndarray):
            return a
        assert self._device is not None
        device, dtype = (
            self._device(),
            next(v.type.dtype.numpy for v in self._values.values() if v.type.dtype.numpy.name == a.dtype),
        )
        made = np.empty(a.shape, dtype)
        if made.nbytes:
            device.download(made, a.address, DEFAULT_STREAM)
            device.synchronize(DEFAULT_STREAM)
        return made

    def _checked(self, name: str, a: Any) -> Array | DeviceArray:
        """An array as a parameter: itself if it is contiguous, else a copy. InputError where dtype or shape differ."""
        t = self._values[name].type
        given: Array | DeviceArray
        if is_device_array(a) and self._device is not None:
            given = device_array(a, name, t.dtype.numpy, t.rank, self._device(), "parameter")
        else:
            given = converted(to_host(a) if is_device_array(a) else a, name, t.dtype.numpy, None, "parameter")
        if given.shape != t.shape:
            raise InputError(f"parameter {name}: expected shape {list(t.shape)}, got {list(given.shape)}")
        return given

    def load(self, program: Program, bind: Bind) -> None:
        """Give a program of a device what it reads of parameters, now and at each refit."""
        if program.prologue is None:
            return
        with self._lock:
            settled = self._settled(self._arrays)
            self._weights = self._weights or Weights(settled)
            bind(program, self._weights, self._fetched)
            self._devices.append((weakref.ref(program), bind))

    def _on_devices(self) -> list[tuple[Program, Bind]]:
        self._devices = [(r, bind) for r, bind in self._devices if r() is not None]
        return [(p, bind) for r, bind in self._devices if (p := r()) is not None]

    def frozen(self, graph: Graph) -> Graph:
        """The graph with what parameters hold now as constants."""
        return frozen(graph, self.held)


def with_parameters(
    graph: Graph, names: Sequence[str], wanted: Mapping[str, Any], device: Callable[[], Device] | None = None
) -> tuple[Graph, list[str], Parameters]:
    """Return a graph with these Parameters, and its other inputs. InputError: no such input, symbolic, or misfit."""
    values = dict(zip(names, graph.inputs))
    for n in wanted:
        if n not in values:
            raise InputError(f"parameters: the model has no input {n!r}; it has {', '.join(names) or 'none'}")
        if not values[n].type.static:
            raise InputError(f"parameters: {n} is {values[n].type}; a parameter has a fixed size")
    made = graph.copy()
    same = dict(zip(names, made.inputs))
    made.bind_inputs({same[n].name for n in wanted})
    return (
        made,
        [n for n in names if n not in wanted],
        Parameters({n: same[n] for n in names if n in wanted}, wanted, device),
    )


def frozen(graph: Graph, contents: Callable[[str], Array]) -> Graph:
    """Make the parameters of an uncompiled graph constants with these contents, by prologue input name."""
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
