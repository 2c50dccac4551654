"""Fusion plans of small graphs, as text, and the same results with and without fusion."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.op import Trait
from dnnc.ir.tolerances import bound
from dnnc.passes.analysis.alias import root
from dnnc.passes.analysis.kinds import kind_of
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import PASSES
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.join_groups import MAX_NODES
from dnnc.passes.rewrites.layout import assign_layouts
from dnnc.tools.sample_graphs import graph_of
from support.random_graphs import random_graph


def groups(g: Graph) -> list[str]:
    return [" + ".join(n.op.name for n in grp.nodes) for grp in plan_fusion(g).groups]


PLANS = [
    (
        "conv, bias, residual, relu are one kernel; the other branch is another",
        """def g(x: f32[1, 16, 6, 6], *, w: f32[16, 16, 3, 3], v: f32[16, 16, 1, 1], b: f32[16]):
    s = conv(x, v)
    h = conv(x, w, b, pads=(1, 1, 1, 1))
    y = relu(add(h, s))
    return y""",
        ["conv", "conv + add + relu"],
    ),
    (
        "a diamond stays together: x * sigmoid(x)",
        """def g(x: f32[8, 32], *, w: f32[32, 16]):
    h = matmul(x, w)
    return mul(h, sigmoid(h))""",
        ["matmul + sigmoid + mul"],
    ),
    (
        "a value that two groups read ends its group",
        """def g(x: f32[8, 32], *, w: f32[32, 16], v: f32[16, 16]):
    h = relu(matmul(x, w))
    y = add(matmul(h, v), h)
    return y""",
        ["matmul + relu", "matmul + add"],
    ),
    (
        "parts are joined before a norm passes over their rows, whatever is computed in between",
        """def g(x: f32[2, 8, 64], z: f32[2, 8, 64], r: f32[2, 8, 128], *, s: f32[128], b: f32[128]):
    y = layer_norm(relu(add(concat(x, z, axis=2), r)), s, b)
    return y""",
        ["concat", "add + relu + layer_norm"],
    ),
    (
        "the residual of a norm goes to the contraction before it, not to the norm",
        """def g(x: f32[8, 32], *, w: f32[32, 32], s: f32[32], b: f32[32]):
    h = add(matmul(x, w), x)
    return layer_norm(h, s, b)""",
        ["matmul + add", "layer_norm"],
    ),
    (
        "but a cast to more bytes goes to the norm: half as much is stored",
        """def g(x: f16[8, 32], *, w: f16[32, 32], s: f32[32], b: f32[32]):
    h = add(matmul(x, w), x)
    return cast(layer_norm(cast(h, to=f32), s, b), to=f16)""",
        ["matmul + add", "cast + layer_norm + cast"],
    ),
    (
        "scale and mask in front of softmax go to the contraction, too",
        """def g(q: f32[2, 8, 16], k: f32[2, 16, 8], m: f32[1, 1, 8]):
    return softmax(add(mul(matmul(q, k), 0.25), m))""",
        ["matmul + mul + add", "softmax"],
    ),
    (
        "without a contraction they are the softmax's own",
        """def g(q: f32[8, 16], m: f32[1, 16]):
    return softmax(add(mul(q, 0.25), m))""",
        ["mul + add + softmax"],
    ),
    (
        "nor what makes their rows of elements that lie apart: a row is read more than once",
        """def g(x: f32[16, 8], m: f32[16, 8], s: f32[16], b: f32[16]):
    return layer_norm(transpose(add(x, m), perm=(1, 0)), s, b)""",
        ["add + transpose", "layer_norm"],
    ),
    (
        "rows that stay rows are read where they are",
        """def g(x: f32[4, 8, 16], s: f32[16], b: f32[16]):
    return layer_norm(transpose(x, perm=(1, 0, 2)), s, b)""",
        ["transpose + layer_norm"],
    ),
    (
        "heads: the result is stored at its transposed place",
        """def g(x: f32[8, 32], *, w: f32[32, 64]):
    h = reshape(matmul(x, w), shape=(8, 2, 32))
    return transpose(h, perm=(1, 0, 2))""",
        ["matmul + reshape + transpose"],
    ),
    (
        "not when the last axis moves: vectors would be torn",
        """def g(x: f32[8, 32], *, w: f32[32, 64]):
    h = reshape(matmul(x, w), shape=(8, 2, 32))
    return transpose(h, perm=(1, 2, 0))""",
        ["matmul", "transpose"],
    ),
    (
        "a transposed left operand is read in place",
        """def g(x: f32[32, 8], *, w: f32[32, 64]):
    return matmul(transpose(x, perm=(1, 0)), w)""",
        ["transpose + matmul"],
    ),
    (
        "a window does not recompute what it reads",
        """def g(x: f32[1, 4, 8, 8]):
    return max_pool(sqrt(abs(x)), kernel=(2, 2), strides=(2, 2))""",
        ["abs + sqrt", "max_pool"],
    ),
    (
        "a window over channels does not recompute what it reads either",
        """def g(x: f32[1, 4, 8, 8]):
    return lrn(abs(x), size=3)""",
        ["abs", "lrn"],
    ),
    (
        "conv, bias and relu",
        """def g(x: f32[1, 16, 6, 6], *, w: f32[16, 16, 3, 3], b: f32[16]):
    return relu(conv(x, w, b))""",
        ["conv + relu"],
    ),
    (
        "two contractions are two kernels, whatever stands between",
        """def g(x: f32[8, 32], *, w: f32[32, 48], v: f32[48, 16]):
    return matmul(gelu(matmul(x, w)), v)""",
        ["matmul + gelu", "matmul"],
    ),
    (
        "a chain in front of a contraction is not computed again for each column",
        """def g(x: f32[8, 32], *, w: f32[32, 48]):
    return matmul(gelu(mul(x, 2.0)), w)""",
        ["mul + gelu", "matmul"],
    ),
    (
        "what is costly is not broadcast, what is cheap may be",
        """def g(x: f32[8, 32], r: f32[32], q: f32[32]):
    return add(mul(x, exp(r)), neg(q))""",
        ["exp", "mul + neg + add"],
    ),
    (
        "a running sum is a nest of its own",
        """def g(x: f32[8, 32], *, s: f32[32, 1]):
    return softmax(cumsum(relu(x), axis=1)), add(cumsum(x, axis=0), 1.0)""",
        ["relu", "cumsum", "softmax", "cumsum + add"],
    ),
    (
        "two rows in a row",
        """def g(x: f32[8, 32], *, s: f32[32, 1]):
    return softmax(reduce_sum(softmax(x), axes=(1,), keepdims=True))""",
        ["softmax + reduce_sum", "softmax"],
    ),
    (
        "an output in the middle is stored, and read again",
        """def g(x: f32[8, 32], *, w: f32[32, 16]):
    h = matmul(x, w)
    return h, relu(h)""",
        ["matmul", "relu"],
    ),
    (
        "a matrix that one vector is multiplied by is read in the table where it lies",
        """def g(x: f32[6, 5, 1], i: i64[6], *, w: f32[8, 40, 5]):
    return matmul(gather(w, i, axis=0), x)""",
        ["gather + matmul"],
    ),
    (
        "from the left, too",
        """def g(x: f32[6, 1, 50], i: i64[6], *, w: f32[8, 50, 40]):
    return relu(matmul(x, gather(w, i, axis=0)))""",
        ["gather + matmul + relu"],
    ),
    (
        "a matrix that several rows read is copied once",
        """def g(x: f32[6, 2, 50], i: i64[6], *, w: f32[8, 50, 40]):
    return matmul(x, gather(w, i, axis=0))""",
        ["gather", "matmul"],
    ),
    (
        "and so is one that several vectors read, each by itself",
        """def g(x: f32[3, 6, 1, 50], i: i64[6], *, w: f32[8, 50, 40]):
    return matmul(x, gather(w, i, axis=0))""",
        ["gather", "matmul"],
    ),
]


@pytest.mark.family("cases")
@pytest.mark.parametrize(("text", "expected"), [p[1:] for p in PLANS], ids=[p[0] for p in PLANS])
def test_plan_and_numbers(text: str, expected: list[str]) -> None:
    g = graph_of(text)
    assert groups(g) == expected
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal([int(d) for d in v.type.shape]).astype(v.type.dtype.numpy) for v in g.inputs]  # type: ignore[arg-type]
    want = run(g, inputs, "float64")
    for level in (1, 3):
        got = dnnc.compile(g, cache=False, opt_level=level)(*inputs)
        for a, b in zip(got if isinstance(got, tuple) else (got,), want):
            assert np.abs(a - b).max() <= bound(g.outputs[0].type.dtype, 600, b)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kernels"), [("cubic", 4), ("linear", 3), ("nearest", 3)])
def test_a_convolution_keeps_its_schedule_before_a_resize(mode: str, kernels: int) -> None:
    """Cubic interpolation of whole vectors is not repeated for each lane that is unpacked; a convolution is never taken
    into what resamples it.
    """
    text = f"""def g(x: f32[1, 32, 12, 10], *, w: f32[32, 32, 3, 3]):
    r = relu(conv(x, w, pads=(1, 1, 1, 1)))
    return resize(r, shape=(1, 32, 24, 20), coords=((1, 0, 1), (1, 0, 1), (2, -1, 4), (2, -1, 4)), mode="{mode}")"""
    g = graph_of(text)
    assign_layouts(g, 16)
    groups = plan_fusion(g).groups
    assert len(groups) == kernels and [n.op.name for n in groups[1].nodes] == ["conv", "relu"]
    x = np.random.default_rng(3).standard_normal((1, 32, 12, 10)).astype(np.float32)
    want = run(graph_of(text), [x], "float64")[0]
    assert np.abs(dnnc.compile(graph_of(text), cache=False)(x) - want).max() <= bound(f32, 600, want)


def test_views_are_no_kernels() -> None:
    g = graph_of("def g(x: f32[4, 6]):\n    a = relu(x)\n    b = reshape(a, shape=(24,))\n    return softmax(b)")
    plan = plan_fusion(g)
    assert [(a.name, b.name, at) for a, b, at in plan.views] == [("b", "a", 0)]
    assert str(plan).splitlines()[-1] == "view: b = a"


def test_every_node_is_in_one_group_and_no_group_has_two_anchors() -> None:
    g = graph_of(PLANS[0][1])
    assign_layouts(g, 16)
    plan = plan_fusion(g)
    nodes = [n for grp in plan.groups for n in grp.nodes]
    assert len(nodes) == len(set(nodes)) == len(g)
    assert all(sum(Trait.CONTRACTION in n.op.traits for n in grp.nodes) <= 1 for grp in plan.groups)


def test_fusion_off() -> None:
    g = graph_of(PLANS[1][1])
    assert [len(grp.nodes) for grp in plan_fusion(g, fuse=False).groups] == [1, 1, 1]


def test_text_of_a_plan() -> None:
    g = graph_of(
        "def g(x: f32[4, 8], *, w: f32[8, 6]):\n    h = relu(matmul(x, w))\n    r = reshape(h, shape=(24,))\n    "
        "return exp(r), softmax(h)"
    )
    assert str(plan_fusion(g)).splitlines() == [
        "group 0: contraction: matmul + relu -> h",
        "group 1: map: exp -> v1",
        "group 2: reduction: softmax -> v2",
        "view: r = h",
    ]


NORMED = """def g(x: f16[1, 32], *, w: f16[32, 64], s: f32[32], b: f32[32], c: f16[64]):
    h = layer_norm(cast(x, to=f32), s, b)
    return relu(add(matmul(cast(h, to=f16), w), c))"""


def test_a_norm_stands_before_its_contraction_where_the_target_says_so() -> None:
    asked = []

    def normed(norm: Node, product: Node) -> bool:
        asked.append((norm.op.name, product.op.name))
        return True

    g = graph_of(NORMED)
    (group,) = plan_fusion(g, normed=normed).groups
    assert group.kind == "contraction" and [n.op.name for n in group.nodes] == [
        "cast",
        "layer_norm",
        "cast",
        "matmul",
        "add",
        "relu",
    ]
    assert set(asked) == {("cast", "matmul"), ("layer_norm", "matmul")}
    apart = ["cast + layer_norm + cast", "matmul + add + relu"]
    for plan in (plan_fusion(g), plan_fusion(g, normed=lambda norm, product: False)):
        assert [" + ".join(n.op.name for n in grp.nodes) for grp in plan.groups] == apart


def test_long_chains_are_cut() -> None:
    g = graph_of("def g(x: f32[4]):\n    return " + "neg(" * 60 + "x" + ")" * 60)
    assert [len(grp.nodes) for grp in plan_fusion(g).groups] == [12, MAX_NODES, MAX_NODES]


def test_numbers_that_are_repeated_count_once_in_a_chain() -> None:
    lines = [f"    n{k} = neg(r)\n    v{k + 1} = mul(v{k}, n{k})\n" for k in range(MAX_NODES - 1)]
    g = graph_of(f"def g(v0: f32[4], r: f32):\n{''.join(lines)}    return v{MAX_NODES - 1}")
    assert [len(grp.nodes) for grp in plan_fusion(g).groups] == [2 * MAX_NODES - 2]


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, False])
def test_plans_of_random_graphs(fuse: bool) -> None:
    for seed in range(60):
        g, _ = random_graph(seed, 20)
        PassManager().run(g, PASSES, PassContext())
        plan = plan_fusion(g, fuse)
        made = [n for grp in plan.groups for n in grp.nodes]
        several = {n for n in made if len(n.outputs) > 1}
        aliases = {v: (source, at) for v, source, at in plan.views}
        without = {n for n in g.nodes() if n not in set(made)}  # views, slices and concatenations that are no kernels
        assert all(n.output in aliases or n.output in {r for r, _ in aliases.values()} for n in without)
        assert len([n for n in made if n not in several]) + len(without) == len(g) - len(several)
        ready = {*g.inputs, *g.constants}
        for grp in plan.groups:
            inside = {v for n in grp.nodes for v in n.outputs}
            anchors = sum(kind_of(n) != "map" for n in grp.nodes)  # several where there are several outputs
            assert (anchors <= 1 or len(grp.outputs) > 1) and sum(n.op.name != "cast" for n in grp.nodes) <= MAX_NODES
            for n in grp.nodes:
                for v in n.inputs:
                    if v is None or v in inside:
                        continue
                    parts = [
                        w for w in ready if root(aliases, w)[0] is root(aliases, v)[0]
                    ]  # the kernels that wrote the memory it lies in
                    assert v in ready or parts, f"seed {seed}: {grp} reads {v} too early"
                for o in n.outputs:  # its outputs and views of them alone leave a group
                    assert (
                        o in grp.outputs  # which may be written where a concatenation has it
                        or root(aliases, o)[0] in grp.outputs
                        or n in several
                        or not (g.is_output(o) or any(u not in grp.nodes for u, _ in o.uses))
                    ), f"seed {seed}: {grp}"
            ready.update(grp.outputs)


@pytest.mark.parametrize("between", ["{p}", "add({p}, b)", "abs(sub(b, {p}))"])
def test_no_index_is_read_through_another_within_a_group(between: str) -> None:
    """An index stands several times in an expression: kernels of a chain of gathers would grow exponentially."""
    lines, p = [], "a"
    for k in range(20):
        lines.append(f"    v{k} = gather_elements(t, {between.format(p=p)}, axis=1)")
        p = f"v{k}"
    g = graph_of("def g(t: i64[8, 9], a: i64[8, 1], b: i64[8, 1]):\n" + "\n".join(lines) + f"\n    return {p}")
    plan = plan_fusion(g)
    assert all(sum(n.op.name == "gather_elements" for n in grp.nodes) == 1 for grp in plan.groups)
    kernels = [show_kernel(lower(g, grp.nodes, grp.outputs).kernel) for grp in plan.groups]
    assert max(map(len, kernels)) < 1000


def test_a_scatter_reads_a_broadcast_index_itself() -> None:
    """All elements of a row of updates have one index. What others read too is a kernel of its own."""
    text = """def g(x: f32[4, 9, 8], at: i64[5, 1], u: f32[4, 5, 8]):
    e = expand(at, shape=(4, 5, 8))
    y = scatter_elements(x, e, u, axis=1, reduction='add')
    return y"""
    (group,) = plan_fusion(parse(text)).groups
    assert [n.op.name for n in group.nodes] == ["expand", "scatter_elements"]
    assert len(plan_fusion(parse(text.replace("return y", "return y, e"))).groups) == 2


@pytest.mark.parametrize(
    "terms, rows, copied",
    [(256, 3072, True), (256, 1000, False), (64, 3072, False), (512, 1000, True)],  # 12 KB apart: lines of one set
)
def test_a_transposed_left_operand_is_copied_where_its_lines_leave_the_cache(
    terms: int, rows: int, copied: bool
) -> None:
    g = parse(f"def g(x: f32[{terms}, {rows}], y: f32[{terms}, 768]):\n    return matmul(transpose(x, perm=(1, 0)), y)")
    assert len(plan_fusion(g, serial_rows=True).groups) == 1 + copied


@pytest.mark.parametrize(
    "window, of_bytes, fused",
    [
        ("avg_pool(d, kernel=(3, 3))", True, True),
        ("avg_pool(d, kernel=(3, 3))", False, False),
        ("avg_pool(d, kernel=(7, 7))", True, False),
        ("avg_pool(d, kernel=(7, 7), strides=(4, 4))", True, True),
        ("max_pool(d, kernel=(2, 2))", True, True),
        ("resize(d, shape=(1, 4, 20, 20), coords=((1, 0, 1), (1, 0, 1), (2, -1, 4), (2, -1, 4)))", True, True),
        ("resize(d, shape=(1, 4, 20, 20), coords=((1, 0, 1), (1, 0, 1), (2, -1, 4), (2, -1, 4)))", False, False),
    ],
)
def test_windows_that_overlap_little_read_bytes(window: str, of_bytes: bool, fused: bool) -> None:
    start = "relu(mul(cast(x, to=f32), 0.25))" if of_bytes else "relu(mul(x, 0.25))"
    g = parse(f"def g(x: {'u8' if of_bytes else 'f32'}[1, 4, 10, 10]):\n    d = {start}\n    return {window}")
    assert len(plan_fusion(g, serial_rows=True).groups) == 2 - fused
    assert len(plan_fusion(g, serial_rows=False).groups) == 2
