"""Sorting: by keys that a kernel of many threads merges, or by digits where one thread walks a row."""

from __future__ import annotations

from typing import Any

from dnnc.ir import batching
from dnnc.ir.autodiff.rules import sort as rules
from dnnc.ir.expr import const, value
from dnnc.ir.op import PURE, Cost, OpDef
from dnnc.ir.ops.common import dim, sample
from dnnc.ir.ops.digits import sort_by_digits
from dnnc.ir.ops.sort_keys import BLOCK, FAN, KEY_OPS, indices_of, sort_along, sort_type
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import Dim, TensorType


def _sort_flops(x: TensorType, *, axis: int = -1, **_: Any) -> Dim:
    n = value(const(x.shape[normalize_axis(axis, x.rank)]))
    return dim(const(x.size) * (BLOCK if n is None else max(min(n, BLOCK), n.bit_length() * FAN, 1)))


SORT_OPS: tuple[OpDef, ...] = (
    OpDef(
        "sort",
        sort_type,
        decompose=lambda b, x, *, axis, descending, keep: sort_along(b, x, axis, descending, keep, indices_of),
        decompose_serial=sort_by_digits,
        flops=_sort_flops,
        traits=PURE,
        batching=batching.along_axis,
        cost=Cost.HEAVY,
        samples=(
            sample("f32[3, 7]", axis=1, descending=True, keep=4),
            sample("f16[5, 2]", axis=0),
            sample("i32[2, 200]", axis=-1, descending=True, domain=(-50, 50)),
            sample("u64[150]", keep=9, domain=(0, 40)),
            sample("f64[2, 70, 3]", axis=1, descending=True, keep=3),
            sample("f32[1, 1100]", axis=1, keep=1000),
            sample("i64[65]", axis=0, domain=(-9, 9)),
            sample("bool[2, 5]", axis=1, descending=True),
            sample("f32[2, 5]", axis=1, keep=0),
        ),
        vjp=rules.sort,
    ),
    *KEY_OPS,
)
