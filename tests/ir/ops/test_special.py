"""NaN and infinities among the operands: an op's reference and its tensor expression say the same."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from te_eval import evaluate

from dnnc.ir import te
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import DnncError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.op import OpDef, Sample, Trait
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import draw

pytestmark = pytest.mark.family("samples")

SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0)
# 0 * inf in the padding: a product, or a shorter sum
PADDED = frozenset(("conv", "conv_transpose", "conv_backward_filter"))
FLOAT = [(op, s) for op in OPS.values() for s in op.samples if any(t.dtype.kind == "f" for t in s.inputs)]
COMPUTED = [(op, s) for op, s in FLOAT if op.compute is not None and op.name not in PADDED]
OTHERS = [(op, s) for op, s in FLOAT if op.compute is None or op.name in PADDED]


def label(case: Any) -> str:
    return case.name if isinstance(case, OpDef) else "" if isinstance(case, Sample) else str(case)


def spoiled(op: OpDef, s: Sample, seed: int) -> list[Any]:
    """Operands with every fourth float a special number."""
    rng = np.random.default_rng(zlib.crc32(op.name.encode()) + seed)
    out = []
    for a in draw(s, seed):
        if from_numpy(a.dtype).kind == "f" and a.size:
            at = rng.integers(0, a.size, max(a.size // 4, 1))
            a = a.copy()
            a.reshape(-1)[at] = rng.choice(SPECIAL, len(at)).astype(a.dtype)
        out.append(a)
    return out


@pytest.mark.parametrize("op,s", OTHERS, ids=label)
def test_the_interpreter_takes_them(op: OpDef, s: Sample) -> None:
    g = Graph("g")
    values = [g.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)]
    made = Builder(g).op(op, *values, **dict(s.attrs))
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    for seed in range(3):
        try:
            found = run(g, spoiled(op, s, seed))
        except DnncError as e:  # where a number says which element, or how many
            assert "expected" in str(e) or "outside" in str(e) or op.name in str(e)
            continue
        assert [a.dtype for a in found] == [v.type.dtype.numpy for v in g.outputs]


@pytest.mark.parametrize("op,s", COMPUTED, ids=label)
def test_the_tensor_expression_says_the_same(op: OpDef, s: Sample) -> None:
    attrs = complete(op, dict(s.attrs))
    inputs = [te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(s.inputs)]
    made = op.compute(*inputs, **attrs)  # type: ignore[misc]
    outputs = list(made) if isinstance(made, tuple) else [made]
    for seed in range(3):
        arrays = spoiled(op, s, seed)
        wide = (
            arrays
            if Trait.BITS in op.traits
            else [a.astype(np.float64) if t.dtype.is_float else a for a, t in zip(arrays, s.inputs)]
        )
        with np.errstate(all="ignore"):
            found = op.reference(*wide, **attrs)  # type: ignore[misc]
        for got, want in zip(
            evaluate(outputs, dict(zip(inputs, arrays))), found if isinstance(found, tuple) else (found,)
        ):
            if np.asarray(want).dtype.kind in "biu":
                np.testing.assert_array_equal(got, want)
                continue
            x, y = np.asarray(got, np.float64), np.asarray(want, np.float64)
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
            np.testing.assert_array_equal(x[np.isinf(y)], y[np.isinf(y)])
