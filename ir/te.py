"""Tensor expressions: what an op computes, element by element over logical indices, for every target alike.

A Tensor is a buffer with a *stage* that says what each of its elements is. An op's `compute` gets Tensors without stages (its inputs)
and returns Tensors whose stages load from them, perhaps through further Tensors. Lowering inlines, places and schedules the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dnnc.ir.dtype import DType
from dnnc.ir.expr import E, Expr, Load, Var, cast, const, load, unwrap, var, walk
from dnnc.ir.operator.stmt import Buffer
from dnnc.ir.types import Dim

COMBINE = ("sum", "prod", "max", "min", "fmax")  # fmax: a maximum that need not propagate NaN


@dataclass(frozen=True, eq=False)
class Stage:
    """`out[axes] = value`, or `out[axes] = combine over reduce of value where cond holds`, starting from the combine's identity.

    `value` has the dtype in which registers compute; a reduction is combined in that dtype and only the result is rounded to out's.
    Where an element depends on others of the same tensor, `own` stands for it in `value`: those before it along the last axis.
    """

    axes: tuple[Var, ...]
    value: Expr
    reduce: tuple[Var, ...] = ()
    combine: str = ""
    where: Expr | None = None
    own: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Tensor(Buffer):
    """A logical array: the inputs of `compute` have no stage. Reading an element gives it in its compute dtype."""

    stage: Stage | None = None

    def __getitem__(self, idx: E | tuple[E, ...]) -> Expr:
        return cast(load(self, idx if isinstance(idx, tuple) else (idx,)), self.dtype.computed)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The shape with constants as ints."""
        return tuple(unwrap(d) for d in self.shape)


def placeholder(name: str, dtype: DType, shape: Sequence[Dim]) -> Tensor:
    return Tensor(name, dtype, tuple(map(const, shape)))


def placeholder_axis(name: str) -> Var:
    """An index variable that belongs to no loop."""
    return var(name, lo=0)


def _axes(shape: Sequence[Dim], prefix: str) -> tuple[Var, ...]:
    return tuple(var(f"{prefix}{k}", lo=0, hi=unwrap(const(d) - 1)) for k, d in enumerate(shape))


def compute(shape: Sequence[Dim], dtype: DType, element: Callable[..., Expr], name: str = "t") -> Tensor:
    """`t[i0, i1, ...] = element(i0, i1, ...)`."""
    axes = _axes(shape, "i")
    return Tensor(name, dtype, tuple(map(const, shape)), stage=Stage(axes, const(element(*axes), dtype.computed)))


def reduce(
    shape: Sequence[Dim],
    extents: Sequence[Dim],
    dtype: DType,
    combine: str,
    element: Callable[..., Expr],
    where: Callable[..., Expr] | None = None,
    name: str = "t",
) -> Tensor:
    """`t[i...] = combine over r... of element(i..., r...)`, over those r where `where(i..., r...)` holds.

    `element` is only evaluated where `where` holds, so it may then index outside its operands.
    """
    assert combine in COMBINE
    axes, rs = _axes(shape, "i"), _axes(extents, "r")
    cond = where(*axes, *rs) if where is not None else None
    stage = Stage(axes, const(element(*axes, *rs), dtype.computed), rs, combine, cond)
    return Tensor(name, dtype, tuple(map(const, shape)), stage=stage)


def recur(shape: Sequence[Dim], dtype: DType, element: Callable[..., Expr], name: str = "t") -> Tensor:
    """`t[i0, ..., in] = element(t, i0, ..., in)`, which may read elements of t before it along the last axis: same i0, ..., smaller in.

    The op's trait is "sequential": the elements of a row are computed one after the other, and nothing is fused to it.
    """
    own, axes = placeholder(name, dtype, shape), _axes(shape, "i")
    stage = Stage(axes, const(element(own, *axes), dtype.computed), own=own)
    return Tensor(name, dtype, own.shape, stage=stage)


def stages(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Every Tensor with a stage that the outputs need, each once, producers first."""
    seen: set[Tensor] = set()

    def visit(t: Tensor) -> Iterator[Tensor]:
        if t in seen or t.stage is None:
            return
        seen.add(t)
        for e in (t.stage.value, *(() if t.stage.where is None else (t.stage.where,))):
            for x in walk(e):
                if isinstance(x, Load) and isinstance(x.buf, Tensor):
                    yield from visit(x.buf)
        yield t

    for o in outputs:
        yield from visit(o)
