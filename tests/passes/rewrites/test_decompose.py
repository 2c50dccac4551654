"""decompose: every op then has a tensor expression or runs on the host, and the numbers are the same."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import Loc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import OpDef
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import draw
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.decompose import decompose
from support.passes import check_pass, compare

COMPOSED = [op for op in OPS.values() if op.decompose is not None]


def test_one_op() -> None:
    check_pass(
        decompose,
        "def f(x: f32[1, 3]):\n    h = squeeze(x, axes=(0,))\n    y = softsign(h)\n    return y\n",
        """
def f(x: f32[1, 3], *, c: f32 = 1.0):
    h = reshape(x, shape=(3,))
    v0 = abs(h)
    v1 = add(v0, c)
    y = div(h, v1)
    return y
""",
    )


@pytest.mark.parametrize("op", COMPOSED, ids=lambda op: op.name)
def test_every_composed_op(op: OpDef) -> None:
    for k, s in enumerate(op.samples):
        g = Graph(op.name)
        loc = Loc("node", op.name, 13)
        found = Builder(g, locs=(loc,)).op(
            op, *(g.add_input(f"x{i}", t) for i, t in enumerate(s.inputs)), **dict(s.attrs)
        )
        g.outputs = list(found) if isinstance(found, tuple) else [found]
        names = [v.name for v in g.outputs]
        inputs = draw(s, k)
        want = run(g, inputs)
        assert decompose(g, PassContext()) and decompose(g, PassContext()) is False
        verify(g)
        assert all(n.op.decompose is None and n.locs == (loc,) for n in g.nodes())
        assert [v.name for v in g.outputs if v.node is not None] == [
            n for n, v in zip(names, g.outputs) if v.node is not None
        ]
        compare(want, run(g, inputs))


def test_ops_that_are_kept() -> None:
    g = Graph("f")
    g.outputs = [Builder(g).op("softsign", g.add_input("x", OPS["softsign"].samples[0].inputs[0]))]
    assert decompose(g, PassContext(), keep=("softsign",)) is False
