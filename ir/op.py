"""One record per graph op: everything the compiler knows of it stands in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dnnc.ir.errors import ShapeError
from dnnc.ir.types import TensorType

Attrs = dict[str, Any]  # ints, floats, strings, bools, DTypes, Layouts, dims, None, and tuples of them


class Trait(Enum):
    """A property of an op that holds for all its operands and attributes."""

    ELEMENTWISE = "elementwise"  # output[i] depends on the inputs at i alone, broadcast
    PLACED = "placed"  # output[i] depends on the inputs at i and on i itself: another shape gives another meaning
    MOVEMENT = "movement"  # each output element is one input element or a constant
    VIEW = "view"  # a movement that keeps row-major order
    REDUCTION = "reduction"  # reduces rows
    CONTRACTION = "contraction"  # matmul, conv, attention
    LOOPS = "loops"  # its expression has reductions, though it reduces no rows
    SCATTER = "scatter"  # its expression writes updates to places that the data tells
    SEQUENTIAL = "sequential"  # the elements of a row are computed one after the other, and nothing is fused to it
    PURE = "pure"  # no effect: a node whose result nobody reads can go
    RANDOM = "random"  # gives another result each time
    BITS = "bits"  # reads the stored form: its reference gets f16, bf16 and 4-bit arrays as they are stored
    HOST = "host"  # its decomposition has host ops
    SIZED = "sized"  # a host op with sizes that only the data tells
    CONTROL = "control"  # a loop or a branch: the entry function itself does it, calling the kernels of the subgraphs
    CUSTOM = "custom"  # not in OPS: the text of a graph defines it by its expression

    __hash__ = object.__hash__  # members are unique; Enum's own hash runs Python code


@dataclass(frozen=True, slots=True)
class Sample:
    """Input types and attributes on which tests run an op; `domain` bounds the values drawn for the inputs."""

    inputs: tuple[TensorType, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    domain: tuple[float, float] = (-2.0, 2.0)


@dataclass(frozen=True, eq=False)
class OpDef:
    """What an op is.

    type(*input types, **attrs) -> output type or tuple of them; raises ShapeError.
    Exactly one of
      compute(*te.Tensor, **attrs) -> te.Tensor or tuple: a tensor expression over logical indices, for every target,
      decompose(builder, *Value, **attrs) -> Value or tuple: in terms of other ops,
      host(*arrays, **attrs): Python that runs on the host (strings, sequences, and rare ops only),
    or none of them and Trait.CONTROL.
    reference(*ndarray, **attrs) -> ndarray or tuple: NumPy, beside compute; float64 inputs give a float64 result.
      Arrays come in their compute dtype, but for Trait.BITS.
    reference_at(inputs, points, **attrs) -> 1-D array: the outputs at `points` (int64 [n, rank]) only; for ops whose
      full reference is slow. That of a contraction computes in float64, whatever float its operands are.
    flops(*input types, **attrs) -> multiplications and additions (a symbolic dim counts too).
    An absent optional input is None in all of these; a subgraph is a Graph, for reference and host a function: arrays
    -> list of arrays.
    indices: positions of the operands that say which elements of others are read.
    """

    name: str
    type: Callable[..., Any]
    compute: Callable[..., Any] | None = None
    decompose: Callable[..., Any] | None = None
    host: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    reference_at: Callable[..., Any] | None = None
    flops: Callable[..., Any] | None = None
    traits: frozenset[Trait] = frozenset()
    samples: tuple[Sample, ...] = ()
    indices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = [n for n in ("compute", "decompose", "host") if getattr(self, n) is not None]
        if len(given) != (Trait.CONTROL not in self.traits):
            raise TypeError(f"op {self.name} needs exactly one of compute, decompose, host; it has {given}")
        if self.decompose is None and self.host is None and self.reference is None:
            raise TypeError(f"op {self.name} has no NumPy reference")


def require(ok: bool, message: str, *args: Any) -> None:
    """Raise ShapeError with the formatted message unless ok."""
    if not ok:
        raise ShapeError(message.format(*args))
