"""A device program at a call's sizes: loaded on first use, with frames that serve one call at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dnnc.backends.cuda.emit import kernel_number
from dnnc.backends.cuda.graph import Frame, LoadedProgram
from dnnc.backends.runtime.device import Device
from dnnc.backends.runtime.program import Program
from dnnc.ir.errors import outside
from dnnc.ir.expr import Var
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]
MAX_FRAMES = 4  # of a program: calls that run at the same time; those beyond wait


class CudaInstance:
    """A program with frames. `others`: programs that share constants. Host results pass through staging memory."""

    def __init__(
        self, program: Program, device: Callable[[], Device], others: Callable[[], Sequence[LoadedProgram]]
    ) -> None:
        self.program, self._device, self._others = program, device, others
        self.in_place, self.used = frozenset(program.donated), False
        self.outputs = [(_shape(t), t.dtype.numpy) for t in program.outputs]
        self.empty = all(0 in s for s, _ in self.outputs)
        self._loaded: LoadedProgram | None = None
        self._free: list[Frame] = []
        self._made = 0
        self._turn = threading.Condition()
        self._lock = threading.Lock()

    def loaded(self) -> LoadedProgram:
        """Load and check the program. TargetError without a device, AccuracyError for a wrong kernel."""
        with self._lock:
            if self._loaded is None:
                self._loaded = LoadedProgram(self.program, self._device(), self._others())
            return self._loaded

    def reload(self) -> LoadedProgram | None:
        """Load the program anew at the next call, as its constants are others; gives the one that was loaded."""
        with self._lock, self._turn:
            before, self._loaded = self._loaded, None
            self._made -= len(self._free)
            self._free.clear()
            return before

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        """Run on contiguous arrays of the host, of the right shapes and dtypes; returns fresh arrays."""
        results = [np.empty(s, d) for s, d in self.outputs]
        self.into(arrays, results)
        return results

    def into(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Run on host arrays, into these. InputError: a run-time index is outside of its axis."""
        if self.empty:
            return
        with self.frame() as frame:
            status = frame.run_host(arrays, results)
        if status[0]:
            self.fail(status)

    def fail(self, status: tuple[int, int, int]) -> None:
        _, number, value = status
        guarded = [k for k in self.program.kernels if k.guarded]
        told = [k for k in guarded if kernel_number(k.symbol) == number] or guarded
        where = "; ".join([f"{k.name}{k.where}" for k in told][:3])
        raise outside(where, value)

    @property
    def ready(self) -> LoadedProgram | None:
        """The program, if it is loaded."""
        return self._loaded

    def own_frame(self) -> Frame:
        """A frame that only its holder uses."""
        return Frame(self.loaded())

    @contextmanager
    def frame(self) -> Iterator[Frame]:
        """A frame that no other call uses, as soon as there is one."""
        loaded = self._loaded or self.loaded()
        with self._turn:
            while not self._free and self._made >= MAX_FRAMES:
                self._turn.wait()
            held = self._free.pop() if self._free else None
            self._made += held is None
        try:
            held = held or Frame(loaded)
            yield held
        finally:
            with self._turn:
                if held is None or held.loaded is not self._loaded:  # it failed, or has weights of before a refit
                    self._made -= 1
                else:
                    self._free.append(held)
                self._turn.notify()


def _shape(t: TensorType) -> tuple[int, ...]:
    return tuple(int(str(d)) for d in t.shape)


class CudaRunner:
    """Runs the programs of one model; see Runner. `present`: programs are loaded as soon as they are compiled."""

    def __init__(self, device: Callable[[], Device], present: bool) -> None:
        self._device, self._present = device, present
        self._instances: weakref.WeakSet[CudaInstance] = weakref.WeakSet()
        # Programs with the weights of before the last refit: work of theirs may still be queued.
        self._before: list[LoadedProgram] = []

    def instance(self, program: Program, dims: Mapping[Var, int], in_place: frozenset[int]) -> CudaInstance:
        instance = CudaInstance(program, self._device, self._loaded)
        self._instances.add(instance)
        if self._present and not instance.empty:
            instance.loaded()
        return instance

    def _loaded(self) -> list[LoadedProgram]:
        """The programs of the model that are on the device."""
        return [p for i in list(self._instances) if (p := i.ready) is not None]

    def refitted(self, instances: Sequence[Any]) -> None:
        """New weights are loaded at the next call."""
        self._before = [p for i in instances if (p := i.reload()) is not None]
