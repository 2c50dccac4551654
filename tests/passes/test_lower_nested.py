"""Lowering of nested stages with equal names and extents: each loop keeps its stage's variable."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dnnc.ir import te
from dnnc.ir.dtype import f32
from dnnc.ir.expr import Expr, Var
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Alloc, call, walk_stmts
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.te import interp as te_interp
from dnnc.ir.te.stacked import stacked
from dnnc.ir.types import TensorType, tensor
from dnnc.passes.lower.nests import Lowered, lower

N = 3  # every extent
Array = np.ndarray[Any, Any]
X: Array = np.random.default_rng(7).uniform(-1, 1, (N, N)).astype(np.float32)
K: Array = np.random.default_rng(8).uniform(-1, 1, (N, N)).astype(np.float32)


def record(compute: Callable[..., te.Tensor]) -> OpDef:
    def reference(*arrays: Array) -> Array:
        operands = [te.placeholder(f"x{k}", f32, a.shape) for k, a in enumerate(arrays)]
        return te_interp.whole(compute(*operands), dict(zip(operands, arrays)))

    def type_(*types: TensorType) -> TensorType:
        made = compute(*(te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(types)))
        return TensorType(made.dtype, made.dims)

    return OpDef("nested", type_, compute, reference=reference, traits=frozenset((Trait.PURE, Trait.CUSTOM)))


def run_lowered(op: OpDef, *arrays: Array) -> tuple[Array, Lowered]:
    """What the naive kernel of one node computes."""
    g = Graph("g")
    given = [g.add_input(f"x{k}", tensor(f32, *a.shape)) for k, a in enumerate(arrays)]
    g.outputs = [Builder(g).op(op, *given)]
    low = lower(g, list(g.nodes()), g.outputs)
    verify_kernel(low.kernel)
    out = np.full(g.outputs[0].type.shape, np.nan, np.float32)
    by_value = {**dict(zip(g.inputs, arrays)), g.outputs[0]: out}
    run_kernel(low.kernel, {b.name: by_value[v] for b, v in zip(low.kernel.entry.buffers, low.params)})
    return out, low


def test_a_sum_of_a_row_within_a_sum_of_equal_extent() -> None:
    """t[i] = sum_r x[i, r] * m[r], m[j] = sum_r x[j, r]"""

    def compute(x: te.Tensor) -> te.Tensor:
        m = te.reduce((N,), (N,), f32, "sum", lambda j, r: x[j, r])
        return te.reduce((N,), (N,), f32, "sum", lambda i, r: x[i, r] * m[r])

    np.testing.assert_allclose(run_lowered(record(compute), X)[0], X @ X.sum(1), rtol=1e-5)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_powers_of_a_matrix(depth: int) -> None:
    """Each factor is a sum within the sum over it."""

    def compute(x: te.Tensor) -> te.Tensor:
        t = x
        for _ in range(depth):
            t = te.reduce((N, N), (N,), f32, "sum", lambda i, j, r, t=t: t[i, r] * x[r, j])
        return t

    np.testing.assert_allclose(
        run_lowered(record(compute), X)[0], np.linalg.matrix_power(X, depth + 1), rtol=1e-4, atol=1e-6
    )


def test_naive_attention_with_as_many_keys_as_features() -> None:
    def compute(q: te.Tensor, k: te.Tensor) -> te.Tensor:
        scores = te.reduce((N, N), (N,), f32, "sum", lambda i, j, r: q[i, r] * k[j, r])
        top = te.reduce((N,), (N,), f32, "max", lambda i, r: scores[i, r])
        weights = te.compute((N, N), f32, lambda i, j: call("exp", scores[i, j] - top[i]))
        total = te.reduce((N,), (N,), f32, "sum", lambda i, r: weights[i, r])
        return te.reduce((N, N), (N,), f32, "sum", lambda i, j, r: weights[i, r] / total[i] * k[r, j])

    w = np.exp(X @ K.T)
    np.testing.assert_allclose(run_lowered(record(compute), X, K)[0], w / w.sum(1, keepdims=True) @ K, rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_kept_in_local_memory(transposed: bool) -> None:
    """The row's own axis may be named as the loop over the rows is."""

    def compute(x: te.Tensor) -> te.Tensor:
        e = te.compute((N, N), f32, lambda i, j: call("exp", x[i, j]))
        total = te.reduce((N,), (N,), f32, "sum", lambda i, r: e[i, r])
        y = te.compute((N, N), f32, lambda i, j: e[i, j] / total[i])
        return te.compute((N, N), f32, lambda i, j: y[j, i]) if transposed else y

    got, low = run_lowered(record(compute), X)
    want = np.exp(X) / np.exp(X).sum(1, keepdims=True)
    np.testing.assert_allclose(got, want.T if transposed else want, rtol=1e-5)
    assert any(isinstance(s, Alloc) and s.buf.space == "local" for s in walk_stmts(low.kernel.entry.body))


def test_a_condition_that_reads_another_reduction() -> None:
    """t[i] = sum of x[i, r] over the r whose row has a positive sum, which is a reduction of equal extent."""

    def compute(x: te.Tensor) -> te.Tensor:
        m = te.reduce((N,), (N,), f32, "sum", lambda j, r: x[j, r])
        return te.reduce((N,), (N,), f32, "sum", lambda i, r: x[i, r], where=lambda i, r: m[r] > 0.0)

    np.testing.assert_allclose(run_lowered(record(compute), X)[0], X @ (X.sum(1) > 0), rtol=1e-5)


def stages(rng: random.Random, x: te.Tensor, y: te.Tensor) -> te.Tensor:
    """A chain of random stages: every axis has N elements, every index is one of the stage's axes, in any order and
    more than once.
    """
    made = [x, y]

    def read(axes: tuple[Var, ...]) -> Expr:
        t = rng.choice(made[-3:])
        return t[tuple(rng.choice(axes) for _ in t.shape)]

    def element(*axes: Var) -> Expr:
        a, b = read(axes), read(axes)
        return rng.choice((a * b, a + b, call("tanh", a) - b, call("exp", a * 0.125)))

    for _ in range(rng.randint(2, 5)):
        shape = (N,) * rng.choice((1, 2, 2))
        if rng.random() < 0.3:
            made.append(te.compute(shape, f32, element))
            continue
        where = (lambda *axes: read(axes) < 0.25) if rng.random() < 0.4 else None
        made.append(
            te.reduce(
                shape, (N,) * rng.choice((1, 1, 2)), f32, rng.choice(("sum", "sum", "max", "min")), element, where
            )
        )
    shape = made[-1].shape
    return te.compute([N] * len(shape), f32, lambda *axes: made[-1][axes] + read(axes))


@pytest.mark.parametrize("seed", range(60))
def test_random_stages(seed: int) -> None:
    def compute(x: te.Tensor, y: te.Tensor) -> te.Tensor:
        return stages(random.Random(seed), x, y)

    op = record(compute)
    assert op.reference is not None
    want = op.reference(X, K)
    got, _ = run_lowered(op, X, K)
    finite = np.abs(want) < 1e30
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-3, atol=1e-4)
    assert np.array_equal(np.isinf(got[~finite]), np.isinf(want.astype(np.float32)[~finite]))


def test_stacks_of_stacks_of_equal_lengths() -> None:
    """Each level has an axis of its own, whatever its length."""

    def compute(x: te.Tensor) -> te.Tensor:
        return te.reduce((N,), (N,), f32, "sum", lambda i, r: x[i, r] * 2.0)

    one = stacked(record(compute), (True,), (tensor(f32, N, N, N),), ())
    two = stacked(one, (True,), (tensor(f32, N, N, N, N),), ())
    x = np.random.default_rng(0).uniform(-1, 1, (N, N, N, N)).astype(np.float32)
    np.testing.assert_allclose(run_lowered(two, x)[0], 2 * x.sum(-1), rtol=1e-5)
