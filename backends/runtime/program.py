"""A linked program's parts as data: where values lie, which calls are made, loops and branches, and what is known of
each kernel.

They come from a scheduled program (`link.py`) or out of a saved model; every backend runs them in its own way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

CONTROL = "control"  # the choice of what is no kernel but a loop or a branch


@dataclass(frozen=True)
class Place:
    """Memory of one argument: `space` is "buffer" (number), "constant" (byte offset), "bound" (number among what is
    read of parameters), "arena" (slot; offset and size when static).

    `inside`: the byte at which the argument begins within it; the offset of a static plan counts it already.
    `life`: of a symbolic plan's slot the first and the last step at which its bytes are nobody else's, if that is
        known.
    """

    space: str
    number: int
    offset: int = -1
    nbytes: int = -1
    inside: int = 0
    life: tuple[int, int] | None = None

    def meets(self, other: Place) -> bool:
        """May the two overlap?"""
        if self.space != other.space or self.space in ("constant", "bound"):
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
    """One kernel: `writes` are among `args`, those of a loop also the memory that its body uses; `dims` are positions
    in the dims array.
    """

    symbol: str
    args: tuple[Place, ...]
    writes: tuple[Place, ...]
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
    """A branch as a function of `args` pointers: the body that the condition chooses reads `captured` and writes
    `made`.
    """

    symbol: str
    args: int
    condition: int
    captured: tuple[int, ...]
    made: tuple[int, ...]
    then: tuple[Call, ...]
    other: tuple[Call, ...]


Control = Union[Loop, Branch]


def placed(donated: Mapping[int, int], calls: Sequence[Call], inputs: int) -> frozenset[int]:
    """The outputs that a program of so many inputs writes into the memory of the input that was donated for them: it
    knows no other place.
    """
    used = {p.number for c in calls for p in c.args if p.space == "buffer"}
    return frozenset(k for k in donated if inputs + k not in used)


@dataclass(frozen=True)
class NativeKernel:
    """A unique kernel, as data; or a loop or branch, whose function stands in the object of the entry.

    Attributes:
        name: for people; kernels of one program may share it.
        symbol: the name of its function, a hash of all that its code depends on.
        text: operator IR; of a loop or branch its LLVM text.
        choice: its schedule; CONTROL for a loop or branch.
        parallel: do all threads take part?
        where: `at conv1 (Conv, opset 13)`, where its values come from; empty when nothing is known.
        calls: for each call of it, the nodes of the model that this call computes.
        nodes: the names of all these nodes.
    """

    name: str
    symbol: str
    text: str
    choice: str
    parallel: bool
    where: str
    calls: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def control(self) -> bool:
        """Is it a loop or branch, and no kernel?"""
        return self.choice == CONTROL

    @property
    def guarded(self) -> bool:
        """Does it read at indices that are known at run time only?"""
        return "guard(" in self.text
