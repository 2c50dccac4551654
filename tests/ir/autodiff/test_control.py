"""Derivatives of loops and branches: numbers, and what the graphs of gradients hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import dnnc
import support.random_gradients as tools
from dnnc.frontends.onnx import from_onnx
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.dtype import DType, boolean, f16, f64, i64
from dnnc.ir.errors import GradientError
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.types import Dim, TensorType
from support.gradient_checks import check
from support.random_gradients import Array, check_gradient, check_seed, gradient_graph

RNG = np.random.default_rng(5)
Case = tuple[Graph, list[Array]]


def graph(name: str, **inputs: TensorType) -> tuple[Graph, Builder, list[Any]]:
    g = Graph(name)
    return g, Builder(g), [g.add_input(k, t) for k, t in inputs.items()]


def t(*shape: Dim, dtype: DType = f64) -> TensorType:
    return TensorType(dtype, shape)


def arrays(g: Graph, **sizes: int) -> list[Array]:
    return [RNG.standard_normal([d if isinstance(d, int) else sizes[d.name] for d in v.type.shape]) for v in g.inputs]


def recurrent(length: Dim = 5, backward: tuple[bool, ...] = (), checkpoint: int = 0) -> Graph:
    """h = tanh(x @ w + h @ u.T + b) and rows h * number, with a batch of 3."""
    body, b, (it, h, x, w, u, c) = graph("step", it=t(dtype=i64), h=t(3, 4), x=t(3, 2), w=t(2, 4), u=t(4, 4), c=t(4))
    new = b.tanh(b.add(b.add(b.matmul(x, w), b.matmul(h, b.transpose(u, perm=(1, 0)))), c))
    body.outputs = [new, b.mul(new, b.cast(it, to=f64))]
    g, b, operands = graph("g", h0=t(3, 4), xs=t(length, 3, 2), w=t(2, 4), u=t(4, 4), c=t(4))
    attrs = {"carried": 1, "scanned": 1, "length": length, "backward": backward, "checkpoint": checkpoint}
    g.outputs = list(b.loop(None, None, *operands, body=body, **attrs))
    return g


def loops(g: Graph) -> list[Node]:
    return [n for n in g.nodes() if n.op.name == "loop"]


@pytest.mark.parametrize("backward", [(), (True, True), (True, False), (False, True)])
def test_a_loop_and_its_rows_in_either_order(backward: tuple[bool, ...]) -> None:
    g = recurrent(backward=backward)
    check(g, arrays(g))


def test_matrices_meet_their_cotangents_after_the_loop() -> None:
    joint, *_ = gradient_graph(recurrent())
    forward, reverse = loops(joint)
    carried = [v.type for v in reverse.attrs["body"].outputs[: reverse.attrs["carried"]]]
    assert carried == [t(3, 4), t(4)]  # the state's cotangent and the sum for c, no matrix
    assert not any(n.op.name == "transpose" for n in (*forward.attrs["body"].nodes(), *reverse.attrs["body"].nodes()))
    assert len(forward.outputs) == 4  # two results, the states before each step, what tanh's derivative is
    assert len({id(v) for v in reverse.attrs["body"].outputs}) == len(reverse.attrs["body"].outputs)


@pytest.mark.family("kernels")
@pytest.mark.parametrize(("length", "every"), [(7, 2), (6, 3), (5, 1), (3, 9), (8, 7)])
@pytest.mark.parametrize("backward", [(), (True, False)])
def test_checkpoints_change_no_number(length: int, every: int, backward: tuple[bool, ...]) -> None:
    g, plain = recurrent(length, backward, every), recurrent(length, backward)
    xs = arrays(g)
    joint, want = check(g, xs), gradient_graph(plain)[0]
    cotangents = [RNG.standard_normal(v.type.shape) for v in joint.inputs[len(xs) :]]
    for a, b in zip(run(joint, [*xs, *cotangents]), run(want, [*xs, *cotangents])):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("every", [0, 3])
def test_symbolic_length(every: int) -> None:
    g = recurrent(dim("T", 1, 30), (True, False), every)
    for size in (3, 7):
        check(g, arrays(g, T=size))


@pytest.mark.parametrize("every", [0, 2])
def test_second_derivatives(every: int) -> None:
    g = recurrent(4, (True, False), every)
    check(g, arrays(g), again=True)


def test_a_loop_of_no_iteration_passes_cotangents_on() -> None:
    body, _, (_, h) = graph("step", it=t(dtype=i64), h=t(3))
    body.outputs = [Builder(body).exp(h)]
    g, b, (h0,) = graph("g", h0=t(3))
    g.outputs = [b.loop(None, None, b.sin(h0), body=body, carried=1, length=0)]
    check(g, arrays(g))


def test_integer_states_are_kept_and_indices_take_rows() -> None:
    """A table that is captured gets one scatter after the loop."""
    body, b, (_, k, x, table) = graph("step", it=t(dtype=i64), k=t(dtype=i64), x=t(3), table=t(7, 3))
    body.outputs = [b.mod(b.add(b.mul(k, 3), 1), 7), b.mul(x, b.sin(b.gather(table, k)))]
    g, b, (x0, table) = graph("g", x0=t(3), table=t(7, 3))
    g.outputs = list(b.loop(None, None, b.constant(2), x0, table, body=body, carried=2, length=6))
    joint = check(g, arrays(g))
    _, reverse = loops(joint)
    assert all(v.type.shape != (7, 3) for v in reverse.attrs["body"].outputs)


def test_states_that_meet_only_through_others() -> None:
    """b depends on a and c on b, one iteration later; d is on no path."""
    body, b, (_, p, q, r, s) = graph("step", it=t(dtype=i64), p=t(2), q=t(2), r=t(2), s=t(2))
    body.outputs = [b.sin(p), b.mul(p, q), b.add(q, r), b.neg(s)]
    g, b, (p0, s0) = graph("g", p0=t(2), s0=t(2))
    one = b.constant(np.ones(2))
    made = b.loop(None, None, p0, one, one, s0, body=body, carried=4, length=3)
    g.outputs = [made[2]]
    joint = check(g, arrays(g))
    assert loops(joint)[1].attrs["carried"] == 3


def test_a_half_sum_is_carried_in_f32() -> None:
    body, b, (_, h, c) = graph("step", it=t(dtype=i64), h=t(3, dtype=f16), c=t(dtype=f16))
    body.outputs = [b.mul(h, c)]
    g, b, (h0, c) = graph("g", h0=t(3, dtype=f16), c=t(dtype=f16))
    g.outputs = [b.loop(None, None, h0, c, body=body, carried=1, length=9)]
    joint, *_ = gradient_graph(g)
    assert {str(v.type.dtype) for v in loops(joint)[1].outputs} == {"f16", "f32"}
    assert [v.type for v in joint.outputs[1:]] == [v.type for v in g.inputs]


# --- conditions -------------------------------------------------------------------------------------------------------


def bounded(bound: int | None, condition: bool = True, trips: bool = False, ends: int = 3) -> Graph:
    body, b, (_, x, n, w) = graph("step", it=t(dtype=i64), x=t(3), n=t(dtype=i64), w=t(3, 3))
    new = b.add(n, 1)
    body.outputs = [*([b.less(new, ends)] if condition else []), b.sin(b.matmul(x, w)), new]
    g, b, (x0, w) = graph("g", x0=t(3), w=t(3, 3))
    count = g.add_input("trips", t(dtype=i64)) if trips else None
    first = g.add_input("first", t(dtype=boolean)) if condition else None
    g.outputs = list(b.loop(count, first, x0, b.constant(0), w, body=body, carried=2, length=bound))
    return g


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("bound", "ends"), [(6, 3), (4, 100)])
def test_a_loop_that_ends_by_a_condition(first: bool, bound: int, ends: int) -> None:
    g = bounded(bound, ends=ends)
    check(g, [RNG.standard_normal(3), RNG.standard_normal((3, 3)), np.array(first)], again=True)


@pytest.mark.parametrize("condition", [True, False])
def test_a_number_of_iterations_that_the_data_tells(condition: bool) -> None:
    g = bounded(6, condition, trips=True, ends=5)
    more = [np.array(True)] if condition else []
    check(g, [RNG.standard_normal(3), RNG.standard_normal((3, 3)), np.array(2), *more])


def test_without_a_bound_the_error_names_the_loop_and_forward_mode_works() -> None:
    from dnnc.ir.autodiff.forward import pushforward

    g = bounded(None)
    with pytest.raises(GradientError, match=r"^loop.*give it a bound, as in while_loop"):
        pullback(g.copy(), {}, []) or gradient_graph(g)
    xs = [RNG.standard_normal(3), RNG.standard_normal((3, 3)), np.array(True)]
    tangent = g.add_input("tangent", t(3))
    g.outputs = [g.outputs[0], *pushforward(g, {g.inputs[0]: tangent}, [g.outputs[0]])]  # type: ignore[list-item]
    x, w, _ = xs
    y, got = run(g, [*xs, np.ones(3)])
    slope = np.ones(3)
    for _ in range(3):
        x, slope = np.sin(x @ w), np.cos(x @ w) * (slope @ w)
    np.testing.assert_allclose(y, x)
    np.testing.assert_allclose(got, slope)


def choice() -> Graph:
    """One branch has a product, whose result is a residual; the other does not read all operands."""
    then, b, (x, w, u) = graph("then", x=t(2, 3), w=t(3, 3), u=t(2, 3))
    then.outputs = [b.matmul(b.tanh(b.matmul(x, w)), w), x]
    other, b, (x, _, u) = graph("other", x=t(2, 3), w=t(3, 3), u=t(2, 3))
    other.outputs = [b.mul(u, b.exp(x)), b.floor(x)]
    g, b, (x, w, u) = graph("g", x=t(2, 3), w=t(3, 3), u=t(2, 3))
    test = g.add_input("test", t(dtype=boolean))
    g.outputs = list(b.cond(test, x, w, b.sin(u), then=then, other=other))
    return g


@pytest.mark.parametrize("taken", [True, False])
def test_branches(taken: bool) -> None:
    g = choice()
    xs = [*(RNG.standard_normal(v.type.shape) for v in g.inputs[:3]), np.array(taken)]
    joint = check(g, xs, again=True)
    forward, reverse = (n for n in joint.nodes() if n.op.name == "cond")
    products = [sum(n.op.name == "matmul" for n in body.nodes()) for body in forward.subgraphs()]
    assert products == [2, 0]  # the branch's products once
    assert not any(n.op.name == "tanh" for body in reverse.subgraphs() for n in body.nodes())


@pytest.mark.parametrize("every", [0, 2])
def test_a_branch_in_a_loop_in_a_loop(every: int) -> None:
    inner, b, (_, x, limit, w) = graph("inner", it=t(dtype=i64), x=t(2, 3), limit=t(), w=t(3, 3))
    then, tb, (a, _) = graph("then", a=t(2, 3), w=t(3, 3))
    then.outputs = [tb.sin(a)]
    other, ob, (a, v) = graph("other", a=t(2, 3), w=t(3, 3))
    other.outputs = [ob.matmul(a, v)]
    big = b.greater(b.reduce_sum(x, axes=(0, 1), keepdims=False), limit)
    inner.outputs = [b.cond(big, x, w, then=then, other=other), b.mul(x, x)]
    outer, b, (_, x, row, w) = graph("outer", it=t(dtype=i64), x=t(2, 3), row=t(), w=t(3, 3))
    last, squares = b.loop(None, None, x, row, w, body=inner, carried=1, length=3, checkpoint=every)
    outer.outputs = [last, b.reduce_sum(squares, axes=(0,), keepdims=False)]
    g, b, (x, rows, w) = graph("g", x=t(2, 3), rows=t(4), w=t(3, 3))
    attrs = {"carried": 1, "scanned": 1, "length": 4, "checkpoint": every}
    g.outputs = list(b.loop(None, None, x, rows, w, body=outer, **attrs))
    xs = arrays(g)
    check(g, xs)


@pytest.mark.slow
@pytest.mark.parametrize("make", [recurrent, choice, lambda: bounded(6), lambda: recurrent(7, (True, False), 3)])
def test_compiled_gradients_are_those_of_the_interpreter(make: Any) -> None:
    g = make()
    xs = [
        np.array(1, v.type.dtype.numpy) if not v.type.dtype.is_float else RNG.standard_normal(v.type.shape)
        for v in g.inputs
    ]

    def compiled(joint: Graph, given: list[Array]) -> str | None:
        for got, want in zip(dnnc.compile(joint, threads=1)(*given), run(joint, given)):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
        return None

    assert check_gradient(g, xs, compiled) is None


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("part", range(20))
def test_random_graphs(part: int) -> None:
    """Seeds that `python -m support.fuzz --gradients` has, each a graph with loops and branches."""
    for seed in range(20_000 + part, 20_100, 20):
        failure = check_seed(seed, 10)
        assert failure is None, f"seed {seed}: {failure}"


def test_checks_of_random_gradients_find_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is off, or that forgets a part, does not pass."""
    g = recurrent()
    joint, made, wanted, live = gradient_graph(g)
    off = joint.copy()
    b = Builder(off)
    off.outputs[len(g.outputs)] = b.mul(off.outputs[len(g.outputs)], 1.001)
    monkeypatch.setattr(tools, "gradient_graph", lambda _: (off, made, wanted, live))
    assert (message := check_gradient(g, arrays(g))) is not None and message.startswith("wrong gradient")
    monkeypatch.setattr(tools, "gradient_graph", lambda _: (joint, made, wanted, live[:-1]))
    assert (message := check_gradient(g, arrays(g))) is not None and message.startswith("wrong gradient")


# --- models of ONNX ---------------------------------------------------------------------------------------------------

LOOP_TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
model (double[2, 3] x, double[3, 3] w) => (double[2, 3] last, double[60, 2, 3] rows)
<int64 trips = {60}, bool go = {1}>
{
    last, rows = Loop (trips, go, x) <body = step (int64 k, bool c, double[2, 3] h)
        => (bool c2, double[2, 3] h2, double[2, 3] y) {
        p = MatMul (h, w)
        h2 = Tanh (p)
        y = Mul (h2, p)
        c2 = Identity (c)
    }>
}
"""
UNTIL_TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
model (double[2, 3] x, double[3, 3] w) => (double[2, 3] last)
<int64 trips = {50}, bool go = {1}, double small = {0.05}, int64[2] axes = {0, 1}>
{
    last = Loop (trips, go, x) <body = step (int64 k, bool c, double[2, 3] h) => (bool c2, double[2, 3] h2) {
        p = MatMul (h, w)
        h2 = Tanh (p)
        s = ReduceL2 <keepdims = 0> (h2, axes)
        c2 = Greater (s, small)
    }>
}
"""
SCAN_TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
model (double[2, 3] x, double[40, 2, 3] rows, double[3, 3] w) => (double[2, 3] last, double[40, 2, 3] ys)
{
    last, ys = Scan <num_scan_inputs = 1, scan_input_directions = [1],
        body = step (double[2, 3] h, double[2, 3] r) => (double[2, 3] h2, double[2, 3] y) {
        p = MatMul (h, w)
        q = Add (p, r)
        h2 = Tanh (q)
        y = Mul (h2, r)
    }> (x, rows)
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [LOOP_TEXT, UNTIL_TEXT, SCAN_TEXT], ids=["loop", "until", "scan"])
def test_loops_of_onnx(text: str) -> None:
    g = from_onnx(onnx.parser.parse_model(text))
    assert loops(g)
    xs = [a * 0.5 for a in arrays(g)]
    joint = check(g, xs)
    more = [RNG.standard_normal(v.type.shape) for v in joint.inputs[len(xs) :]]
    for got, want in zip(dnnc.compile(joint, threads=1)(*xs, *more), run(joint, [*xs, *more])):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
