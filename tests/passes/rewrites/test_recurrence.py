"""Loops become recurrences where the target takes them, and mean the same."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.rewrites.recurrence import recurrence
from dnnc.tools.sample_graphs import graph_of

TEXT = """
def net(h: f32[2, 8], c: f32[2, 8], x: f32[5, 2, 32], *, w: f32[8, 32], p: f32[8]):
    def body(k: i64, h: f32[2, 8], c: f32[2, 8], r: f32[2, 32], w: f32[8, 32], p: f32[8]):
        v = add(r, matmul(h, w))
        i = sigmoid(add(slice(v, starts=(0, 0), steps=(1, 1), shape=(2, 8)), mul(p, c)))
        f = sigmoid(slice(v, starts=(0, 16), steps=(1, 1), shape=(2, 8)))
        d = add(mul(f, c), mul(i, tanh(slice(v, starts=(0, 24), steps=(1, 1), shape=(2, 8)))))
        y = mul(sigmoid(slice(v, starts=(0, 8), steps=(1, 1), shape=(2, 8))), tanh(d))
        return y, d, y, d
    (a, b, y, d) = loop(None, None, h, c, x, w, p, body=body, carried=2, scanned=1, length=5,
        backward=(True, True, False))
    return a, b, y, d
"""
ON = PassContext(TargetFacts(supports_scan_kernel=lambda form: True))


def results(g: Graph) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return run(g, [rng.standard_normal(v.type.shape).astype(np.float32) for v in g.inputs])


@pytest.mark.parametrize("whole", [False, True], ids=["the pass alone", "the pipeline"])
def test_a_loop_becomes_one_op(whole: bool) -> None:
    g = graph_of(TEXT)
    want = results(g)
    if whole:
        PassManager().run(g, LEVELS[3], ON)
    else:
        assert recurrence(g, ON)
    verify(g)
    names = [n.op.name for n in g.nodes()]
    assert "loop" not in names and names.count("recurrence") == 1
    for a, b in zip(want, results(g)):
        assert np.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("lanes", "matrix"), [(1, "f32[32, 8]"), (16, "f32[8, 32]")], ids=["the sum last", "units last, as lanes"]
)
def test_constants_of_the_body_become_operands(lanes: int, matrix: str) -> None:
    g = graph_of(TEXT)
    PassManager().run(g, LEVELS[3], PassContext(TargetFacts(lanes=lanes, supports_scan_kernel=lambda form: True)))
    (n,) = (n for n in g.nodes() if n.op.name == "recurrence")
    assert sorted(str(v.type) for v in n.inputs if v in g.constants) == sorted(["f32[8]", matrix])
    assert not any(a.size > 1 for s in n.subgraphs() for a in s.constants.values())
    assert all(v.type.row_major for s in n.subgraphs() for m in s.nodes() for v in m.outputs)


def test_a_target_that_takes_none_keeps_the_loop() -> None:
    told: list[str] = []
    for ctx in (
        PassContext(),
        PassContext(
            TargetFacts(supports_scan_kernel=lambda form: False), explain=lambda rule, n, why: told.append(why)
        ),
    ):
        g = graph_of(TEXT)
        assert not recurrence(g, ctx) and "loop" in [n.op.name for n in g.nodes()]
    assert told == ["the target has no kernel of that size"]
