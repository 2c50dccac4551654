"""A linked program as data: places, calls, loops, code, constants, memory; from a graph or a saved model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from dnnc.backends.runtime.device import Device, Launch
from dnnc.ir.arena import Arena
from dnnc.ir.expr import Var
from dnnc.ir.types import Dim, TensorType

if TYPE_CHECKING:
    from dnnc.backends.runtime.prologue import Prologue
    from dnnc.passes.planning.program import ScheduledGraph

Array = np.ndarray[Any, Any]
Check = Callable[[Device, Any, Launch], None]  # runs a kernel once on a device and compares; AccuracyError
CONTROL = "control"  # the choice of what is no kernel but a loop or a branch
ConstantPlace = tuple[int, Array, TensorType]  # byte in the block of constants, elements, and how they lie there


@dataclass(frozen=True)
class MemoryRef:
    """Where a kernel argument lies."""

    # "buffer" (input or output of the call), "constant", "parameter", "arena"; "size" is no place but a number
    space: str
    # of the buffer; of a constant its byte offset; index into the table of parameters; of the arena's slot; the size
    number: int
    offset: int = -1  # byte in a static arena; -1 where sizes are symbolic
    nbytes: int = -1  # bytes in a static arena; -1 where sizes are symbolic
    inside: int = 0  # byte at which the argument begins within its slot; a static offset counts it already
    life: tuple[int, int] | None = None  # (first, last) step during which a symbolic slot is exclusive, or None

    def meets(self, other: MemoryRef) -> bool:
        """May the two overlap?"""
        if self.space != other.space or self.space in ("constant", "parameter", "size"):
            return False
        if self.space == "buffer":
            apart = self.nbytes >= 0 <= other.nbytes and (
                self.inside + self.nbytes <= other.inside or other.inside + other.nbytes <= self.inside
            )
            return self.number == other.number and not apart
        if (
            self.offset < 0 or other.offset < 0
        ):  # a symbolic plan: offsets differ from call to call, but never do two slots alive at one step overlap
            a, b = self.life, other.life
            return self.number == other.number or not (a and b and a[0] <= b[1] and b[0] <= a[1])
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


@dataclass(frozen=True)
class Call:
    """A kernel: `writes` are among `args` (of a loop also its body's memory); `dims` index the dims array.

    The kernel's arguments are the dims, then `args`, which begin with the sizes of a kernel that serves several.
    """

    symbol: str
    args: tuple[MemoryRef, ...]
    writes: tuple[MemoryRef, ...]
    dims: tuple[int, ...]
    parallel: bool


@dataclass(frozen=True)
class Row:
    """An operand or result of which an iteration sees one row of so many bytes; `backward` counts from the end."""

    arg: int
    nbytes: int
    backward: bool


@dataclass(frozen=True)
class Carried:
    """Arguments: where the value comes from, where its last version goes, and the second memory; and its bytes."""

    start: int
    end: int
    other: int
    nbytes: int


@dataclass(frozen=True)
class Loop:
    """A loop as a function of `args` pointers. `trips` and `condition` are arguments or None; `length`: iterations at
    most, None for no bound; `next_condition`: argument of two places of ALIGN bytes.
    """

    symbol: str
    args: int
    trips: int | None
    condition: int | None
    length: int | None
    carried: tuple[Carried, ...]
    scanned: tuple[Row, ...]
    captured: tuple[int, ...]
    stacked: tuple[Row, ...]
    next_condition: int
    body: tuple[Call, ...]


@dataclass(frozen=True)
class Branch:
    """A branch as a function of `args` pointers: the chosen body reads `captured` and writes `made`."""

    symbol: str
    args: int
    condition: int
    captured: tuple[int, ...]
    made: tuple[int, ...]
    then: tuple[Call, ...]
    other: tuple[Call, ...]


Control = Union[Loop, Branch]


def written_in_place(donated: Mapping[int, int], calls: Sequence[Call], inputs: int) -> frozenset[int]:
    """Return the outputs that a program of so many inputs writes only into their donated inputs' memory."""
    used = {p.number for c in calls for p in c.args if p.space == "buffer"}
    return frozenset(k for k in donated if inputs + k not in used)


@dataclass(frozen=True)
class CompiledKernel:
    """A unique kernel, as data; or a loop or branch, whose function stands in the object of the entry."""

    name: str  # for people; kernels of one program may share it
    symbol: str  # the name of its function, a hash of all that its code depends on
    text: str  # operator IR; of a loop or branch its LLVM text
    choice: str  # its schedule; CONTROL for a loop or branch
    parallel: bool  # do all threads take part?
    where: str  # `at conv1 (Conv, opset 13)`, where its values come from; empty when nothing is known
    calls: tuple[str, ...]  # for each call of it, the nodes of the model that this call computes
    nodes: tuple[str, ...]  # the names of all these nodes

    @property
    def control(self) -> bool:
        """Is it a loop or branch, and no kernel?"""
        return self.choice == CONTROL

    @property
    def guarded(self) -> bool:
        """Does it read at indices that are known at run time only?"""
        return "guard(" in self.text


@dataclass(eq=False)
class Program:
    """A linked program: all that a call, a report and a saved model need of it, and nothing that made it."""

    kernels: tuple[CompiledKernel, ...]  # unique kernels in order of their first call, then loops and branches
    code: Mapping[str, bytes]  # machine code by symbol
    calls: tuple[Call, ...]  # kernels, loops and branches in order
    controls: Mapping[str, Control]  # loops and branches by symbol
    dims: tuple[Var, ...]  # symbolic dims in the order in which a call passes them
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    arena: Arena  # plan of the memory between calls
    constant_bytes: int  # size of the block of constants
    make_constants: Callable[[], Array]  # gives that block, 64-byte aligned
    graph_text: Callable[[bool], str]  # text of the graph after the passes; with True, comments name the nodes' origins
    # by symbol, how a device starts the kernel; empty for CPUs
    launches: Mapping[str, Launch] = field(default_factory=dict)
    # by symbol, names of the kernel's parameters; empty for CPUs
    params: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    compiled: int = 0  # number of kernels that were not in the cache
    texts: Mapping[str, str] = field(default_factory=dict)  # by symbol, source of what was compiled here
    # by symbol, kernel checks that wait for a device; those that passed are removed
    checks: dict[str, Check] = field(default_factory=dict)
    make_scheduled: Callable[[], ScheduledGraph] | None = None  # gives what it was made of; None for a loaded program
    prologue: Prologue | None = None  # computes what kernels read of parameters; None if they read none
    # output number -> number of the input whose memory it takes
    donated: Mapping[int, int] = field(default_factory=dict)
    flush: bool = False  # True if denormals are zero while it runs
    loaded: Any = None  # what its backend has loaded of it
    constant_places: Sequence[ConstantPlace] = ()  # what the block of constants consists of; empty for a loaded program
    # by symbol, floating-point operations and bytes (both ways) of a call; empty for a loaded program
    work: Mapping[str, tuple[Dim, Dim]] = field(default_factory=dict)
    placed: tuple[tuple[int, ...], int] | None = None  # `sizes` of a program of fixed sizes; None where it is not known

    @cached_property
    def scheduled(self) -> ScheduledGraph | None:
        """What it was made of, scheduled again for a program out of the cache; None for a loaded program."""
        return None if self.make_scheduled is None else self.make_scheduled()

    @cached_property
    def constants(self) -> Array:
        """The block of constants; made when first asked for, since a program that is only saved needs none."""
        return self.make_constants()

    @property
    def parallel(self) -> bool:
        """True if any kernel shares its work between threads."""
        return any(c.parallel for c in self.calls)

    @property
    def guarded(self) -> bool:
        """True if any kernel reads at indices that are known at run time only."""
        return any(k.guarded for k in self.kernels)

    @property
    def symbols(self) -> dict[str, str]:
        """Kernel text -> symbol."""
        return {k.text: k.symbol for k in self.kernels}

    def sizes(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets into the arena, and its size, for given dims."""
        if self.placed is not None and not self.dims:
            return list(self.placed[0]), self.placed[1]
        return self.arena.offsets(dims)


def offsets_of_constants(calls: Sequence[Call]) -> list[int]:
    """Where constants begin in the block of a program, in order; each reaches to the next, padding included."""
    return sorted({a.number for c in calls for a in c.args if a.space == "constant"})
