"""One record per graph op: everything the compiler knows of it stands in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from importlib import import_module
from typing import Any

from dnnc.ir.errors import ShapeError
from dnnc.ir.types import Dim, TensorType

Attrs = dict[str, Any]  # ints, floats, strings, bools, DTypes, Layouts, dims, None, and tuples of them


class Trait(Enum):
    """A property of an op that holds for all its operands and attributes."""

    # form
    ELEMENTWISE = "elementwise"  # output[i] depends on the inputs at i alone, broadcast
    PLACED = "placed"  # output[i] depends on the inputs at i and on i itself: another shape gives another meaning
    MOVEMENT = "movement"  # each output element is one input element or a constant
    VIEW = "view"  # a movement that keeps row-major order
    CONVERSION = "conversion"  # the same numbers in another dtype
    RELAYOUT = "relayout"  # the same values in another layout
    REDUCTION = "reduction"  # reduces rows
    CONTRACTION = "contraction"  # matmul, conv, attention
    LOOPS = "loops"  # its expression has reductions, though it reduces no rows
    SCATTER = "scatter"  # its expression writes updates to places that the data tells
    SEQUENTIAL = "sequential"  # the elements of a row are computed one after the other, and nothing is fused to it
    STORED = "stored"  # its operands are how its result is stored: kernels that read the result compute it
    # effects and execution
    PURE = "pure"  # no effect: a node whose result nobody reads can go
    RANDOM = "random"  # gives another result each time
    BITS = "bits"  # reads the stored form: its reference gets f16, bf16 and 4-bit arrays as they are stored
    HOST = "host"  # its decomposition has host ops
    SIZED = "sized"  # a host op with sizes that only the data tells
    CONTROL = "control"  # a loop or a branch: the entry function itself does it, calling the kernels of the subgraphs
    ITERATES = "iterates"  # a control op whose body runs again and again on what it made
    RECURRENT = "recurrent"  # one kernel runs its body, step after step; the body reads values that no operand names
    CUSTOM = "custom"  # not in OPS: the text of a graph defines it by its expression
    FOREIGN = "foreign"  # its reference is a user's code, of which no text tells
    # algebra
    COMMUTATIVE = "commutative"  # a op b == b op a, bit by bit (the payload of a NaN apart)
    IDEMPOTENT = "idempotent"  # op(op(x)) == op(x)
    INVOLUTION = "involution"  # op(op(x)) == x
    NOT_NEGATIVE = "not_negative"  # the result is 0.0 or more, or NaN; -0.0 is negative
    KEEPS_SIGN = "keeps_sign"  # the result is not negative where no operand is
    # rounding
    AMPLIFIES = "amplifies"  # a small error of an operand may become a large one: steps, large arguments of sin
    ACCUMULATES = "accumulates"  # a number made of many elements, which may leave the range of a half type
    SELECTS = "selects"  # one element of a window, or their mean: a half type holds it as well as it holds the elements
    CANCELS = "cancels"  # the difference of its operand and a share of it: its error is relative to the operand
    # access
    ROWWISE = "rowwise"  # passes over each row more than once: along one axis, or all axes from one on
    NORM = "norm"  # a rowwise norm, which may stand in front of a product in one kernel
    WINDOW = "window"  # a window slides over the first operand: neighbouring results read the same elements
    CHANNELWISE = "channelwise"  # a window over each channel by itself, in whatever layout channels lie
    RESAMPLES = "resamples"  # moves elements of images about, or mixes neighbours: channel by channel if it keeps these
    FILLS = "fills"  # some elements may be zeros that no operand holds; with a mode only where that is "constant"
    ARG = "arg"  # the place of an extreme element

    __hash__ = object.__hash__  # members are unique; Enum's own hash runs Python code


PURE = frozenset((Trait.PURE,))
ELEMENTWISE = frozenset((Trait.PURE, Trait.ELEMENTWISE))
MOVEMENT = frozenset((Trait.PURE, Trait.MOVEMENT))
VIEW = frozenset((Trait.PURE, Trait.MOVEMENT, Trait.VIEW))
REDUCTION = frozenset((Trait.PURE, Trait.REDUCTION))
CONTRACTION = frozenset((Trait.PURE, Trait.CONTRACTION))
LOOPS = frozenset((Trait.PURE, Trait.LOOPS))
ROWWISE = REDUCTION | {Trait.ROWWISE}


class ContractionForm(Enum):
    """Which axes of its operands a contraction sums over: kernels, layouts and libraries go by it."""

    PRODUCT = "product"  # [..., M, K] @ [..., K, N], as NumPy's matmul
    CONVOLUTION = "convolution"  # images [N, C, ...] and filters [O, C/group, ...], strided, padded, dilated
    FILTERS = "filters"  # images [N, C, ...] and cotangents [N, O, ...] -> filters [O, C/group, ...], over pixels
    ATTENTION = "attention"  # queries [..., M, D], keys [..., N, D], values [..., N, E], and a mask


# A trait -> the one that it is a case of.
IMPLIED = {
    Trait.VIEW: Trait.MOVEMENT,
    Trait.RELAYOUT: Trait.MOVEMENT,
    Trait.CONVERSION: Trait.ELEMENTWISE,
    Trait.ROWWISE: Trait.REDUCTION,
    Trait.NORM: Trait.ROWWISE,
    Trait.WINDOW: Trait.REDUCTION,
    Trait.CHANNELWISE: Trait.WINDOW,
    Trait.ARG: Trait.REDUCTION,
    Trait.ITERATES: Trait.CONTROL,
    Trait.RECURRENT: Trait.SEQUENTIAL,
}


class Cost(IntEnum):
    """What it takes to compute an element again, in the place of keeping it in memory."""

    CHEAP = 0  # a few instructions
    LIGHT = 1  # no longer than to write the element and read it again
    COSTLY = 2  # longer than that
    HEAVY = 3  # many other elements: never computed twice


# Traits of ops each of whose elements is made of many others, or on the host.
HEAVY = (Trait.CONTRACTION, Trait.REDUCTION, Trait.LOOPS, Trait.SCATTER, Trait.HOST, Trait.SIZED)


@dataclass(frozen=True, slots=True)
class Index:
    """The operand of an op that holds indices."""

    operand: int  # its position
    # (*input types, **attrs) -> the sizes of the axes that one of its tuples, or numbers, addresses
    addressed: Callable[..., Sequence[Dim]]
    wraps: bool = True  # negative indices count from the end
    loads: bool = True  # indices say which elements of other operands are read
    starts: int | None = None  # the position of the operand that says where rows of indices begin: rising numbers
    rows: int | None = None  # the position of an operand of rising indices, of which neighbours are often equal


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
    contraction: of ops with Trait.CONTRACTION and a tensor expression of one of these forms.
    cost: HEAVY by itself for ops with one of the traits HEAVY.
    open_sizes: names of the axes of its operands, None for those whose size decides how fast a kernel is: eagerly, one
      program serves all sizes of the others.
    neutral: the second operand that changes nothing, -0.0 and 0.0 being two numbers: op(x, neutral) is x.
    index: the operand that holds indices.
    deciding: how many operands, the first ones, say whether and how often its bodies run.
    wide_operands: positions of operands that stay float32 however floats are stored.
    reduced(rank of the first operand, **attrs) -> the sorted axes along which it reduces rows.
    terms(*input types, **attrs) -> the number of products that are summed for each element.
    equal_dims(*input types, **attrs) -> pairs of dims that must be equal; without it those that broadcast.
      Attributes may be absent or wrong: it is asked where the type rule failed.
    decompose_serial: like decompose, for machines on which one thread walks a row, and with `lanes`, the float32
        elements of a vector.
    batching(b, op, operands, attrs) -> results for stacks of operands; see `dnnc.ir.batching`. Without it, the op's
      traits, decomposition or tensor expression say how.
    vjp(b, node, cotangents, needed) -> cotangents of operands by position: a mapping with values of the operands' types
      for those of `needed` that have one. `cotangents` has one for each result, None for zero. Without it, the tensor
      expression or the decomposition says how; see `dnnc.ir.autodiff`.
    vjp_operands: positions of operands that the vjp alone reads, forgotten once gradients are taken.
    jvp(b, node, tangents) -> tangents of the results, None for zero; without it, the transpose of the vjp.
    sharding(*input types, **attrs) -> for each operand and result the factor of each of its axes.
    quantization(b, node, operands) -> the node on quantized operands.
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
    contraction: ContractionForm | None = None
    cost: Cost = Cost.CHEAP
    neutral: float | bool | None = None
    index: Index | None = None
    open_sizes: tuple[tuple[str | None, ...], ...] = ()
    deciding: int = 0
    wide_operands: tuple[int, ...] = ()
    reduced: Callable[..., tuple[int, ...]] | None = None
    terms: Callable[..., Dim] | None = None
    equal_dims: Callable[..., Sequence[tuple[Dim, Dim]]] | None = None
    decompose_serial: Callable[..., Any] | None = None
    batching: Callable[..., Sequence[Any]] | None = None
    vjp: Callable[..., Mapping[int, Any]] | None = None
    vjp_operands: tuple[int, ...] = ()
    jvp: Callable[..., Sequence[Any]] | None = None
    sharding: Callable[..., Sequence[Any]] | None = None
    quantization: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise TypeError(f"op {self.name!r}: a name is an identifier, since texts of graphs and kernels hold it")
        given = [n for n in ("compute", "decompose", "host") if getattr(self, n) is not None]
        if len(given) != (Trait.CONTROL not in self.traits):
            raise TypeError(f"op {self.name} needs exactly one of compute, decompose, host; it has {given}")
        if self.decompose is None and self.host is None and self.reference is None:
            raise TypeError(f"op {self.name} has no NumPy reference")
        if self.decompose_serial is not None and self.decompose is None:
            raise TypeError(f"op {self.name} has decompose_serial, but no decompose")
        if self.contraction is not None and (Trait.CONTRACTION not in self.traits or self.compute is None):
            raise TypeError(f"op {self.name} has a form of contraction, but is none with a tensor expression")
        if self.reduced is not None and Trait.REDUCTION not in self.traits:
            raise TypeError(f"op {self.name} has reduced, but not the trait reduction")
        for special, general in IMPLIED.items():
            if special in self.traits and general not in self.traits:
                raise TypeError(f"op {self.name} has the trait {special.value}, but not {general.value}")
        if not self.traits.isdisjoint(HEAVY):
            object.__setattr__(self, "cost", Cost.HEAVY)


def require(ok: bool, message: str, *args: Any) -> None:
    """Raise ShapeError with the formatted message unless ok."""
    if not ok:
        raise ShapeError(message.format(*args))


def known_ops() -> Mapping[str, OpDef]:
    """dnnc's own ops by name. Their records decompose by graphs, so nothing that graphs need can import them."""
    found: Mapping[str, OpDef] = import_module("dnnc.ir.ops").OPS
    return found
