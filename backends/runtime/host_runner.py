"""Runs programs of in-process functions: one call per kernel, in order; loops are Python. The default runner."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.runtime.frames import aligned_empty
from dnnc.backends.runtime.program import Branch, Call, Loop, MemoryRef, Program, Row
from dnnc.ir.errors import outside
from dnnc.ir.expr import Var
from dnnc.ir.shapes import concrete_shape

if TYPE_CHECKING:
    from dnnc.backends.base import ParameterTables

# A kernel: addresses of its buffers, in order -> 0; or another number where an index lies outside of its axis.
Function = Callable[[Sequence[int]], int]
Array = np.ndarray[Any, Any]


class HostRunner:
    """Runs the programs of one model; see Runner. `Program.loaded` holds its kernels: Function by symbol."""

    def __init__(self, parameters: ParameterTables | None) -> None:
        self.parameters = parameters

    def instance(self, program: Program, dims: Mapping[Var, int], in_place: frozenset[int]) -> HostInstance:
        return HostInstance(program, self.parameters if program.prologue is not None else None, in_place)

    def refitted(self, instances: Sequence[Any]) -> None:
        """Every call asks for the tables."""


class HostInstance:
    """A program at fixed sizes; see Instance."""

    def __init__(self, program: Program, parameters: ParameterTables | None, in_place: frozenset[int]) -> None:
        self.program, self.parameters, self.in_place, self.used = program, parameters, in_place, False
        self.outputs = [(concrete_shape(t, {}), t.dtype.numpy) for t in program.outputs]
        self.arena_bytes = program.sizes({})[1]

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        results: list[Array] = [np.empty(shape, dtype) for shape, dtype in self.outputs]
        self.into(arrays, results)
        return results

    def into(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        run = _Run(self.program, self.arena_bytes, self.parameters)
        run.calls(self.program.calls, [a.ctypes.data for a in (*arrays, *results)])
        if run.status:
            where = "; ".join(f"{k.name}{k.where}" for k in self.program.kernels if k.guarded)
            raise outside(where)


class _Run:
    """One call of a program. It has its own memory, so calls may run at the same time."""

    def __init__(self, program: Program, arena_bytes: int, parameters: ParameterTables | None) -> None:
        self.program = program
        self.memory = aligned_empty(arena_bytes)
        self.table = None if parameters is None else parameters.table(program)
        self.status = 0
        self.spaces = {"arena": self.memory.ctypes.data, "constant": program.constants.ctypes.data}

    def address(self, ref: MemoryRef, buffers: Sequence[int]) -> int:
        if ref.space == "buffer":
            return buffers[ref.number] + ref.inside
        if ref.space == "parameter":
            assert self.table is not None, "programs that read parameters are run with them"
            return int(self.table.pointers[ref.number] or 0) + ref.inside
        return self.spaces[ref.space] + (ref.offset if ref.space == "arena" else ref.number + ref.inside)

    def calls(self, calls: Sequence[Call], buffers: Sequence[int]) -> None:
        """Run kernels, loops and branches. `buffers`: addresses of inputs and outputs of the program or of a body."""
        for c in calls:
            args = [self.address(a, buffers) for a in c.args]
            control = self.program.controls.get(c.symbol)
            if control is None:
                self.status |= self.program.loaded[c.symbol](args)
            elif isinstance(control, Branch):
                chosen = control.then if _holds(args[control.condition]) else control.other
                self.calls(chosen, [args[k] for k in (*control.captured, *control.made)])
            else:
                self.loop(control, args)

    def loop(self, c: Loop, args: Sequence[int]) -> None:
        """Carried values lie in two memories in turn; at last they are where they belong."""
        most = [n for n in (c.length, None if c.trips is None else _number(args[c.trips])) if n is not None]
        going = c.condition is None or _holds(args[c.condition])
        for x in c.carried:
            ctypes.memmove(args[x.end], args[x.start], x.nbytes)
        old, new = [args[x.end] for x in c.carried], [args[x.other] for x in c.carried]
        condition = args[c.next_condition] if c.condition is not None else 0
        number = ctypes.c_int64(0)
        for k in itertools.count():
            if not going or (most and k >= min(most)):
                break
            number.value = k
            scanned, stacked = ([_row(args, r, k, c.length) for r in rows] for rows in (c.scanned, c.stacked))
            inputs = [ctypes.addressof(number), *old, *scanned, *(args[a] for a in c.captured)]
            self.calls(c.body, [*inputs, *([condition] if condition else []), *new, *stacked])
            going = not condition or _holds(condition)
            old, new = new, old
        for x, at in zip(c.carried, old):
            if at != args[x.end]:
                ctypes.memmove(args[x.end], at, x.nbytes)


def _row(args: Sequence[int], r: Row, k: int, length: int | None) -> int:
    return args[r.arg] + r.nbytes * ((length or 0) - 1 - k if r.backward else k)


def _holds(address: int) -> bool:
    return ctypes.c_uint8.from_address(address).value != 0


def _number(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
