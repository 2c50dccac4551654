"""Slots within results: nothing overlaps in space and time, and programs give the same bits with less memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dnnc
from dnnc.ir.arena import ALIGN
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.passes.planning import result_memory
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.memory_plan import MemoryPlan, plan_memory
from dnnc.passes.planning.result_memory import LEAST_RESULT, Result, Stretch, place_within

Array = np.ndarray[Any, Any]
stretches = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12), st.integers(0, 12)), max_size=24)
results = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 13)), max_size=5)


@pytest.mark.slow
@given(stretches, results)
@settings(max_examples=100, deadline=None)
def test_slots_within_results_never_overlap(found: list[tuple[int, int, int]], made: list[tuple[int, int]]) -> None:
    slots = [Stretch(n << 16, min(a, b), max(a, b)) for n, a, b in found]
    placed = place_within(slots, range(len(slots)), [Result(k, n << 16, step) for k, (n, step) in enumerate(made)])
    for k, (output, at) in placed.items():
        size, written = made[output][0] << 16, made[output][1]
        assert size >= LEAST_RESULT and slots[k].last < written
        assert at % ALIGN == 0 and at + slots[k].nbytes <= size
        for j, (other, start) in placed.items():
            if j != k and other == output:
                meets = slots[j].first <= slots[k].last and slots[k].first <= slots[j].last
                assert not meets or start + slots[j].nbytes <= at or at + slots[k].nbytes <= start


def test_what_lives_longest_is_left_the_result_that_is_written_last() -> None:
    size = LEAST_RESULT
    slots = [Stretch(size, 0, 5), Stretch(size, 0, 2), Stretch(size, 0, 9)]
    made = [Result(0, size, 8), Result(1, size, 4)]
    assert place_within(slots, (0, 1, 2), made) == {0: (0, 0), 1: (1, 0)}
    assert place_within(slots, (1, 2), made) == {1: (1, 0)}


CHAIN = """
def g(x: f32[256, 1024]):
    a = exp(x)
    b = relu(a)
    c = exp(b)
    return exp(add(c, a))
"""


def planned(text: str, donated: dict[int, int] | None = None) -> tuple[Graph, MemoryPlan]:
    g = parse(text)
    g.donated = donated or {}
    return g, plan_memory(g, plan_fusion(g, fuse=False))


def test_values_that_die_ahead_of_a_result_lie_in_it() -> None:
    _, plan = planned(CHAIN)
    assert [(g.output, g.byte, g.slot.values[0].name) for g in plan.guests] == [(0, 0, "a")]
    assert [s.values[0].name for s in plan.slots] == ["b", "c", "v0"]


@pytest.mark.parametrize("text", [CHAIN.replace("256", "N"), CHAIN.replace("256", "8")])
def test_sizes_of_calls_and_small_results_hold_nothing(text: str) -> None:
    assert planned("N: dim[1, 1000]\n" + text if "N" in text else text)[1].guests == ()


def test_a_donated_result_holds_nothing() -> None:
    assert planned(CHAIN, {0: 0})[1].guests == ()


def layers(batch: int, width: int, depth: int) -> Graph:
    """Value and gradient of a chain of layers."""
    weights = ", ".join(f"w{k}: f32[{width}, {width}]" for k in range(depth))
    lines = [f"def g(x: f32[{batch}, {width}], {weights}):", "    h0 = relu(x)"]
    lines += [f"    h{k + 1} = tanh(matmul(h{k}, w{k}))" for k in range(depth)]
    lines.append(f"    return reduce_sum(mul(h{depth}, h{depth}), axes=(0, 1), keepdims=False)")
    g = parse("\n".join(lines))
    return dnnc.value_and_grad(g, wrt=[f"w{k}" for k in range(depth)])


@pytest.mark.slow
def test_a_gradient_gives_the_same_bits_with_values_in_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    g = layers(64, 64, 6)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) / 8 for v in g.inputs]
    plain = dnnc.compile(g.copy(), cache=False, threads=2)
    expected = [np.asarray(y) for y in plain(*inputs)]
    monkeypatch.setattr(result_memory, "LEAST_RESULT", 4096)
    f = dnnc.compile(g.copy(), cache=False, threads=2)
    arenas = [x.report.programs[-1].memory.arena for x in (f, plain)]
    assert arenas[0] < 0.6 * arenas[1]
    for offset in (0, 1):  # results of the caller may begin anywhere
        made = [np.full(e.size + offset, np.nan, np.float32)[offset:].reshape(e.shape) for e in expected]
        f.run(inputs, made)
        assert all(np.array_equal(a, b) for a, b in zip(made, expected))
