"""What a converter sees: a call of an ATen operator, its arguments by schema names, and a graph builder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
from torch._prims_common import elementwise_dtypes

from dnnc.frontends.torch.dims import Dims
from dnnc.frontends.torch.tensors import dtype_of
from dnnc.ir.dtype import DType, f32, i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import Expr
from dnnc.ir.graph import Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import Dim, TensorType

Operand = Value | Expr | int | float | bool


class Call:
    """One call to convert.

    Args:
        b: builds; `c.b.add(x, y)`.
        op: the overload, such as `aten.add.Tensor`.
        args: arguments by name, defaults included; tensors are values of the graph, sizes are dims.
        fakes: the same with torch's own stand-ins for tensors, which know dtypes.
        outs: the stand-ins of the results.
        dims: sizes as dims.
        wanted: which results somebody reads.
        keys: for random operators; None where they are refused.
    """

    def __init__(
        self,
        b: Builder,
        op: Any,
        args: dict[str, Any],
        fakes: dict[str, Any],
        outs: Sequence[Any],
        dims: Dims,
        wanted: frozenset[int],
        keys: Any = None,
    ) -> None:
        self.b, self.op, self.args, self.fakes, self.outs, self.dims, self.wanted = (
            b,
            op,
            args,
            fakes,
            outs,
            dims,
            wanted,
        )
        self.keys = keys

    # --- arguments ---

    def x(self, name: str = "self") -> Value:
        """A tensor."""
        v = self.args[name]
        assert isinstance(v, Value), f"{self.op}: {name} is {v!r}"
        return v

    def opt(self, name: str) -> Value | None:
        v = self.args.get(name)
        return v if isinstance(v, Value) else None

    def get(self, name: str, default: Any = None) -> Any:
        """Anything that is no tensor."""
        v = self.args.get(name)
        return default if v is None else v

    def flag(self, name: str) -> bool:
        return bool(self.get(name, False))

    def number(self, name: str, default: float | None = None) -> Any:
        """A Python number that is known."""
        v = self.get(name, default)
        if isinstance(v, (Expr, Value)):
            raise UnsupportedError(f"{name} must be a number that is known when the model is compiled")
        return v

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))

    def ints(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        """Numbers; a single one is a list of one."""
        v = self.get(name, default)
        v = v if isinstance(v, (list, tuple)) else [v]
        if any(isinstance(d, (Expr, Value)) for d in v):
            raise UnsupportedError(f"{name} must be numbers that are known when the model is compiled")
        return tuple(int(d) for d in v)

    def window(self, name: str, rank: int, default: Sequence[int] = ()) -> tuple[int, ...]:
        """A number for each of `rank` axes: one number counts for all."""
        v = self.ints(name, default)
        return v * rank if len(v) == 1 else v

    def axis(self, name: str = "dim", rank: int | None = None, default: int = 0) -> int:
        rank = self.x().type.rank if rank is None else rank
        return self.integer(name, default) % max(rank, 1)

    def axes(self, name: str = "dim", rank: int | None = None) -> tuple[int, ...]:
        """Axes counted from the front; all of them where none is given."""
        rank = self.x().type.rank if rank is None else rank
        v = self.ints(name)
        return tuple(a % rank for a in v) if v else tuple(range(rank))

    # --- results ---

    def type(self, k: int = 0) -> TensorType:
        """What a result must be."""
        t = self.outs[k]
        return TensorType(dtype_of(t.dtype), self.dims.shape(t.shape))

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type().shape

    @property
    def dtype(self) -> DType:
        return dtype_of(self.outs[0].dtype)

    def wants(self, k: int) -> bool:
        return k in self.wanted

    # --- values ---

    def scalar(self, v: Any, dtype: DType) -> Value:
        """A number, a size, or a number computed from sizes, as a tensor without axes."""
        if isinstance(v, Value):
            return self.cast(v, dtype)
        if isinstance(v, Expr):
            made: Value = self.b.full(shape=(), value=v, dtype=i64)
            return self.cast(made, dtype)
        return self.b.constant(v, dtype=dtype)

    def cast(self, v: Value, to: DType) -> Value:
        """The value in another dtype; itself where it has that one."""
        return v if v.type.dtype is to else self.b.cast(v, to=to)

    def operand(self, name: str, dtype: DType) -> Value:
        """An argument, tensor or number, in a dtype."""
        v = self.args[name]
        return self.cast(v, dtype) if isinstance(v, Value) else self.scalar(v, dtype)

    def promoted(self, *names: str, kind: Promotion = Promotion.DEFAULT) -> list[Value]:
        """Arguments in the dtype in which torch combines them."""
        dtype = self.common(*names, kind=kind)
        return [self.operand(n, dtype) for n in names]

    def common(self, *names: str, kind: Promotion = Promotion.DEFAULT) -> DType:
        """The dtype in which torch combines arguments; half types stay, registers hold more anyway."""
        compute, result = elementwise_dtypes(*(self.fakes[n] for n in names), type_promotion_kind=kind)
        return dtype_of(result if compute is torch.float32 and result in (torch.float16, torch.bfloat16) else compute)

    def key(self) -> Value:
        """A key u32[2] of its own for random numbers."""
        if self.keys is None:
            raise UnsupportedError(
                f"{self.op} has no form in a graph: random numbers are drawn outside of what is compiled; pass them "
                "as an input, or use torch.compile"
            )
        made: Value = self.keys.next()
        return made

    def floats(self, name: str = "self") -> Value:
        """An operand of a function on real numbers: integers become floats."""
        return self.promoted(name, kind=Promotion.INT_TO_FLOAT)[0]


def wide(dtype: DType) -> DType:
    """The dtype for sums of a float type."""
    return f32 if dtype.is_float and dtype.bits < 32 else dtype
