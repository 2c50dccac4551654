"""Small graphs compiled, run natively and compared with the float64 interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dnnc.driver import compile
from dnnc.ir import te
from dnnc.ir.dtype import BY_NAME, DType
from dnnc.ir.expr import value
from dnnc.ir.graph import Graph
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.ops import OPS
from dnnc.ir.tolerances import bound
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.decompose import decompose


def typed(text: str) -> TensorType:
    """`f32 3 5` -> f32[3, 5]"""
    name, *dims = text.split()
    return TensorType(BY_NAME[name], tuple(map(int, dims)))


def one_node(name: str, types: Sequence[TensorType | str], **attrs: Any) -> Graph:
    """A graph of one op, whose inputs are the graph's."""
    g = Graph("g")
    values = [g.add_input(f"x{k}", typed(t) if isinstance(t, str) else t) for k, t in enumerate(types)]
    made = Builder(g).op(name, *values, **attrs)
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    return g


def run_native(g: Graph, arrays: Sequence[Any], target: str = "llvm", **options: Any) -> list[Any]:
    g = g.copy()
    decompose(g, PassContext())
    f = compile(g, target=target, threads=2, **{"cache": False, "verify": False, **options})
    found = f(*arrays)
    return list(found) if isinstance(found, tuple) else [found]


def longest_reduction(name: str, types: Sequence[TensorType], **attrs: Any) -> int:
    """Terms of one output element; of a decomposed op the elements of its first operand, which are no fewer."""
    op = OPS[name]
    if op.compute is None:
        return int(np.prod(types[0].shape)) if types else 1
    made = op.compute(*(te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(types)), **complete(op, attrs))
    n = 1
    for t in te.stages(list(made) if isinstance(made, tuple) else [made]):
        n *= int(np.prod([max(value(r.hi) + 1, 1) for r in t.stage.reduce])) if t.stage else 1
    return n


def check_close(got: Any, want: Any, dtype: DType, k: int = 1) -> None:
    """Equal NaN and infinities, everything else within the rounding contract; integers and bools exactly."""
    assert got.shape == want.shape and got.dtype == dtype.numpy, (
        f"got {got.dtype}{got.shape}, expected {dtype}{want.shape}"
    )
    if not dtype.is_float:
        np.testing.assert_array_equal(got, want)
        return
    wide = got.astype(np.float64)
    same = (wide == want) | (np.isnan(wide) & np.isnan(want))
    with np.errstate(all="ignore"):
        error = np.where(same, 0.0, np.abs(wide - want))
    limit = bound(dtype, k, want)
    bad = ~(error <= limit)
    assert not bad.any(), (
        f"at {np.argwhere(bad)[0]}: got {got[bad][0]}, expected {want[bad][0]}, allowed error {limit:.3g}"
    )


def check_graph(g: Graph, arrays: Sequence[Any], k: int = 1, target: str = "llvm", **options: Any) -> None:
    """Every output of the compiled graph against float64."""
    want = run(g, arrays, "float64")
    got = run_native(g, arrays, target, **options)
    for a, w, v in zip(got, want, g.outputs, strict=True):
        check_close(a, w, v.type.dtype, k)
