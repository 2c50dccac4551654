"""A program of a CPU at the sizes of a call: frames with its plan of memory, and the one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dnnc.backends.llvm.native import Native, shape_of
from dnnc.backends.runtime.frames import FRAME_BOUND, FRAME_CONSTANTS, FRAME_OFFSETS, Frame, address_of, runtime
from dnnc.backends.runtime.results import maker
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Expr, Var, const

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


class Table(Protocol):
    """Addresses of what a program reads of its parameters; keeps that memory alive."""

    address: int


class Tables(Protocol):
    """Gives the table of a program."""

    def table(self, native: Native) -> Table: ...


class CallFrame:
    """The memory of one call: a frame, and the addresses of its buffers. Calls of all shapes use it in turns. `table`:
    of the parameters that it reads, which stay alive as long.
    """

    __slots__ = ("address", "frame", "owner", "pointers", "table")

    def __init__(self, frame: Frame, buffers: int, owner: CpuInstance) -> None:
        self.frame, self.owner = frame, owner
        self.pointers: Any = (ctypes.c_void_p * buffers)()
        self.address: int = ctypes.addressof(self.pointers)
        self.table: Table | None = None


class CpuInstance:
    """A program at fixed sizes: what a call needs without looking anything up.

    `free` is shared by the shapes of an executable: as many frames as calls ran at once, each as large as its largest
    call needed. `at_once`: outputs that kernels write to the memory of donated inputs; `used`: called again since
    somebody last asked.
    """

    __slots__ = (
        "arena_bytes",
        "at_once",
        "dims",
        "dims_address",
        "empty",
        "entry",
        "free",
        "launch",
        "new",
        "nthreads",
        "offsets",
        "outputs",
        "parameters",
        "program",
        "used",
    )

    def __init__(
        self,
        program: Native,
        dims: Mapping[Var, int],
        nthreads: int,
        free: list[CallFrame],
        parameters: Tables | None,
        at_once: frozenset[int],
    ) -> None:
        env: dict[Expr, Expr] = {v: const(n) for v, n in dims.items()}
        self.program, self.entry = program, program.entry
        self.nthreads = nthreads if program.parallel else 1
        self.outputs = [(shape_of(t, env), t.dtype.numpy) for t in program.outputs]
        self.new = maker(self.outputs)
        self.empty = all(0 in s for s, _ in self.outputs)
        self.dims = np.array([dims[v] for v in program.dims], np.int64)
        self.dims_address: int = self.dims.ctypes.data
        offsets, self.arena_bytes = program.sizes(dims)
        self.offsets = np.array(offsets, np.int64)
        self.free = free
        self.parameters = parameters if program.prologue is not None else None
        self.at_once = at_once
        self.used = False
        self.launch = runtime().launch

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        """Run on contiguous arrays of the right shapes and dtypes; returns fresh arrays."""
        new = self.new
        results: list[Array] = [new(s, d) for s, d in self.outputs]
        self.into(arrays, results)
        return results

    def into(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Run, and leave the results in these buffers. InputError: an index that was read at run time lies outside of
        its axis.
        """
        if self.empty:
            return
        held = self.take(len(arrays) + len(results))
        pointers = held.pointers
        k = 0
        for a in arrays:
            pointers[k] = address_of(a)
            k += 1
        for a in results:
            pointers[k] = address_of(a)
            k += 1
        status = self.launch(self.entry, held.frame.address, held.address, self.dims_address, self.nthreads)
        if status:
            self.fail(held.frame)
        self.free.append(held)

    def take(self, buffers: int) -> CallFrame:
        """A frame that no other call uses, with this plan."""
        try:
            held = self.free.pop()
        except IndexError:
            held = None
        if held is None or held.frame.arena.nbytes < self.arena_bytes:
            held = self._own(CallFrame(Frame(self.arena_bytes), buffers, self))
        elif held.owner is not self:
            self._own(held)
        if self.parameters is not None:
            table = self.parameters.table(self.program)
            if held.table is not table:
                held.table = table
                held.frame.slots[FRAME_BOUND] = table.address
        return held

    def _own(self, held: CallFrame) -> CallFrame:
        """Give a frame this plan."""
        held.owner = self
        held.frame.slots[FRAME_OFFSETS] = self.offsets.ctypes.data
        held.frame.slots[FRAME_CONSTANTS] = self.program.constants.ctypes.data
        return held

    def fail(self, frame: Frame) -> None:
        code = frame.status[0]
        frame.forget()
        where = "; ".join([f"{k.name}{k.where}" for k in self.program.kernels if k.guarded][:3])
        raise InputError(
            f"an index read at run time lies outside of its axis (status {code}), in {where}: check the values of "
            "integer inputs"
        )
