"""Custom operators: results in array code, programs and graphs on both targets; fusion, checks, identity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.autotune.search.task import Setting, extract
from dnnc.backends.registry import open_backend
from dnnc.compile_program import schedule
from dnnc.frontends.trace import Spec, trace
from dnnc.ir import te
from dnnc.ir.dtype import f32, f64, i64
from dnnc.ir.errors import AccuracyError, InputError, ParseError, ShapeError
from dnnc.ir.expr import Expr, cast, const, maximum, select
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import Trait, require
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType
from dnnc.options import CompileOptions
from support.devices import compile_interpreted

RNG = np.random.default_rng(51)
X = RNG.standard_normal((12, 40), np.float32)
K = RNG.standard_normal(7).astype(np.float32)


def leaky(x: te.Tensor, *, slope: float = 0.1) -> te.Tensor:
    return te.compute(x.dims, x.dtype, lambda *i: maximum(x[i], x[i] * slope))


def correlation_type(x: TensorType, w: TensorType) -> TensorType:
    require(x.rank == w.rank == 1 and x.dtype is w.dtype, "two vectors of one dtype; got {} and {}", x, w)
    return TensorType(x.dtype, (x.shape[0] - w.shape[0] + 1,))  # type: ignore[operator]


def correlation(x: te.Tensor, w: te.Tensor) -> te.Tensor:
    (n,), (k,) = x.dims, w.dims
    return te.reduce((n - k + 1,), (k,), x.dtype, "sum", lambda i, r: x[i + r] * w[r])  # type: ignore[operator]


def unit_rows(x: te.Tensor) -> tuple[te.Tensor, te.Tensor]:
    n, m = x.dims
    total = te.reduce((n,), (m,), x.dtype, "sum", lambda i, r: x[i, r] * x[i, r])
    return te.compute((n, m), x.dtype, lambda i, j: x[i, j] / call("sqrt", total[i])), total


NEST = """
def shifted(N: dim, C: dim, x: f32[N, C], b: f32[C], y: f32[N, C]):
    for i in range(N):
        top: f32[1] @ register
        top[0] = f32(-inf)
        for r in range(C):
            top[0] = max(top[0], x[i, r])
        for j in range(C):
            y[i, j] = exp(x[i, j] - top[0]) * b[j]
"""
LEAKY = dnnc.custom_op("leaky", leaky)
CORRELATION = dnnc.custom_op("correlation", correlation, correlation_type)
UNIT = dnnc.custom_op("unit_rows", unit_rows)
SHIFTED = dnnc.custom_op("shifted", NEST)


def correlated(x: Any) -> Any:
    return np.stack([np.correlate(v.astype(np.float64), K.astype(np.float64), "valid") for v in np.atleast_2d(x)])


@pytest.mark.slow
def test_arrays() -> None:
    x = xp.asarray(X)
    np.testing.assert_allclose(np.asarray(LEAKY(x * 2) + 1), np.maximum(2 * X, np.float32(0.2) * X) + 1, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(LEAKY(x, slope=0.5)), np.maximum(X, X / 2), rtol=1e-6)
    np.testing.assert_allclose(
        np.asarray(CORRELATION(xp.exp(x[0, :]), K)), correlated(np.exp(X[0]))[0], rtol=1e-4, atol=1e-5
    )
    rows, total = UNIT(X)
    np.testing.assert_allclose(np.asarray(rows), X / np.sqrt((X * X).sum(1, keepdims=True)), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(total), (X * X).sum(1), rtol=1e-5)
    np.testing.assert_allclose(
        np.asarray(SHIFTED(X, np.ones(40, np.float32))), np.exp(X - X.max(1, keepdims=True)), rtol=1e-5
    )
    assert LEAKY(xp.asarray(np.array([1.0, -2.0]))).dtype == np.float64


def test_numbers_and_half_types() -> None:
    half = dnnc.custom_op("mixed", lambda x, s: te.compute(x.dims, x.dtype, lambda *i: x[i] * cast(s[()], f32)))
    np.testing.assert_array_equal(np.asarray(half(X.astype(np.float16), 0.5)), X.astype(np.float16) / 2)
    count = dnnc.custom_op("count", lambda x: te.reduce((), x.dims, i64, "sum", lambda *r: cast(0.0 < x[r], i64)))
    assert int(count(X)) == (X > 0).sum()


def picked(x: te.Tensor, at: te.Tensor) -> te.Tensor:
    return te.compute(
        (*at.dims, x.dims[1]), x.dtype, lambda i, j: x[call("guard", cast(at[i], i64), 0, x.dims[0]), j] + 1.0
    )


def test_indices_are_checked_at_the_call() -> None:
    op = dnnc.custom_op("picked", picked)
    at = np.array([3, 0, 11, 3], np.int32)
    np.testing.assert_allclose(np.asarray(op(xp.asarray(X) * 2, at)), 2 * X[at] + 1, rtol=1e-6)
    for bad in (-1, 12):
        with pytest.raises(InputError, match="outside of its axis"):
            np.asarray(op(X, np.array([0, bad])))


def both(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of a program on the CPU and of one on the interpreted device, of which there is one kernel."""
    graph = trace(fn, *args)
    names = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
    gpu = compile_interpreted(graph.copy(), names)
    cpu = dnnc.compile(graph, threads=1, cache=False)
    assert len(cpu.report.programs[0].kernels) == 1 and gpu.source("cuda").count("__global__") == 1
    return [np.asarray(f(*args)) for f in (cpu, gpu)]


@pytest.mark.slow
def test_one_kernel_with_what_stands_around_on_both_targets() -> None:
    for y in both(lambda x: xp.sqrt(abs(LEAKY(x * 2 + 1, slope=0.25))), X):
        np.testing.assert_allclose(y, np.sqrt(abs(np.maximum(2 * X + 1, (2 * X + 1) / 4))), rtol=1e-5)
    for y in both(lambda x, w: xp.tanh(CORRELATION(x, w)) + 1, X[0], K):
        np.testing.assert_allclose(y, np.tanh(correlated(X[0])[0]) + 1, rtol=1e-4, atol=1e-5)
    total = dnnc.custom_op(
        "total", lambda x: te.reduce(x.dims[:1], x.dims[1:], x.dtype, "sum", lambda i, r: x[i, r] * x[i, r])
    )
    for y in both(lambda x: total(x * 2 - 1), X):
        np.testing.assert_allclose(y, ((2 * X - 1) ** 2).sum(1), rtol=1e-5)
    for y in both(lambda x, b: SHIFTED(x, b) * 2, X, np.ones(40, np.float32)):
        np.testing.assert_allclose(y, 2 * np.exp(X - X.max(1, keepdims=True)), rtol=1e-5)


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", ["reduce_squares", "reduce_sum", "layer_norm", "softmax", "cumsum", "gather"])
def test_an_op_may_be_named_like_one_of_dnnc(name: str) -> None:
    """Nothing follows from the name: this one has neither `axes` nor `axis`."""
    op = dnnc.custom_op(
        name, lambda x: te.reduce(x.dims[:1], x.dims[1:], x.dtype, "sum", lambda i, r: x[i, r] * x[i, r])
    )
    for y in both(lambda x: op(x * 2 - 1), X):
        np.testing.assert_allclose(y, ((2 * X - 1) ** 2).sum(1), rtol=1e-5)
    y = dnnc.jit(lambda x: x - xp.sqrt(op(x))[:, None] + xp.sum(x, axis=1, keepdims=True), threads=1)(X)
    np.testing.assert_allclose(
        np.asarray(y), X - np.sqrt((X * X).sum(1))[:, None] + X.sum(1, keepdims=True), rtol=1e-4, atol=1e-5
    )


def test_an_element_that_depends_on_its_place() -> None:
    """The identity beside the operand: no reshape, transposition or broadcast may move past it."""
    plus = dnnc.custom_op(
        "plus_identity",
        lambda x: te.compute(x.dims, x.dtype, lambda i, j: x[i, j] + select(i.eq(j), const(1.0, f32), const(0.0, f32))),
    )
    x = np.random.default_rng(3).standard_normal((6, 6)).astype(np.float32)
    for y in both(lambda x: xp.exp(plus(x * 2)).reshape(4, 9), x):
        np.testing.assert_allclose(y, np.exp(2 * x + np.eye(6)).reshape(4, 9), rtol=1e-5)
    for y in both(lambda x: plus(x.reshape(6, 6)).T.reshape(-1), x.reshape(-1)):
        np.testing.assert_allclose(y, (x + np.eye(6)).T.reshape(-1), rtol=1e-5)


@pytest.mark.slow
def test_a_long_sum_of_elements_that_depend_on_their_place() -> None:
    """Sums in parts view the operand in another shape, not what is computed of it."""
    trace_of = dnnc.custom_op(
        "diagonal", lambda x: te.compute(x.dims, x.dtype, lambda i, j: select(i.eq(j), x[i, j], const(0.0, f32)))
    )
    x = np.ones((1200, 1200), np.float32)
    graph = trace(lambda x: xp.sum(trace_of(x)), x)
    f = dnnc.compile(graph.copy(), threads=1, cache=False)
    assert len(f.report.programs[0].kernels) > 1  # in parts
    assert float(np.asarray(f(x))) == 1200


@pytest.mark.slow
def test_under_vmap_and_jit() -> None:
    @dnnc.jit(threads=1)
    def f(x: Any, k: Any) -> Any:
        return dnnc.vmap(lambda v: LEAKY(CORRELATION(v, k)))(x)

    want = correlated(X)
    np.testing.assert_allclose(np.asarray(f(X, K)), np.maximum(want, want * 0.1), rtol=1e-4, atol=1e-5)
    rows, total = dnnc.vmap(UNIT)(X.reshape(3, 4, 40))
    np.testing.assert_allclose(np.asarray(total).reshape(12), (X * X).sum(1), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(rows).reshape(12, 40), X / np.sqrt((X * X).sum(1, keepdims=True)), rtol=1e-5)


def test_in_graphs() -> None:
    g = trace(lambda x: LEAKY(x) * 2, Spec((3, 4)))
    (op, _) = (n.op for n in g.nodes())
    assert op.name.startswith("leaky_") and op.name not in OPS and Trait.ELEMENTWISE in op.traits
    again = parse(str(g))  # the text holds the definition
    assert again.structural_hash() == g.structural_hash() and str(again) == str(g)
    x = X[:3, :4]
    np.testing.assert_allclose(run(again, [x])[0], 2 * np.maximum(x, x * 0.1), rtol=1e-6)


LAYER = """
def layer(M: dim, N: dim, K: dim, x: f32[M, K], w: f32[K, N], b: f32[N], y: f32[M, N]):
    for i in range(M):
        for j in range(N):
            acc: f32[1] @ register
            acc[0] = 0.0
            for k in range(K):
                acc[0] = fma(x[i, k], w[k, j], acc[0])
            y[i, j] = max(acc[0] + b[j], 0.0)
"""


def test_sizes_that_no_operand_shows() -> None:
    back = dnnc.custom_op("back", lambda x: te.compute(x.dims, x.dtype, lambda i: x[x.dims[0] - 1 - i]))  # type: ignore[operator]
    f = dnnc.compile(lambda x: back(xp.concat([x, x + 1, x[:-1]])), inputs=[Spec(("n",))], threads=1)
    for n in (2, 5):
        x = RNG.standard_normal(n).astype(np.float32)
        np.testing.assert_allclose(f(x), np.concatenate([x, x + 1, x[:-1]])[::-1])
    assert "x0: f32[3*n - 1]" in f.source("graph")


def test_products_of_matrices_are_those_of_the_op() -> None:
    w, b = RNG.standard_normal((40, 24), np.float32), RNG.standard_normal(24).astype(np.float32)
    layer = dnnc.custom_op("layer", LAYER)
    g = trace(lambda x: layer(x, w, b), Spec(("n", 40)))
    assert [n.op.name.partition("_")[0] for n in g.nodes()] == ["matmul", "layer"]
    f = dnnc.compile(g, dims={"n": (1, 100)}, threads=1)
    for n in (12, 5):
        np.testing.assert_allclose(f(X[:n]), np.maximum(X[:n] @ w + b, 0), rtol=1e-4, atol=1e-4)
    assert len(f.report.programs[0].kernels) == 1


@pytest.mark.parametrize(
    ("equation", "shapes", "kinds"),
    [
        ("mk,kn->mn", ((5, 6), (6, 7)), "mn"),
        ("kn,mk->nm", ((6, 7), (5, 6)), "mn"),
        ("bmk,bnk->mbn", ((2, 5, 6), (2, 7, 6)), "mbn"),
        ("mk,k->m", ((5, 6), (6,)), "m"),
        ("apkq,rk->raqp", ((2, 3, 4, 5), (6, 4)), "nmmm"),
        ("bk,bk->b", ((3, 4), (3, 4)), None),
        ("mk,kk->m", ((3, 4), (4, 4)), None),
    ],
)
def test_products_in_any_order(equation: str, shapes: Any, kinds: str | None) -> None:
    """einsum as a tensor expression, of one letter that is summed over."""
    (one, two), out = equation.split("->")[0].split(","), equation.split("->")[1]
    arrays = [RNG.standard_normal(s) for s in shapes]
    sizes = {c: n for names, s in zip((one, two), shapes) for c, n in zip(names, s)}

    def compute(x: te.Tensor, y: te.Tensor) -> te.Tensor:
        def element(*v: Expr) -> Expr:
            at = dict(zip(out + "k", v))
            return x[tuple(at[c] for c in one)] * y[tuple(at[c] for c in two)]

        return te.reduce([sizes[c] for c in out], [sizes["k"]], x.dtype, "sum", element)

    op = dnnc.custom_op("einsum", compute)
    found = op.record([TensorType(f64, s) for s in shapes], {}).products
    assert [p.kinds for p in found] == ([] if kinds is None else [kinds])
    np.testing.assert_allclose(np.asarray(op(*arrays)), np.einsum(equation, *arrays), rtol=1e-12, atol=1e-12)


def test_definitions_are_told_apart() -> None:
    """Two ops of one name are not one program, and one definition made twice is."""

    def made(slope: float) -> Any:
        return dnnc.custom_op(
            "leaky", lambda x: te.compute(x.dims, x.dtype, lambda i, j: maximum(x[i, j], x[i, j] * slope))
        )

    np.testing.assert_allclose(np.asarray(made(0.5)(X)), np.maximum(X, X * 0.5), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(made(0.25)(X)), np.maximum(X, X * 0.25), rtol=1e-6)
    before = PROGRAMS_MADE.compiled
    np.testing.assert_allclose(np.asarray(made(0.5)(X)), np.maximum(X, X * 0.5), rtol=1e-6)
    assert PROGRAMS_MADE.compiled == before


def test_the_gate_compares_with_the_reference() -> None:
    right = dnnc.custom_op(
        "third", lambda x: te.compute(x.dims, x.dtype, lambda *i: x[i] * (1 / 3)), reference=lambda x: x / 3
    )
    np.testing.assert_allclose(np.asarray(right(X)), X / 3, rtol=1e-6)
    rows = dnnc.custom_op(
        "rows", leaky, reference=lambda x, slope: np.maximum(x, x * slope) + 0 * np.sum(x, axis=1, keepdims=True)
    )
    np.testing.assert_allclose(
        np.asarray(rows(X) * 2), 2 * np.maximum(X, X * 0.1), rtol=1e-6
    )  # which is not asked for single elements
    wrong = dnnc.custom_op(
        "third", lambda x: te.compute(x.dims, x.dtype, lambda *i: x[i] * 0.34), reference=lambda x: x / 3
    )
    with pytest.raises(AccuracyError, match="third"):
        dnnc.compile(lambda x: wrong(x), inputs=[X], threads=1, cache=False)


def test_long_sums_pass_the_gate() -> None:
    x = np.abs(RNG.standard_normal((3, 20000), np.float32))
    np.testing.assert_allclose(np.asarray(UNIT(x)[1]), (x.astype(np.float64) ** 2).sum(1), rtol=1e-4)


@pytest.mark.parametrize("code", [True, False])
def test_saved_models_hold_definitions(tmp_path: Path, code: bool) -> None:
    f = dnnc.compile(
        lambda x, k: dnnc.vmap(CORRELATION, (0, None))(LEAKY(x), k), inputs=[Spec(("n", 40)), Spec((7,))], threads=1
    )
    f.save(tmp_path / "m.dnnc")
    loaded = dnnc.load(tmp_path / "m.dnnc", code=code)
    for n in (5, 12):
        np.testing.assert_allclose(loaded(X[:n], K), correlated(np.maximum(X, X * 0.1)[:n]), rtol=1e-4, atol=1e-5)


def test_tuned_like_others(tmp_path: Path) -> None:
    """A task is text, which other processes read."""
    options = CompileOptions(threads=1)
    program = schedule(trace(lambda x: LEAKY(x) + 1, X), open_backend("llvm", 1), options)
    ((task, _),) = extract(program, Setting("llvm"))
    _, group, problem = task.rebuilt
    assert problem.kind == "map" and [n.op.name.partition("_")[0] for n in group.nodes] == ["leaky", "add"]


def outside(x: te.Tensor) -> te.Tensor:
    return te.compute(x.dims, x.dtype, lambda i: x[i + 1])


def no_tensor(x: te.Tensor) -> Expr:
    return const(1)


def test_errors() -> None:
    with pytest.raises(InputError, match="identifier"):
        dnnc.custom_op("a b", leaky)
    with pytest.raises(ShapeError, match=r"two vectors of one dtype; got f32\[12, 40\] and f32\[7\]"):
        CORRELATION(X, K)
    with pytest.raises(ShapeError, match=r"its type rule says .*, its expression makes"):
        dnnc.custom_op("typed", leaky, lambda x, **attrs: TensorType(x.dtype, (3,)))(X)
    with pytest.raises(ShapeError, match="cannot be made for operands f32"):
        UNIT(K)
    with pytest.raises(ShapeError, match=r"'Tensor' and 'int'; compute elements of tensors, such as te\.compute"):
        dnnc.custom_op("doubled", lambda x: x * 2)(X)
    with pytest.raises(InputError, match=r"must give te\.compute"):
        dnnc.custom_op("nothing", no_tensor)(X)
    with pytest.raises(InputError, match="expected real numbers"):
        LEAKY(X + 1j)
    with pytest.raises(InputError, match="expected arrays, got float"):
        LEAKY(1.0)
    with pytest.raises(ShapeError, match="unexpected keyword argument"):
        LEAKY(X, shape=1)
    with pytest.raises(ParseError, match="line 1"):
        dnnc.custom_op("text", "def f(")
    with pytest.raises(dnnc.DnncError, match=r"cannot show i0 \+ 1 \+ 1 <= 7 in x0"):
        np.asarray(dnnc.custom_op("outside", outside)(K))
