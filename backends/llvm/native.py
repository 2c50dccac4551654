"""A linked program as data: all that a call, a report and a saved model need of it, and nothing that made it.

It comes from a scheduled program (`build.py`) or out of a saved model; whoever runs it loads neither the passes nor the
emitter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.llvm.compile import Loaded
from dnnc.backends.runtime.program import Call, NativeKernel
from dnnc.ir.arena import Arena
from dnnc.ir.expr import Expr, Var, const, substitute, value
from dnnc.ir.types import TensorType

if TYPE_CHECKING:
    from dnnc.backends.runtime.prologue import Prologue
    from dnnc.passes.planning.program import Program

Array = np.ndarray[Any, Any]
FORMAT = "1"  # of kernels and their calling convention; part of every cache key and of saved models
ENTRY = "entry"  # the symbol of an entry function


@dataclass
class Native:
    """A program that can be called: `entry` is the address of its entry function; it lives as long as this object.

    Attributes:
        loaded: its linked objects.
        entry: address of `i64 entry(frame, buffers, dims, tid, nthreads)`.
        constants: one block of bytes, 64-byte aligned.
        calls: what the entry function does, in order.
        dims: symbolic dims in the order in which a call passes them.
        outputs: types of the outputs.
        arena: the plan of the memory between the calls.
        kernels: the unique kernels in order of their first call.
        objects: symbol -> ELF object; the entry function's under ENTRY.
        graph_text: the graph after the passes; with True, with comments that say where nodes come from.
        compiled: kernels that were not in the cache.
        texts: symbol -> LLVM text, of what was compiled here.
        program: what it was made of; None where it was loaded.
        flush: are denormals zero while it runs?
        prologue: makes what its kernels read of parameters, whose addresses stand in the table FRAME_BOUND; None where
            there are none.
    """

    loaded: Loaded
    entry: int
    constants: Array
    calls: tuple[Call, ...]
    dims: tuple[Var, ...]
    outputs: tuple[TensorType, ...]
    arena: Arena
    kernels: tuple[NativeKernel, ...]
    objects: Mapping[str, bytes]
    graph_text: Callable[[bool], str]
    compiled: int = 0
    texts: Mapping[str, str] = field(default_factory=dict)
    program: Program | None = None
    flush: bool = False
    prologue: Prologue | None = None

    @property
    def parallel(self) -> bool:
        """Does any kernel share its work between threads?"""
        return any(c.parallel for c in self.calls)

    @property
    def symbols(self) -> dict[str, str]:
        """Kernel text -> symbol."""
        return {k.text: k.symbol for k in self.kernels}

    @property
    def constant_bytes(self) -> int:
        return self.constants.nbytes

    def sizes(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets into the arena, and its size, for given dims."""
        return self.arena.offsets(dims)


def shape_of(t: TensorType, env: Mapping[Expr, Expr]) -> tuple[int, ...]:
    """A shape with its symbolic dims filled in."""
    out = []
    for d in t.shape:
        n = value(substitute(const(d), env))
        assert n is not None, f"{d!r} is not fixed by the dims of the call"
        out.append(n)
    return tuple(out)


def offsets_of_constants(calls: Sequence[Call]) -> list[int]:
    """Where constants begin in the block of a program, in order; each reaches to the next, padding included."""
    return sorted({a.number for c in calls for a in c.args if a.space == "constant"})
