"""A program of a CPU at the sizes of a call: frames with its plan of memory, and the one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import numpy as np

from dnnc.backends.base import ParameterTables
from dnnc.backends.llvm.code import Code
from dnnc.backends.llvm.pool import (
    CALL_API,
    CALL_BUFFERS,
    CALL_DIMS,
    CALL_ENTRY,
    CALL_FRAME,
    CALL_NTHREADS,
    CALL_OUT,
    CALL_WORDS,
    PYTHON_API,
    SERIAL_BELOW,
)
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.runtime.frames import FRAME_BOUND, FRAME_CONSTANTS, FRAME_OFFSETS, Frame
from dnnc.backends.runtime.program import Program
from dnnc.backends.runtime.results import maker
from dnnc.ir.errors import TargetError, outside
from dnnc.ir.expr import Expr, Var, const, substitute, value
from dnnc.ir.shapes import concrete_shape

Array = np.ndarray[Any, Any]
WORD = 4  # bytes of an element
HEAD = 3  # words in front of the buffers: addresses of the arena and the constants, and 0, which the table runner reads


@cache
def python_api() -> list[int]:
    """Addresses of the functions of CPython that a call uses."""
    return [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in PYTHON_API]


class CallFrame:
    """The memory of one call at a time: a frame, the addresses of its buffers, and the record that describes the call.

    Calls of all shapes of a model use it in turns.

    Attributes:
        frame: slots and arena.
        owner: the instance whose plan it has now.
        pointers: int64: HEAD words, addresses of the buffers, then sizes and counters of a table.
        record: see `dnnc.backends.llvm.pool`; `address` is its own.
        table: addresses of what the program reads of parameters, kept alive.
    """

    __slots__ = ("address", "frame", "owner", "pointers", "record", "table")

    def __init__(self, frame: Frame, buffers: int) -> None:
        self.frame = frame
        self.owner: CpuInstance | None = None
        self.pointers = np.zeros(HEAD + buffers, np.int64)
        self.record = np.zeros(CALL_WORDS, np.int64)
        self.record[CALL_API:] = python_api()
        self.record[CALL_OUT] = self.pointers.ctypes.data + 8 * HEAD
        self.record[CALL_FRAME] = frame.address
        self.pointers[0] = frame.arena.ctypes.data
        self.address: int = self.record.ctypes.data
        self.table: Any = None


def is_small(program: Program, sizes: Mapping[Expr, Expr]) -> bool:
    """Is no kernel of a program worth a second thread at these sizes? Kernels of fixed sizes know it themselves."""
    if not program.dims or program.controls or not program.work:
        return False
    for flops, nbytes in program.work.values():
        work = value(substitute(const(flops) + const(nbytes) // WORD, sizes))
        if work is None or work >= SERIAL_BELOW:
            return False
    return True


class CpuInstance:
    """A program at fixed sizes: what a call needs without looking anything up.

    Attributes:
        free: frames that no call uses; the shapes of a model share them. Each is as large as its largest call needed.
        in_place: outputs that kernels write to the memory of donated inputs.
        used: True if it was called again since somebody last asked.
    """

    __slots__ = (
        "arena_bytes code dims empty free in_place new nthreads offsets outputs parameters program refusal run used "
        "words"
    ).split()

    def __init__(
        self,
        program: Program,
        dims: Mapping[Var, int],
        nthreads: int,
        free: list[CallFrame],
        parameters: ParameterTables | None = None,
        in_place: frozenset[int] = frozenset(),
        refusal: str = "",
    ) -> None:
        env: dict[Expr, Expr] = {v: const(n) for v, n in dims.items()}
        self.program = program
        self.code: Code = program.loaded
        self.nthreads = 1 if not program.parallel or is_small(program, env) else nthreads
        self.outputs: list[tuple[tuple[int, ...], Any]] = [
            (concrete_shape(t, env) if t.row_major else cast("tuple[int, ...]", t.physical), t.dtype.numpy)
            for t in program.outputs
        ]
        self.new = maker(self.outputs)
        self.empty = all(0 in s for s, _ in self.outputs)
        self.dims = np.array([dims[v] for v in program.dims], np.int64)
        offsets, self.arena_bytes = program.sizes(dims)
        self.offsets = np.array(offsets, np.int64)
        self.words = len(program.inputs) + len(program.outputs)
        self.free = free
        self.parameters = parameters if program.prologue is not None else None
        self.in_place, self.refusal = in_place, refusal
        self.used = False
        self.run = runtime().call

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        """Run on contiguous arrays of the right shapes and dtypes; returns fresh arrays."""
        new = self.new
        results: list[Array] = [new(s, d) for s, d in self.outputs]
        self.into(arrays, results)
        return results

    def into(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Run and leave the results in these buffers. InputError: an index read at run time is outside its axis."""
        if self.empty:
            return
        held = self.take()
        if self.run(held.address, arrays, results):
            self.fail(held.frame)
        self.put(held)

    def put(self, held: CallFrame) -> None:
        """Give a frame back."""
        self.free.append(held)

    def take(self) -> CallFrame:
        """A frame that no other call uses, with this plan."""
        try:
            held = self.free.pop()
        except IndexError:
            held = None
        if held is None or held.frame.arena.nbytes < self.arena_bytes or held.owner is not self:
            held = self._adopted(held)
        if self.parameters is not None:
            table = self.parameters.table(self.program)
            if held.table is not table:
                held.table = table
                held.frame.slots[FRAME_BOUND] = table.address
        return held

    def _adopted(self, held: CallFrame | None) -> CallFrame:
        """A frame with this plan: this one if it is large enough. TargetError: this machine cannot run it."""
        if self.refusal:  # an instruction that the CPU lacks would end the process
            raise TargetError(self.refusal)
        if held is None or held.frame.arena.nbytes < self.arena_bytes or len(held.pointers) < HEAD + self.words:
            held = CallFrame(Frame(self.arena_bytes), self.words)
        held.owner = self
        slots, record, constants = held.frame.slots, held.record, self.program.constants.ctypes.data
        slots[FRAME_OFFSETS] = self.offsets.ctypes.data
        slots[FRAME_CONSTANTS] = held.pointers[1] = constants
        record[CALL_ENTRY], record[CALL_NTHREADS] = self.code.entry, self.nthreads
        table = self.code.table
        record[CALL_BUFFERS] = held.pointers.ctypes.data + (8 * HEAD if table is None else 0)
        record[CALL_DIMS] = self.dims.ctypes.data if table is None else table.ctypes.data
        return held

    def fail(self, frame: Frame) -> None:
        frame.forget()
        where = "; ".join([f"{k.name}{k.where}" for k in self.program.kernels if k.guarded][:3])
        raise outside(where)


class CpuRunner:
    """Runs the programs of one model; see Runner. `refusal`: why this machine cannot, empty where it can."""

    def __init__(self, threads: int, parameters: ParameterTables | None, refusal: str = "") -> None:
        self.threads, self.parameters, self.refusal = threads, parameters, refusal
        self.frames: list[CallFrame] = []

    def instance(self, program: Program, dims: Mapping[Var, int], in_place: frozenset[int]) -> CpuInstance:
        by_name = {v.name: n for v, n in dims.items()}
        sizes = {v: by_name[v.name] for v in program.dims}
        return CpuInstance(program, sizes, self.threads, self.frames, self.parameters, in_place, self.refusal)

    def refitted(self, instances: Sequence[Any]) -> None:
        """Frames hold what the old arrays were packed into."""
        self.frames.clear()
