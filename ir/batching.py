"""How each op runs on a stack of operands: the rules of `vmap`, for values of a graph or of a trace.

A stack has its rows along axis 0, always: what comes in and goes out elsewhere is transposed at the borders, where that
fuses. A rule gets the operands, each with whether it is a stack, and gives stacks. Ops whose attributes name axes or
shapes have a rule in their record (`batching`); others go by their trait (element-wise), by what they are made of
(decompositions), or by their tensor expression, which gets one more axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dnnc.ir.errors import UnsupportedError
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.te.stacked import stacked
from dnnc.ir.types import TensorType, product


class Typed(Protocol):
    """What rules compute with."""

    @property
    def type(self) -> TensorType: ...


V = TypeVar("V", bound=Typed)


@dataclass(frozen=True)
class Operand(Generic[V]):
    """A value, and whether it is a stack of them. None where an optional operand is absent."""

    value: V | None
    stack: bool

    @property
    def given(self) -> V:
        assert self.value is not None
        return self.value

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of one row."""
        return self.given.type.shape[1:] if self.stack else self.given.type.shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def row(self) -> TensorType:
        """The type of one row."""
        return TensorType(self.given.type.dtype, self.shape)


@dataclass(frozen=True)
class Batch(ABC, Generic[V]):
    """What rules build with. `rows`: how many a stack has."""

    rows: Any

    @abstractmethod
    def all(self, op: str | OpDef, *inputs: V | None, **attrs: Any) -> tuple[V, ...]:
        """The results of an op on whole stacks."""

    def one(self, op: str | OpDef, *inputs: V | None, **attrs: Any) -> V:
        return self.all(op, *inputs, **attrs)[0]

    def reshape(self, x: V, shape: Sequence[Any]) -> V:
        return x if tuple(shape) == x.type.shape else self.one("reshape", x, shape=tuple(shape))

    def stack(self, x: Operand[V]) -> V:
        """As a stack: what is none is repeated."""
        return x.given if x.stack else self.one("expand", x.given, shape=(self.rows, *x.shape))

    def aligned(self, x: Operand[V], rank: int) -> V:
        """For broadcasting against rows of `rank` axes, which aligns shapes at the right."""
        if not x.stack or x.rank >= rank:
            return x.given
        return self.reshape(x.given, (self.rows, *(1,) * (rank - x.rank), *x.shape))


Rule = Callable[..., Sequence[Any]]  # of a batch, the op, its operands, its attributes -> stacks


def rule_of(op: OpDef) -> Rule | None:
    """The rule of an op; None where it is made of others, which have theirs. UnsupportedError where there is no way."""
    if op.batching is not None:
        return op.batching
    if Trait.ELEMENTWISE in op.traits and Trait.CUSTOM not in op.traits and op.compute is not None:
        return elementwise
    if op.decompose is not None and Trait.HOST not in op.traits:
        return None
    if op.compute is not None:
        return by_expression
    raise UnsupportedError(
        f"vmap: {op.name} runs on the host and cannot be applied to many rows; call it outside, or in a loop of Python"
    )


def elementwise(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    rank = max(x.rank for x in xs if x.value is not None)
    return b.all(op, *(None if x.value is None else b.aligned(x, rank) for x in xs), **attrs)


# --- axes -------------------------------------------------------------------------------------------------------------


def along_axes(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    """reduce_sum(x, axes=(0,)) -> reduce_sum(x, axes=(1,))"""
    (x,) = xs
    assert op.reduced is not None
    axes = tuple(a + 1 for a in op.reduced(x.rank, **attrs))
    return b.all(op, x.given, **{**attrs, "axes": axes})


def along_axis(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    """sort(x, axis=0) -> sort(x, axis=1), concat(x, y, axis=0) -> concat(x, y, axis=1): of operands of one rank"""
    axis = normalize_axis(attrs["axis"], xs[0].rank) + 1
    return b.all(op, *map(b.stack, xs), **{**attrs, "axis": axis})


def trailing(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    """det(x[n, n]) -> det(x[b, n, n]): leading axes are rows already"""
    (x,) = xs
    return b.all(op, x.given, **attrs)


# --- movement ---------------------------------------------------------------------------------------------------------


def reshape(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    return b.all(op, xs[0].given, shape=(b.rows, *attrs["shape"]))


def expand(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    (x,) = xs
    rank = max(x.rank, len(attrs["shape"]))
    shape = (1,) * (rank - len(attrs["shape"])) + attrs["shape"]
    return b.all(op, b.aligned(x, rank), shape=(b.rows, *shape))


def transpose(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    return b.all(op, xs[0].given, perm=(0, *(p + 1 for p in attrs["perm"])))


def tile(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    return b.all(op, xs[0].given, repeats=(1, *attrs["repeats"]))


def slice_(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    return b.all(
        op, xs[0].given, starts=(0, *attrs["starts"]), steps=(1, *attrs["steps"]), shape=(b.rows, *attrs["shape"])
    )


def pad(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    x, fill = xs[0], xs[1] if len(xs) > 1 else Operand[V](None, False)
    if fill.stack or not x.stack:
        return by_expression(b, op, xs, attrs)
    pads = attrs["pads"]
    return b.all(op, x.given, fill.value, **{**attrs, "pads": (0, *pads[: x.rank], 0, *pads[x.rank :])})


# --- indices ----------------------------------------------------------------------------------------------------------


def gather(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    """Indices of each row into its own row, by `gather_elements`, which checks them against the row."""
    x, at = xs
    axis = normalize_axis(attrs["axis"], x.rank)
    if not at.stack:
        return b.all(op, x.given, at.given, axis=axis + 1)
    if not x.stack:
        y = b.one(op, x.given, at.given, axis=axis)  # the rows come where the axis was
        return (
            [b.one("transpose", y, perm=(axis, *(k for k in range(len(y.type.shape)) if k != axis)))] if axis else [y]
        )
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    count = product(at.shape)
    flat = b.reshape(at.given, (b.rows, *(1 for _ in before), count, *(1 for _ in after)))
    wide = b.one("expand", flat, shape=(b.rows, *before, count, *after))
    return [b.reshape(b.one("gather_elements", x.given, wide, axis=axis + 1), (b.rows, *before, *at.shape, *after))]


def gather_nd(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    return b.all(op, *map(b.stack, xs), batch_dims=attrs["batch_dims"] + 1)


def scatter_nd(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    """Places in a vector are elements along its axis; more axes go by the tensor expression."""
    x, at, updates = xs
    if x.rank != 1 or at.rank != 2:
        return by_expression(b, op, xs, attrs)
    places = b.stack(at)
    flat = b.reshape(places, (b.rows, *at.shape[:1]))
    return b.all("scatter_elements", b.stack(x), flat, b.stack(updates), axis=1, reduction=attrs["reduction"])


# --- products ---------------------------------------------------------------------------------------------------------


def matmul(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    """Batch a product with one shared matrix: x[b, m, k] @ w is x[b*m, k] @ w, and a @ y[b, k] is y @ a.T."""
    x, y = xs
    if x.stack and not y.stack and y.rank == 2 and x.rank >= 1:
        flat = b.reshape(x.given, (product((b.rows, *x.shape[:-1])), x.shape[-1]))
        made = b.one(op, flat, y.given, **attrs)
        return [b.reshape(made, (b.rows, *x.shape[:-1], y.shape[1]))]
    if y.stack and not x.stack and x.rank == 2 and (y.rank == 1 or (y.rank == 2 and y.shape[1] == 1)):
        flat = b.reshape(y.given, (b.rows, y.shape[0]))
        made = b.one(op, flat, b.one("transpose", x.given, perm=(1, 0)), **attrs)
        return [b.reshape(made, (b.rows, x.shape[0], *y.shape[1:]))]
    if x.rank < 2 or y.rank < 2:
        return _with_vectors(b, op, x, y, attrs)
    rank = max(x.rank, y.rank)
    return b.all(op, b.aligned(x, rank), b.aligned(y, rank), **attrs)


def _with_vectors(b: Batch[V], op: OpDef, x: Operand[V], y: Operand[V], attrs: dict[str, Any]) -> Sequence[V]:
    """A vector is a row, or a column, for the time being."""
    rows = b.rows if x.stack else None
    columns = b.rows if y.stack else None
    p = Operand(b.reshape(x.given, (*_lead(rows), 1, *x.shape)), x.stack) if x.rank == 1 else x
    q = Operand(b.reshape(y.given, (*_lead(columns), *y.shape, 1)), y.stack) if y.rank == 1 else y
    (made,) = matmul(b, op, (p, q), attrs)
    shape = list(made.type.shape)
    if y.rank == 1:
        del shape[-1]
    if x.rank == 1:
        del shape[-1 if y.rank == 1 else -2]
    return [b.reshape(made, shape)]


def _lead(rows: Any) -> tuple[Any, ...]:
    return () if rows is None else (rows,)


def images(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    """conv(x[b, n, c, h, w], w) is conv(x[b*n, c, h, w], w): the first axis of an image is that of a batch already"""
    x, *rest = xs
    if not x.stack or any(r.stack for r in rest):
        return by_expression(b, op, xs, attrs)
    flat = b.reshape(x.given, (product((b.rows, x.shape[0])), *x.shape[1:]))
    return [
        b.reshape(y, (b.rows, x.shape[0], *y.type.shape[1:]))
        for y in b.all(op, flat, *(r.value for r in rest), **attrs)
    ]


def by_expression(b: Batch[V], op: OpDef, xs: Sequence[Operand[V]], attrs: dict[str, Any]) -> Sequence[V]:
    """The tensor expression with one more axis; see `dnnc.ir.te.stacked`."""
    which = tuple(x.stack for x in xs)
    record = stacked(op, which, tuple(None if x.value is None else x.value.type for x in xs), tuple(attrs.items()))
    return b.all(record, *(x.value for x in xs), **attrs)
