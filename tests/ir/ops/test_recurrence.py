"""`recurrence`: what it means is the loop that it stands for."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.errors import DnncError
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.ops import OPS
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.decompose import decompose

TEXT = """
def g(h: f32[2, 3], c: f32[2, 3], x: f32[4, 2, 3], w: f32[3, 3]):
    def body(k: i64, h: f32[2, 3], c: f32[2, 3], r: f32[2, 3], w: f32[3, 3]):
        d = add(mul(c, 0.5), matmul(h, w))
        return tanh(add(d, r)), d, mul(d, 2.0)
    return recurrence(h, c, x, w, body=body, carried=2, scanned=1, length=4, backward=(True, False))
"""


def test_the_rows_of_the_result() -> None:
    """The stacked rows, then the last states."""
    g = parse(TEXT)
    rng = np.random.default_rng(0)
    h, c, x, w = (rng.standard_normal(v.type.shape).astype(np.float32) for v in g.inputs)
    (got,) = run(g, [h, c, x, w])
    rows = []
    for k in range(4):
        c = c * 0.5 + h @ w
        h = np.tanh(c + x[3 - k])
        rows.append(2 * c)
    assert np.allclose(got, np.stack([*rows, h, c]), atol=1e-6)


def test_the_decomposition_means_the_same() -> None:
    g = parse(TEXT)
    arrays = [np.random.default_rng(1).standard_normal(v.type.shape).astype(np.float32) for v in g.inputs]
    (want,) = run(g, arrays)
    assert decompose(g, PassContext()) and next(n.op.name for n in g.nodes()) == "loop"
    assert np.array_equal(run(g, arrays)[0], want)


def test_text_and_work() -> None:
    g = parse(TEXT)
    assert parse(g.text()).text() == g.text()
    (n,) = g.nodes()
    assert OPS["recurrence"].flops(*(v.type for v in n.inputs), **n.attrs) == 4 * 2 * 2 * 3 * 3  # type: ignore[misc, union-attr]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "return tanh(add(d, r)), d, mul(d, 2.0)",
            "return tanh(add(d, r)), d, reduce_sum(d, axes=(0,))",
            "states of a recurrence have one type",
        ),
        ("x: f32[4, 2, 3], w", "x: f32[5, 2, 3], w", "must have 4 rows"),
    ],
)
def test_types_that_do_not_fit(old: str, new: str, said: str) -> None:
    with pytest.raises(DnncError, match=said):
        parse(TEXT.replace(old, new))
