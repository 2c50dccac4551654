"""The reference interpreter: precision, decompositions, subgraphs, symbolic dims, sampling, memory."""

from __future__ import annotations

import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dnnc.ir.dtype import bf16, f16, f32
from dnnc.ir.errors import InputError, InternalError, Loc
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run, run_at
from dnnc.ir.graph.text import parse
from dnnc.ir.op import OpDef
from dnnc.ir.types import tensor

Ops = dict[str, OpDef]
RNG = np.random.default_rng(0)


def _f32(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


HEAD = """\
def head(x: f32[N, 4], *, c: f32[4] = [1.0, 2.0, 3.0, 4.0]):
    y = softmax(add(x, c))
    return y, x, c
"""


def test_runs_by_order_and_by_name(ops: Ops) -> None:
    g = parse(HEAD, ops=ops)
    x = _f32(3, 4)
    e = np.exp(x + np.float32([1, 2, 3, 4]))
    for inputs in ([x], {"x": x}):
        y, same, c = run(g, inputs)
        assert (
            y.dtype == np.float32
            and np.allclose(y, e / e.sum(1, keepdims=True))
            and np.array_equal(same, x)
            and c.tolist() == [1, 2, 3, 4]
        )


def test_float64_rounds_nothing(ops: Ops) -> None:
    g = parse("def f(x: f32[4]):\n    y = mul(add(x, 1.0), 3.0)\n    return y\n", ops=ops)
    x = np.float32([1e-9, 0.1, 1e30, -1])
    (exact,) = run(g, [x], "float64")
    (rounded,) = run(g, [x])
    assert exact.dtype == np.float64 and np.array_equal(exact, (x.astype(np.float64) + 1) * 3)
    assert rounded.dtype == np.float32 and rounded[0] == 3 != exact[0]
    assert np.array_equal(run(g, [x.astype(np.float64)], "float64")[0], exact)


@pytest.mark.parametrize("t", [f16, bf16])
def test_half_types_are_computed_in_float32(t: Any, ops: Ops) -> None:
    """The sum of squares inside softmax would overflow f16; each value is rounded to its type once."""
    g = Graph()
    b = Builder(g, ops=ops)
    x = g.add_input("x", tensor(t, 5))
    g.outputs = [b.softmax(x), b.add(x, x)]
    a = np.array([1, 2, 3, 4, 30000], t.numpy)
    soft, twice = run(g, [a])
    assert soft.dtype == t.numpy and soft.astype(np.float32).tolist() == [0, 0, 0, 0, 1]
    assert np.array_equal(twice, (a.astype(np.float32) * 2).astype(t.numpy))


def test_bits_see_the_stored_form(ops: Ops) -> None:
    g = Graph()
    g.outputs = [Builder(g, ops=ops).bits(g.add_input("x", tensor(bf16, 2)))]
    a = np.array([1, -2], ml_dtypes.bfloat16)
    for precision in ("as-is", "float64"):
        assert run(g, [a], precision)[0].tolist() == [0x3F80, 0xC000 - 0x10000]  # type: ignore[arg-type]


def test_decompositions_are_interpreted(ops: Ops) -> None:
    g = parse("def f(x: f16[N]):\n    y = square(x)\n    return y\n", ops=ops)
    x = np.float16([0.1, 300, 2])
    (y,) = run(g, [x])
    assert y.dtype == np.float16 and y[1] == np.inf and run(g, [x], "float64")[0][1] == 90000


def test_absent_operands(ops: Ops) -> None:
    g = parse("def f(x: f32[4], hi: f32):\n    y = clip(x, None, hi)\n    z = clip(x, hi)\n    return y, z\n", ops=ops)
    y, z = run(g, [np.float32([-5, 0, 1, 9]), np.float32(1)])
    assert y.tolist() == [-5, 0, 1, 1] and z.tolist() == [1, 1, 1, 9]


def test_subgraphs_are_functions(ops: Ops) -> None:
    text = """\
def f(x: f32[N]):
    def body(h: f32[N], *, c: f32 = 0.1):
        g = mul(add(h, c), 3.0)
        return g
    y = repeat(x, body=body, times=3)
    return y
"""
    g = parse(text, ops=ops)
    x = np.float32([1, 2])
    want = x.astype(np.float64)
    for _ in range(3):
        want = (want + np.float64(np.float32(0.1))) * 3
    assert np.array_equal(run(g, [x], "float64")[0], want)
    assert run(g, [x])[0].dtype == np.float32 and np.allclose(run(g, [x])[0], want)


def test_symbolic_attributes_get_their_values(ops: Ops) -> None:
    g = parse("def f(x: f32[N, M]):\n    v, i = topk(x, k=M // 2)\n    return v, i\n", ops=ops)
    v, i = run(g, [np.float32([[1, 3, 2, 0]])])
    assert v.tolist() == [[3, 2]] and i.tolist() == [[1, 2]] and i.dtype == np.int64


def test_sizes_that_only_the_data_tell(ops: Ops) -> None:
    text = (
        "K: dim[0, N]\ndef f(x: f32[N]):\n    p: f32[K] = positive(x, count=K)\n    y: f32[K] = add(p, p)\n"
        "    return y\n"
    )
    g = parse(text.replace("K: dim[0, N]", "N: dim\nK: dim[0, N]"), ops=ops)
    assert run(g, [np.float32([1, -1, 3])])[0].tolist() == [2, 6]
    assert run(g, [np.float32([-1])])[0].shape == (0,)


def test_zero_sizes_and_scalars(ops: Ops) -> None:
    g = parse("N: dim[0]\ndef f(x: f32[N, 4], s: f32):\n    y = add(x, s)\n    return y\n", ops=ops)
    assert run(g, [np.zeros((0, 4), np.float32), np.float32(1)])[0].shape == (0, 4)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ([], r"graph head takes 1 input \(x\), got 0"),
        ({"y": 1}, "missing: x, unknown: y"),
        ([np.zeros((2, 4))], r"input x: expected f32, got float64; convert it with \.astype\('float32'\)"),
        ([np.zeros((2, 4), np.int32)], "expected f32, got int32"),
        ([np.zeros((2, 5), np.float32)], r"x: axis 1 of f32\[N, 4\] must be 4, got 5"),
        ([np.zeros(4, np.float32)], "rank 2"),
        ([np.zeros((0, 4), np.float32)], "dim N .* must be at least 1; got 0"),
    ],
)
def test_wrong_inputs(inputs: Any, message: str, ops: Ops) -> None:
    with pytest.raises(InputError, match=message):
        run(parse(HEAD, ops=ops), inputs)


def test_an_attribute_needs_a_size_that_nothing_tells() -> None:
    g = Graph()
    x = g.add_input("x", tensor(f32, 1, 3))
    y = Builder(g).resize(x, shape=(1, dim("N") * 2), coords=((1, 0, 1), (1, 0, 1)), mode="nearest")
    g.outputs = [y]
    with pytest.raises(InputError, match="resize: shape needs the size 2\\*N"):
        run(g, [np.zeros((1, 3), np.float32)])


def test_a_wrong_reference_is_named() -> None:
    bad = OpDef("bad", lambda x: x, host=lambda x: x[:1])
    g = Graph()
    g.outputs = [Builder(g, locs=(Loc("n1", "Bad", 1),)).op(bad, g.add_input("x", tensor(f32, 3)))]
    with pytest.raises(
        InternalError, match=r"bad at n1 \(Bad, opset 1\): the reference's result does not have the declared shape"
    ):
        run(g, [_f32(3)])


def test_values_are_freed_after_their_last_use() -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    def step(x: Any) -> Any:
        nonlocal most
        most = max(most, sum(r() is not None for r in alive))
        y = x + 1
        alive.append(weakref.ref(y))
        return y

    op = OpDef("step", lambda x: x, host=step)
    g = Graph()
    b = Builder(g)
    y = g.add_input("x", tensor(f32, 8))
    for _ in range(20):
        y = b.op(op, y)
        b.op(op, y)  # a result that nobody reads
    g.outputs = [y]
    assert run(g, [np.zeros(8, np.float32)])[0][0] == 20 and most <= 3


# --- sampled outputs --------------------------------------------------------------------------------------------------

FUSED = """\
def f(a: f32[M, K], w: f32[K, N], c: f32[N], r: f32[1, N]):
    p = mul(exp(add(matmul(a, w), c)), r)
    s = softmax(p, axis=0)
    y = add(mul(s, p), square(c))
    return p, y
"""


def test_run_at_gives_the_elements_of_run(ops: Ops) -> None:
    g = parse(FUSED, ops=ops)
    inputs = [_f32(6, 3), _f32(3, 5), _f32(5), _f32(1, 5)]
    points = np.stack([RNG.integers(0, 6, 20), RNG.integers(0, 5, 20)], 1)
    whole = run(g, inputs, "float64")
    for got, want in zip(
        run_at(g, inputs, [points, points[:3]]), [whole[0][tuple(points.T)], whole[1][tuple(points[:3].T)]], strict=True
    ):
        assert got.dtype == np.float64 and np.allclose(got, want, rtol=1e-12, atol=0)


def test_run_at_computes_the_asked_elements_only(ops: Ops) -> None:
    """A group matmul + element-wise epilogue never forms the whole product; shared parts are evaluated once."""
    counts: dict[str, int] = {}

    def counting(name: str) -> OpDef:
        op = ops[name]

        def reference(*xs: Any, **attrs: Any) -> Any:
            counts[name] = counts.get(name, 0) + max(np.size(x) for x in xs)
            return op.reference(*xs, **attrs)  # type: ignore[misc]

        return OpDef(
            name, op.type, compute=op.compute, reference=reference, reference_at=op.reference_at, traits=op.traits
        )

    local = {n: counting(n) for n in ("matmul", "add", "mul", "exp")}
    text = (
        "def f(a: f32[64, 8], w: f32[8, 64], c: f32[64]):\n    e = exp(add(matmul(a, w), c))\n"
        "    y = mul(e, mul(e, e))\n    return y\n"
    )
    g = parse(text, ops=local)
    inputs = [_f32(64, 8), _f32(8, 64), _f32(64)]
    points = np.array([[0, 0], [63, 63], [5, 7]])
    (got,) = run_at(g, inputs, [points])
    assert counts == {"add": 3, "exp": 3, "mul": 6}
    assert np.allclose(got, run(g, inputs, "float64")[0][tuple(points.T)])


def test_run_at_of_scalars_inputs_and_constants(ops: Ops) -> None:
    g = parse("def f(x: f32, y: f32[3], *, c: f32[2] = [1.0, 2.0]):\n    return x, y, c, add(x, x)\n", ops=ops)
    got = run_at(g, [np.float32(4), np.float32([1, 2, 3])], [np.zeros((2, 0)), [[2], [0]], [[1]], np.zeros((1, 0))])
    assert [a.tolist() for a in got] == [[4, 4], [3, 1], [2], [8]]
