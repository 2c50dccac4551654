"""Derivatives at kinks, ties, zeros and ends of domains, where PyTorch's are the convention: docs/gradients.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dnnc
import dnnc.array as xp
from dnnc.driver import compile
from dnnc.ir.dtype import f32, f64
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType
from support.gradients import gradient

INF = float("inf")
LINE = [-4.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 4.0]
PAIRS = [0.0, 1.0, -1.0, 2.0, 2.0, -3.0], [0.0, 1.0, -1.0, 1.0, 3.0, -3.0]
ROWS = [[0.0, 0.0, 0.0], [1.0, 1.0, -2.0], [2.0, 0.0, 3.0], [0.0, 0.0, 3.0]]
SLOPES = [0.25] * len(LINE)
Function = Callable[..., Any]

# (op, attributes, operands, what PyTorch has)
CASES: list[tuple[str, dict[str, Any], tuple[Any, ...], Function]] = [
    ("abs", {}, (LINE,), torch.abs),
    ("sign", {}, (LINE,), torch.sign),
    ("relu", {}, (LINE,), torch.relu),
    ("leaky_relu", {"alpha": 0.1}, (LINE,), lambda x: F.leaky_relu(x, 0.1)),
    ("prelu", {}, (LINE, SLOPES), lambda x, s: torch.where(x > 0, F.prelu(x, s[:1]), x * s)),
    ("elu", {"alpha": 0.5}, (LINE,), lambda x: F.elu(x, 0.5)),
    ("selu", {}, (LINE,), F.selu),
    ("celu", {"alpha": 0.7}, (LINE,), lambda x: F.celu(x, 0.7)),
    ("hard_sigmoid", {"alpha": 1 / 6, "beta": 0.5}, (LINE,), F.hardsigmoid),
    ("hard_swish", {}, (LINE,), F.hardswish),
    ("softsign", {}, (LINE,), F.softsign),
    ("softplus", {}, (LINE,), F.softplus),
    ("mish", {}, (LINE,), F.mish),
    ("gelu", {"approximate": "none"}, (LINE,), F.gelu),
    ("gelu", {"approximate": "tanh"}, (LINE,), lambda x: F.gelu(x, approximate="tanh")),
    ("thresholded_relu", {"alpha": 0.5}, (LINE,), lambda x: F.threshold(x, 0.5, 0.0)),
    ("shrink", {"bias": 0.0, "lambd": 0.5}, (LINE,), lambda x: F.hardshrink(x, 0.5)),
    ("shrink", {"bias": 0.5, "lambd": 0.5}, (LINE,), lambda x: F.softshrink(x, 0.5)),
    ("clip", {"low": -0.5, "high": 1.0}, (LINE,), lambda x: torch.clamp(x, -0.5, 1.0)),
    ("clip", {"low": None, "high": 1.0}, (LINE,), lambda x: torch.clamp(x, max=1.0)),
    *((name, {}, (LINE,), getattr(torch, name)) for name in ("floor", "ceil", "round", "trunc")),
    ("max", {}, PAIRS, torch.maximum),
    ("min", {}, PAIRS, torch.minimum),
    ("mod", {}, ([3.0, -3.0, 2.5, -2.5, 0.0, 4.0], [1.5, 1.5, -1.0, -1.0, 2.0, 2.0]), torch.remainder),
    ("fmod", {}, ([3.0, -3.0, 2.5, -2.5, 0.0, 4.0], [1.5, 1.5, -1.0, -1.0, 2.0, 2.0]), torch.fmod),
    ("pow", {}, ([0.0, 0.0, 0.0, 2.0, 2.0, 1.0], [0.0, 1.0, 2.0, 0.0, -1.0, 3.0]), torch.pow),
    ("sqrt", {}, ([0.0, 1.0, 4.0],), torch.sqrt),
    ("log", {}, ([0.0, 1.0, 4.0],), torch.log),
    ("asin", {}, ([-1.0, 0.0, 1.0],), torch.asin),
    ("acosh", {}, ([1.0, 2.0],), torch.acosh),
    ("reduce_max", {"axes": (1,)}, (ROWS,), lambda x: torch.amax(x, 1)),
    ("reduce_min", {"axes": (0, 1)}, (ROWS,), lambda x: torch.amin(x, (0, 1))),
    ("reduce_l1", {"axes": (1,)}, (ROWS,), lambda x: torch.linalg.vector_norm(x, 1, 1)),
    ("reduce_l2", {"axes": (1,)}, (ROWS,), lambda x: torch.linalg.vector_norm(x, 2, 1)),
    ("reduce_prod", {"axes": (1,)}, (ROWS,), lambda x: torch.prod(x, 1)),
    ("reduce_prod", {"axes": None}, ([[2.0, 3.0], [0.0, 5.0]],), torch.prod),
    ("cumprod", {"axis": 1}, (ROWS,), lambda x: torch.cumprod(x, 1)),
    (
        "cumprod",
        {"axis": 0, "reverse": True},
        ([2.0, 0.0, 3.0, 0.0, 4.0],),
        lambda x: torch.cumprod(x.flip(0), 0).flip(0),
    ),
    ("softmax", {"axis": 1}, ([[0.0, -INF, 1.0], [2.0, 2.0, 2.0]],), lambda x: torch.softmax(x, 1)),
    ("log_softmax", {"axis": 1}, ([[0.0, -900.0, 1.0], [2.0, 2.0, 2.0]],), lambda x: torch.log_softmax(x, 1)),
    ("reduce_log_sum_exp", {"axes": (1,)}, ([[0.0, -INF, 1.0], [900.0, 900.0, 2.0]],), lambda x: torch.logsumexp(x, 1)),
    ("mean_variance_norm", {"axes": (1,), "epsilon": 1e-5}, (ROWS,), lambda x: F.layer_norm(x, (3,), eps=1e-5)),
]


def label(case: Any) -> str:
    return (
        case if isinstance(case, str) else ",".join(f"{k}={v}" for k, v in case.items()) if type(case) is dict else ""
    )


def by_torch(f: Function, arrays: list[Any], seed: Any) -> list[Any]:
    xs = [torch.from_numpy(a.copy()).requires_grad_() for a in arrays]
    f(*xs).backward(torch.from_numpy(seed))
    return [np.zeros_like(a) if x.grad is None else x.grad.numpy() for x, a in zip(xs, arrays)]


def made_of(name: str, attrs: dict[str, Any], shapes: list[Any], dtype: Any) -> Graph:
    g = Graph("g")
    values = [g.add_input(f"x{k}", TensorType(dtype, s)) for k, s in enumerate(shapes)]
    g.outputs = [Builder(g).op(OPS[name], *values, **attrs)]
    return g


def check(name: str, attrs: dict[str, Any], operands: tuple[Any, ...], f: Function, compiled: bool) -> None:
    dtype = f32 if compiled else f64
    arrays = [np.asarray(a, dtype.numpy) for a in operands]
    g = made_of(name, attrs, [a.shape for a in arrays], dtype)
    seed = np.random.default_rng(1).uniform(1.0, 2.0, g.outputs[0].type.shape).astype(dtype.numpy)
    made = gradient(g)
    if not made.of:
        found: list[Any] = []
    elif compiled:
        got = compile(made.graph, threads=1, cache=False, verify=False)(*arrays, seed)
        found = list(got) if isinstance(got, tuple) else [got]
    else:
        found = run(made.graph, [*arrays, seed])
    of = dict(zip(made.of, found))
    for k, want in enumerate(by_torch(f, arrays, seed)):
        got = of.get(k, np.zeros_like(want))
        np.testing.assert_allclose(got, want, rtol=1e-5 if compiled else 1e-7, atol=1e-6 if compiled else 1e-14)


@pytest.mark.parametrize("name,attrs,operands,f", CASES, ids=label)
def test_kinks_as_pytorch(name: str, attrs: dict[str, Any], operands: tuple[Any, ...], f: Function) -> None:
    check(name, attrs, operands, f, compiled=False)


@pytest.mark.family("samples")
@pytest.mark.parametrize("name,attrs,operands,f", CASES, ids=label)
def test_compiled_kinks(name: str, attrs: dict[str, Any], operands: tuple[Any, ...], f: Function) -> None:
    check(name, attrs, operands, f, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "zeros,exclusive,reverse",
    [((2,), False, False), ((0, 3), True, False), ((0, 3), False, True), ((0, 2, 3), True, True)],
)
def test_products_have_all_orders_at_zeros(zeros: tuple[int, ...], exclusive: bool, reverse: bool) -> None:
    """Third derivatives of running products and of a product along a direction: these are polynomials."""
    x, v = np.array([1.5, -0.5, 2.0, 0.75]), np.array([0.5, 1.0, -1.5, 2.0])
    x[list(zeros)] = 0.0
    w = np.array([1.0, -2.0, 0.5, 3.0])

    def along(f: Any) -> float:
        for _ in range(3):
            f = directional(f)
        return float(f(xp.asarray(x)))

    def directional(f: Any) -> Any:
        return lambda a: xp.sum(dnnc.grad(f)(a) * v)

    def running(a: Any) -> Any:
        rows = a[::-1] if reverse else a
        rows = xp.concatenate([xp.ones((1,), dtype=a.dtype), rows[:-1]]) if exclusive else rows
        return xp.sum(xp.cumprod(rows) * w)

    def product_of(a: Any) -> Any:
        return xp.prod(a)

    polynomials = [np.polynomial.Polynomial([p, q]) for p, q in zip(x, v)]
    order = polynomials[::-1] if reverse else polynomials
    order = [np.polynomial.Polynomial([1.0]), *order[:-1]] if exclusive else order
    one, expected = np.polynomial.Polynomial([1.0]), np.polynomial.Polynomial([0.0])
    for p, weight in zip(order, w):
        one = one * p
        expected = expected + weight * one
    full = np.prod(polynomials)
    np.testing.assert_allclose(along(running), expected.deriv(3)(0.0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(along(product_of), full.deriv(3)(0.0), rtol=1e-12, atol=1e-12)
