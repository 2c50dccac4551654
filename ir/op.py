"""One record per graph op: everything the compiler knows of it stands in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dnnc.ir.errors import ShapeError
from dnnc.ir.types import TensorType

Attrs = dict[str, Any]  # ints, floats, strings, bools, DTypes, Layouts, dims, None, and tuples of them


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
    or none of them and the trait "control": the entry function itself does it, calling the kernels of the subgraphs.
    reference(*ndarray, **attrs) -> ndarray or tuple: NumPy, beside compute; float64 inputs give a float64 result.
    reference_at(inputs, points, **attrs) -> 1-D array: the outputs at `points` (int64 [n, rank]) only; for ops whose
    full reference is slow.
      That of a contraction computes in float64, whatever float its operands are.
    flops(*input types, **attrs) -> multiplications and additions (a symbolic dim counts too).
    An absent optional input is None in all of these; a subgraph is a Graph, for reference and host a function: arrays
    -> list of arrays. traits: "elementwise" (output[i] depends on the inputs at i, broadcast), "placed" (on these and
    on i, so that it means something else in another shape), "movement" (each output element is one input element or a
    constant), "view" (movement that keeps row-major order), "reduction" (over rows), "contraction" (matmul, conv),
    "pure", "bits" (looks at the stored form: the reference gets f16, bf16 and 4-bit arrays as they are stored, all
    others in their compute dtype), "host" (its decomposition has host ops), "sized" (a host op with sizes that only the
    data tells), "own" (none of dnnc's: the text of a
      graph defines it by its expression).
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
    traits: frozenset[str] = frozenset()
    samples: tuple[Sample, ...] = ()
    indices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise TypeError(f"op {self.name!r}: a name is an identifier, since texts of graphs and kernels hold it")
        given = [n for n in ("compute", "decompose", "host") if getattr(self, n) is not None]
        if len(given) != ("control" not in self.traits):
            raise TypeError(f"op {self.name} needs exactly one of compute, decompose, host; it has {given}")
        if self.decompose is None and self.host is None and self.reference is None:
            raise TypeError(f"op {self.name} has no NumPy reference")


def require(ok: bool, message: str, *args: Any) -> None:
    """Raise ShapeError with the formatted message unless ok."""
    if not ok:
        raise ShapeError(message.format(*args))
