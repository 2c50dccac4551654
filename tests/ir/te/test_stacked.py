"""Ops on stacks of operands: the expression with one more axis gives what the op gives for each row, for every op that
has an expression.
"""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir import te
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ShapeError
from dnnc.ir.graph.attributes import complete
from dnnc.ir.op import Trait
from dnnc.ir.ops import FAMILIES, OPS
from dnnc.ir.ops.common import draw
from dnnc.ir.te import interp as te_interp
from dnnc.ir.te.stacked import stacked
from dnnc.ir.types import TensorType, tensor

ROWS = 3


@pytest.mark.family("cases")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_expression(family: str) -> None:
    for op in FAMILIES[family]:
        for seed, s in enumerate(
            [s for s in op.samples if s.inputs][:3] if op.compute is not None and op.reference is not None else ()
        ):
            attrs = complete(op, dict(s.attrs))
            draws = [draw(s, seed + k) for k in range(ROWS)]
            for which in {(True,) * len(s.inputs), tuple((k + seed) % 2 == 0 for k in range(len(s.inputs)))} - {
                (False,)
            }:
                arrays = [np.stack([d[k] for d in draws]) if w else draws[0][k] for k, w in enumerate(which)]
                types = tuple(TensorType(t.dtype, (ROWS, *t.shape)) if w else t for w, t in zip(which, s.inputs))
                record = stacked(op, which, types, tuple(attrs.items()))
                operands = [te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(types)]
                assert record.compute is not None and record.reference is not None and op.reference is not None
                made = record.compute(*operands, **attrs)
                raw = Trait.BITS in op.traits
                given = [a.astype(t.dtype.computed.numpy) if not raw else a for a, t in zip(arrays, types)]
                rows = [op.reference(*(a[k] if w else a for a, w in zip(given, which)), **attrs) for k in range(ROWS)]
                found, said = record.reference(*given, **attrs), record.type(*types, **attrs)
                several = isinstance(made, tuple)
                if not several and np.size(rows[0]):
                    places = np.stack([np.array([0, 2, 1, 2]), *(np.arange(4) * 7 % d for d in np.shape(rows[0]))], 1)
                    assert record.reference_at is not None
                    at = np.stack(rows)[tuple(places.T)].astype(np.float64)
                    np.testing.assert_allclose(
                        np.asarray(record.reference_at(given, places, **attrs)).astype(np.float64),
                        at,
                        rtol=1e-3,
                        atol=1e-3,
                    )
                for j, (t, u) in enumerate(zip(made if several else (made,), said if several else (said,))):
                    want = np.stack([r[j] if several else r for r in rows]).astype(np.float64)
                    assert t.dims == u.shape == want.shape and t.dtype is u.dtype
                    tol = 1e-2 if t.dtype.bits < 32 else 1e-5
                    np.testing.assert_allclose(
                        te_interp.whole(t, dict(zip(operands, arrays))).astype(np.float64), want, rtol=tol, atol=tol
                    )
                    np.testing.assert_array_equal(np.asarray(found[j] if several else found).astype(np.float64), want)


def test_stacks_of_one_length() -> None:
    record = stacked(OPS["add"], (True, True), (tensor(f32, 2, 3), tensor(f32, 2, 3)), ())
    assert record.name == "each_11_add" and Trait.ELEMENTWISE in record.traits
    with pytest.raises(ShapeError, match="stacks of"):
        record.type(tensor(f32, 2, 3), tensor(f32, 4, 3))
    assert Trait.ELEMENTWISE not in stacked(OPS["add"], (True, False), (tensor(f32, 2), tensor(f32, 3)), ()).traits
