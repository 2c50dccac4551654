"""Memory plans: values that live at the same time never overlap, and the peak is what the lifetimes demand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dnnc.ir.expr import Expr, Var, const, substitute, value
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.text import parse
from dnnc.passes.analysis.alias import root
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.nests import group_inputs
from dnnc.passes.pipelines import PASSES
from dnnc.passes.planning import result_memory
from dnnc.passes.planning.fuse import FusionPlan, plan_fusion
from dnnc.passes.planning.inplace import find_inplace
from dnnc.passes.planning.memory_plan import ALIGN, MemoryPlan, place_slots, plan_memory
from dnnc.tools.sample_graphs import graph_of
from support.random_graphs import random_graph

lives = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 12), st.integers(0, 12)), max_size=24)


def rounded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


@pytest.mark.slow
@given(lives)
@settings(max_examples=300, deadline=None)
def test_slots_that_live_together_never_overlap(found: list[tuple[int, int, int]]) -> None:
    sizes = [n for n, _, _ in found]
    spans = [(min(a, b), max(a, b)) for _, a, b in found]
    offsets, total = place_slots(sizes, spans)
    for i in range(len(sizes)):
        assert offsets[i] % ALIGN == 0
        assert offsets[i] + sizes[i] <= total
        for j in range(i):
            if spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]:
                assert offsets[i] + rounded(sizes[i]) <= offsets[j] or offsets[j] + rounded(sizes[j]) <= offsets[i]
    peak = max((sum(rounded(n) for n, (a, b) in zip(sizes, spans) if a <= k <= b) for k in range(13)), default=0)
    assert peak <= total <= sum(map(rounded, sizes))


def planned(text: str) -> MemoryPlan:
    g = graph_of(text)
    return plan_memory(g, plan_fusion(g, fuse=False))


def test_a_chain_needs_two_buffers() -> None:
    plan = planned(
        "def g(x: f32[64, 64]):\n    a = relu(x)\n    b = exp(a)\n    c = relu(b)\n    d = exp(c)\n    return relu(d)"
    )
    offsets, total = plan.offsets({})
    assert total == plan.lower_bound({}) == 2 * 64 * 64 * 4
    assert len(offsets) == 4


def test_inputs_outputs_and_constants_are_not_in_the_arena() -> None:
    g = graph_of("def g(x: f32[4, 4], *, w: f32[4, 4]):\n    a = matmul(x, w)\n    b = softmax(a)\n    return b")
    plan = plan_memory(g, plan_fusion(g, fuse=False))
    assert {v.name: p[0] for v, p in plan.place.items()} == {"x": "input", "w": "constant", "a": "arena", "b": "output"}


def test_a_view_is_its_source() -> None:
    g = graph_of(
        "def g(x: f32[4, 6]):\n    a = relu(x)\n    b = reshape(a, shape=(24,))\n    c = softmax(b)\n    return "
        "exp(c), reshape(c, shape=(2, 12))"
    )
    plan = plan_memory(g, plan_fusion(g, fuse=False))
    by = {v.name: p for v, p in plan.place.items()}
    assert by["a"] == by["b"] and by["a"][0] == "arena"
    assert by["c"] == ("output", 1)  # the second output is c under another shape: c is written there


def test_a_view_keeps_its_source_alive() -> None:
    plan = planned(
        "def g(x: f32[64]):\n    a = relu(x)\n    v = reshape(a, shape=(8, 8))\n    b = exp(x)\n    c = exp(b)\n    "
        "return add(v, reshape(c, shape=(8, 8)))"
    )
    a = next(s for s in plan.slots if s.values[0].name == "a")
    assert a.last == 3  # the step of add


def test_symbolic_sizes_are_placed_for_each_shape() -> None:
    g = parse("N: dim[1, 100]\ndef g(x: f32[N, 16]):\n    a = softmax(x)\n    b = softmax(a)\n    return softmax(b)")
    plan = plan_memory(g, plan_fusion(g, fuse=False))
    n = g.dims["N"]
    assert [plan.offsets({n: k})[1] for k in (1, 2, 100)] == [128, 256, 12800]
    assert plan.lower_bound({n: 100}) == 12800


def test_overwriting_shares_the_slot() -> None:
    g = graph_of("def g(x: f32[8, 8]):\n    a = softmax(x)\n    b = relu(a)\n    return softmax(b)")
    fusion = plan_fusion(g, fuse=False)
    a = next(v for grp in fusion.groups for v in grp.outputs if v.name == "a")
    relu = next(grp for grp in fusion.groups if grp.outputs[0].name == "b")
    plan = plan_memory(g, fusion, {relu.outputs[0]: a})
    assert plan.inplace == {relu.outputs[0]: a}
    assert [[v.name for v in s.values] for s in plan.slots] == [["a", "b"]]


@pytest.mark.parametrize(
    "text", ["def g(x: f32[8, 8]):\n    a = softmax(x)\n    b = relu(a)\n    c = softmax(b)\n    return add(c, a)"]
)
def test_a_value_read_later_is_not_overwritten(text: str) -> None:
    g = graph_of(text)
    fusion = plan_fusion(g, fuse=False)
    a = next(grp.outputs[0] for grp in fusion.groups if grp.outputs[0].name == "a")
    relu = next(grp for grp in fusion.groups if grp.outputs[0].name == "b")
    assert plan_memory(g, fusion, {relu.outputs[0]: a}).inplace == {}


def program(seed: int, nodes: int = 25) -> tuple[Graph, FusionPlan, MemoryPlan]:
    g, _ = random_graph(seed, nodes)
    PassManager().run(g, PASSES, PassContext())
    fusion = plan_fusion(g)
    return g, fusion, plan_memory(g, fusion, find_inplace(g, fusion))


def check_by_running(g: Graph, fusion: FusionPlan, plan: MemoryPlan, dims: dict[Var, int]) -> None:
    """Every step writes its output's number over its bytes, and finds what it expects under those it reads."""
    offsets, total = plan.offsets(dims)
    owner = {"arena": np.full(total, -1)}
    aliases = {v: (source, at) for v, source, at in fusion.views}
    env: dict[Expr, Expr] = {v: const(n) for v, n in dims.items()}
    numbers: dict[Value, int] = {}

    def number(v: Value) -> int:
        return numbers.setdefault(root(aliases, v)[0], len(numbers))

    def nbytes(v: Value) -> int:
        n = value(substitute(const(v.type.nbytes), env))
        assert n is not None
        return n

    def stretch(v: Value) -> tuple[str, slice]:
        (space, slot), at, n = plan.place[v], plan.inside.get(v, 0), nbytes(v)
        if space == "output":
            whole = nbytes(root(aliases, g.outputs[slot])[0])
            owner.setdefault(f"output {slot}", np.full(whole, -1))
            assert at + n <= whole
            return f"output {slot}", slice(at, at + n)
        size = value(substitute(const(plan.slots[slot].nbytes), env))
        assert size is not None
        assert offsets[slot] % ALIGN == 0 and offsets[slot] + at + n <= offsets[slot] + size <= total
        return "arena", slice(offsets[slot] + at, offsets[slot] + at + n)

    def check(v: Value, message: str) -> None:
        space, own = stretch(v)
        assert (owner[space][own] == number(v)).all(), message

    for grp in fusion.groups:
        for v in group_inputs(grp.nodes):
            assert plan.place[v] == plan.place[root(aliases, v)[0]]
            if plan.place[v][0] in ("arena", "output"):
                check(v, f"{grp} reads {v.name}, which is overwritten or not yet there")
        for made in (o for o in grp.outputs if plan.place[o][0] in ("arena", "output")):
            space, own = stretch(made)
            owner[space][own] = number(made)
            for v in group_inputs(grp.nodes):
                if plan.place[v] == plan.place[made] and made not in plan.inplace:
                    _, read = stretch(v)
                    assert read.stop <= own.start or own.stop <= read.start, (
                        f"{grp} writes into {v.name}, which it reads"
                    )
    for k, v in enumerate(g.outputs):
        if plan.place[v] == ("output", k):
            check(v, f"the result {v.name} is overwritten")


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("part", range(4))
def test_nothing_is_overwritten_while_it_is_needed(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "LEAST_RESULT", 1)
    monkeypatch.setattr(result_memory, "LEAST_SLOT", 1)
    guests = 0
    for seed in range(part, 80, 4):
        g, fusion, plan = program(seed)
        guests += len(plan.guests)
        for n in (13, 20) if g.dims else (0,):
            check_by_running(g, fusion, plan, dict.fromkeys(g.dims.values(), n))
    assert guests > 0


@pytest.mark.slow
def test_peaks_are_near_what_the_lifetimes_demand() -> None:
    ratios = []
    for seed in range(60):
        g, _, plan = program(seed, 40)
        dims = dict.fromkeys(g.dims.values(), 13)
        _, total = plan.offsets(dims)
        low = plan.lower_bound(dims)
        assert low <= total <= max(1.02 * low, low + 65536), f"seed {seed}: {total} bytes where {low} are alive"
        if low > 65536:
            ratios.append(total / low)
    assert len(ratios) > 5 and sum(ratios) / len(ratios) < 1.01
