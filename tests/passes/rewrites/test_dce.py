"""dce: what nobody reads goes, whatever has an effect stays."""

from __future__ import annotations

from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.ops import OPS
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.dce import dce
from support.passes import check_pass


def test_dead_chains_and_constants_go() -> None:
    check_pass(
        dce,
        """
def f(x: f32[3], unused: f32[2], *, c: f32[2] = [1.0, 2.0], d: f32 = 1.0):
    a = exp(x)
    b = add(a, d)
    y = neg(x)
    return y
""",
        "def f(x: f32[3], unused: f32[2]):\n    y = neg(x)\n    return y\n",
        exact=True,
    )


def test_constants_that_are_outputs_stay() -> None:
    g = parse("def f(*, c: f32 = 1.0, d: f32 = 2.0):\n    return c\n")
    assert dce(g, PassContext()) and [v.name for v in g.constants] == ["c"]
    assert dce(g, PassContext()) is False


def test_effects_stay() -> None:
    def kept(traits: frozenset[Trait]) -> Graph:
        note = OpDef("note", lambda x: x, host=lambda x: x, traits=traits)
        g = parse("def f(x: f32[3]):\n    a = exp(x)\n    b = note(a)\n    return x\n", ops={**OPS, "note": note})
        dce(g, PassContext())
        return g

    assert [n.op.name for n in kept(frozenset()).nodes()] == ["exp", "note"]
    assert len(kept(frozenset((Trait.PURE,)))) == 0
