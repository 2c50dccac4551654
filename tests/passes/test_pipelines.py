"""The pipeline as a whole: levels, outputs that need copies, and graphs that come out the same in meaning."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import LEVELS, PASSES, compile_program, copy_outputs
from dnnc.tools.sample_graphs import graph_of
from support.passes import check_pass, compare, random_inputs

TARGET = parse_target("llvm -mcpu=x86-64-v4", None)


def test_names_are_unique_and_every_pass_says_why() -> None:
    names = [p.name for p in PASSES]
    assert len(set(names)) == len(names)
    assert all(len(p.why) > 20 and not p.why.endswith(".") for p in PASSES)


def test_levels() -> None:
    assert LEVELS[3] == PASSES
    assert {p.name for p in PASSES} - {p.name for p in LEVELS[1]} == {"layout"}
    assert [p.name for p in LEVELS[0]] == [
        "decompose",
        "recomputed",
        "dce",
        "precision",
        "wide-sums",
        "copy-outputs",
    ]  # what every program needs


GRAPHS = {
    "network": """def g(x: f32[2, 3, 9, 9], *, w: f32[16, 3, 3, 3], s: f32[16], v: f32[32, 16, 1, 1], m: f32[32, 10]):
    a = relu(batch_norm(conv(x, w), s, s, s, abs(s), epsilon=0.001))
    b = global_avg_pool(conv(a, v))
    return softmax(gemm(flatten(b), m, trans_b=False)), a""",
    "shape arithmetic and dead code": """def g(x: f32[4, 6], *, k: i64[2] = [2, 3]):
    dead = exp(x)
    deader = mul(dead, dead)
    y = reshape(transpose(transpose(x, perm=(1, 0)), perm=(1, 0)), shape=(2, -1))
    return y, mul(k, k)""",
    "sizes not known": """def g(x: f32[N, 8, H, 5], *, w: f32[16, 8, 3, 3]):
    return hard_swish(conv(x, w, pads=(1, 1, 1, 1))), reduce_max(x, axes=(2, 3))""",
}


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_meaning_is_kept_and_the_graph_settles(name: str, level: int) -> None:
    g = parse(GRAPHS[name]) if "= [" in GRAPHS[name] else graph_of(GRAPHS[name], seed=1)
    inputs = random_inputs(g, 2)
    want = run(g, inputs)
    ctx = PassContext(check=True)
    PassManager().run(g, LEVELS[level], ctx)
    verify(g)
    compare(want, run(g, inputs))
    found = g.structural_hash()
    PassManager().run(g, LEVELS[level], ctx)
    assert g.structural_hash() == found


@pytest.mark.parametrize("level", [1, 3])
def test_shape_arithmetic_never_survives(level: int) -> None:
    g = parse(
        """def g(x: f32[4, 6]):
    s = reshape(full(shape=(1,), value=3, dtype=i64), shape=())
    k = reduce_prod(concat(unsqueeze(s, axes=(0,)), full(shape=(1,), value=2, dtype=i64), axis=0), axes=(0,))
    return mul(x, cast(k, to=f32))"""
    )
    PassManager().run(g, LEVELS[level], PassContext())
    assert [n.op.name for n in g.nodes()] == ["mul"]
    assert next(iter(g.constants.values())) == 6


def test_outputs_with_memory_of_their_own() -> None:
    check_pass(
        copy_outputs,
        """def g(x: f32[2, 3], *, k: f32[2] = [5.0, 6.0]):
    r = relu(x)
    a = reshape(r, shape=(6,))
    b = reshape(x, shape=(3, 2))
    return x, k, r, a, b, r""",
        """def g(x: f32[2, 3], *, k: f32[2] = [5.0, 6.0]):
    r = relu(x)
    a = reshape(r, shape=(6,))
    b = reshape(x, shape=(3, 2))
    return pack(x, layout=None), pack(k, layout=None), r, pack(a, layout=None), pack(b, layout=None), pack(
        r, layout=None)""",
        exact=True,
    )


def test_what_is_no_view_is_no_copy() -> None:
    g = parse("def g(x: f32[2, 3]):\n    r = relu(x)\n    return r, transpose(r, perm=(1, 0)), neg(r)")
    assert not copy_outputs(g, PassContext())


@pytest.mark.parametrize("level", [0, 1, 3])
def test_program(level: int) -> None:
    p = compile_program(graph_of(GRAPHS["network"]), PassContext(), templates(TARGET), opt_level=level)
    names = [s.kernel.name for s in p.steps]
    assert len(p.steps) == len(p.fusion.groups) and all(s.choice.template for s in p.steps)
    single = all(len(grp.nodes) == 1 for grp in p.fusion.groups)
    assert single is (level < 3), names
    blocked = any(not v.type.row_major for n in p.graph.nodes() for v in n.outputs)
    assert blocked is (level == 3)


def test_the_choice_is_the_callers() -> None:
    seen: list[int] = []

    def last(problem: object, offered: object) -> object:
        seen.append(len(offered))  # type: ignore[arg-type]
        return offered[-1]  # type: ignore[index]

    text = "def g(x: f32[64, 64], *, w: f32[64, 96]):\n    return matmul(x, w)"
    first = compile_program(graph_of(text), PassContext(), templates(TARGET))
    other = compile_program(graph_of(text), PassContext(), templates(TARGET), choose=last)  # type: ignore[arg-type]
    assert max(seen) > 1
    assert first.steps[0].choice != other.steps[0].choice and first.steps[0].text != other.steps[0].text


def test_arrays_of_the_model_are_not_written() -> None:
    g = graph_of(GRAPHS["network"])
    kept = {v.name: a.copy() for v, a in g.constants.items()}
    arrays = dict(zip(kept, g.constants.values()))
    PassManager().run(g, PASSES, PassContext())
    assert all(np.array_equal(arrays[n], a) for n, a in kept.items())
