"""The order of groups: what frees memory runs at once, donated memory is written after it was read."""

from __future__ import annotations

import pytest

import dnnc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.nests import group_inputs
from dnnc.passes.pipelines import PASSES
from dnnc.passes.planning.fuse import FusionPlan, plan_fusion
from dnnc.passes.planning.inplace import find_inplace
from dnnc.passes.planning.memory_plan import MemoryPlan, plan_memory

WIDTH, DEPTH = 128, 8  # so wide that updates are kept apart from products, and done in place


def step(batch: int) -> Graph:
    """A training step of a chain of layers, whose updates stand at its end; their rate is computed behind the rest."""
    weights = [f"w{k}" for k in range(DEPTH)]
    given = ", ".join(f"{w}: f32[{WIDTH}, {WIDTH}]" for w in weights)
    lines = [f"def g(x: f32[{batch}, {WIDTH}], rate: f32, {given}):", "    h0 = relu(x)"]
    lines += [f"    h{k + 1} = tanh(matmul(h{k}, {w}))" for k, w in enumerate(weights)]
    lines.append(f"    return reduce_sum(mul(h{DEPTH}, h{DEPTH}), axes=(0, 1), keepdims=False)")
    g = dnnc.value_and_grad(parse("\n".join(lines)), wrt=weights)
    names = {v.name: j for j, v in enumerate(g.inputs)}
    b = Builder(g)
    rate = b.op("sqrt", g.inputs[names["rate"]])
    for k, w in enumerate(weights, 1):
        g.outputs[k] = b.op("sub", g.inputs[names[w]], b.op("mul", g.outputs[k], rate))
        g.donated[k] = names[w]
    PassManager().run(g, PASSES, PassContext())
    return g


def planned(g: Graph) -> tuple[FusionPlan, MemoryPlan]:
    fusion = plan_fusion(g)
    return fusion, plan_memory(g, fusion, find_inplace(g, fusion))


def test_updates_run_when_their_gradients_are_there() -> None:
    batch = 256
    g = step(batch)
    fusion, plan = planned(g)
    one = 4 * batch * WIDTH
    assert plan.lower_bound({}) < (DEPTH + 5) * one + 4 * WIDTH * WIDTH  # each layer's result, and what is at work
    updates = [k for k, grp in enumerate(fusion.groups) if grp.outputs[0] in g.outputs[1:]]
    assert len(updates) == DEPTH
    maker = {v: k for k, grp in enumerate(fusion.groups) for v in grp.outputs}
    made = [max(maker[v] for v in group_inputs(fusion.groups[k].nodes) if v in maker) for k in updates]
    assert all(k - j <= 3 for k, j in zip(updates, made))  # the product of the weight itself is in between
    assert [plan.place[v] for v in g.outputs[1:]] == [("input", g.donated[k]) for k in range(1, DEPTH + 1)]


def test_a_donated_input_is_written_after_its_last_reader() -> None:
    g = parse(
        "def g(w: f32[64, 64], x: f32[64, 64]):\n    a = softmax(x)\n    n = add(w, a)\n    b = softmax(matmul(x, w))\n"
        "    c = softmax(b)\n    return n, matmul(c, w)"
    )
    g.donated = {0: 0}
    fusion = plan_fusion(g, fuse=False)
    plan = plan_memory(g, fusion, find_inplace(g, fusion))
    # the sum would free `a`, but its memory is read by both products
    assert [grp.outputs[0].name for grp in fusion.groups].index("n") == 1
    assert plan.place[g.outputs[0]] == ("output", 0)


def test_an_order_that_saves_nothing_is_that_of_the_nodes() -> None:
    g = parse("def g(x: f32[64, 64]):\n    a = softmax(x)\n    b = softmax(a)\n    return softmax(b), softmax(a)")
    names = [grp.outputs[0] for grp in plan_fusion(g, fuse=False).groups]
    assert names == [n.output for n in g.nodes()]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_product_waits_for_the_update_that_waits_for_its_weights(parts: int) -> None:
    """The update overwrites w, and so comes behind the other product, and so does the gradient, whole or in parts."""
    given = ", ".join(f"x{k}: f32[64, {256 // parts}]" for k in range(parts))
    made = ", ".join(f"matmul(transpose(x{k}, perm=(1, 0)), dy)" for k in range(parts))
    g = parse(
        f"def g(w: f32[256, 256], dy: f32[64, 256], {given}):\n    dw = concat({made}, axis=0)\n"
        "    dx = softmax(matmul(dy, transpose(w, perm=(1, 0))))\n    w2 = sub(w, mul(relu(dw), 0.1))\n"
        "    return w2, dx"
    )
    g.donated = {0: 0}
    PassManager().run(g, PASSES, PassContext())
    _, plan = planned(g)
    assert plan.lower_bound({}) <= 1.5 * 4 * 256 * 256  # not the gradient and the packed weights at one time
    assert plan.place[g.outputs[0]] == ("input", 0)
