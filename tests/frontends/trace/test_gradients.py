"""Derivatives of functions of array code: closed forms, central differences in float64, and one transformation against
another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.ir import te
from dnnc.ir.errors import GradientError, InputError
from dnnc.ir.loops.stmt import call

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(7)
X = np.linspace(0.3, 2.1, 6).reshape(2, 3)


def differences(f: Callable[..., Any], x: Array, h: float = 1e-6) -> Array:
    """Central differences of a function of one float64 array that gives one number."""
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        d = np.zeros_like(x)
        d[at] = h
        out[at] = (float(f(xp.asarray(x + d))) - float(f(xp.asarray(x - d)))) / (2 * h)
    return out


def close(got: Any, want: Any, rtol: float = 1e-7) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol, 1e-9)


# --- grad -------------------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "polynomial": lambda x: xp.sum(x**3 - 2 * x),
    "chain": lambda x: xp.sum(xp.sin(xp.exp(x)) * xp.log(x + 1)),
    "product": lambda x: xp.sum(x @ x.T),
    "reduction": lambda x: xp.max(xp.sum(x * x, axis=1)) + xp.prod(x[0, ...]) + xp.std(x),
    "indexing": lambda x: x[0, 1] * x[1, 2] + xp.sum(x[:, ::-1] * xp.asarray([1.0, 2.0, 3.0])),
    "gather": lambda x: xp.sum(xp.take(x, xp.asarray([2, 0, 2, 2]), axis=1) ** 2),
    "where": lambda x: xp.sum(xp.where(x > 1.0, x * x, xp.sqrt(x))),
    "concat": lambda x: xp.sum(xp.concat([x, x * 2, xp.stack([x[0, ...], x[1, ...]])], axis=0) ** 3),
    "sort": lambda x: xp.sum(xp.sort(x, axis=1) * xp.asarray([[1.0, -2.0, 5.0]])),
    "cumulative": lambda x: xp.sum(xp.cumulative_sum(x, axis=1) ** 2),
    "division": lambda x: xp.sum(1.0 / x + x / (x + 2.0) - x**-1.5),
    "reused": lambda x: xp.sum(x) * xp.sum(x * x) * xp.mean(x),
}


@pytest.mark.family("kernels")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_grad_is_the_limit_of_differences(name: str) -> None:
    f = FUNCTIONS[name]
    want = differences(f, X)
    close(dnnc.grad(f)(xp.asarray(X)), want, 1e-6)
    value, gradient = dnnc.value_and_grad(f)(X)
    close(value, f(xp.asarray(X)))
    close(gradient, want, 1e-6)
    close(dnnc.jit(dnnc.grad(f))(X), want, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_reverse_mode_agree(name: str) -> None:
    f, v = FUNCTIONS[name], rng.standard_normal(X.shape)
    value, tangent = dnnc.jvp(f, (X,), (v,))
    close(value, f(xp.asarray(X)))
    close(float(tangent), float(np.sum(np.asarray(dnnc.grad(f)(X)) * v)), 1e-9)
    rows = dnnc.jacfwd(dnnc.grad(f))(X)
    close(rows, dnnc.jacrev(dnnc.grad(f))(X), 1e-9)
    close(rows, dnnc.hessian(f)(X), 1e-9)
    close(np.asarray(rows), np.transpose(np.asarray(rows), (2, 3, 0, 1)), 1e-9)


@dataclass
class Layer:
    w: Any
    b: Any


@pytest.mark.slow
def test_trees_of_arrays() -> None:
    w, b, x = rng.standard_normal((3, 2)), rng.standard_normal(2), rng.standard_normal((5, 3))

    def loss(p: Any, x: Any) -> Any:
        return xp.mean((x @ p["layer"].w + p["layer"].b) ** 2) * p["scale"][0]

    p = {"layer": Layer(w, b), "scale": (2.0, 7.0)}
    made = dnnc.grad(loss)(p, x)
    y = x @ w + b
    g = 2 * y / y.size
    close(made["layer"].w, 2 * x.T @ g, 1e-9)
    close(made["layer"].b, 2 * g.sum(0), 1e-9)
    close(made["scale"][0], (y * y).mean())
    assert float(made["scale"][1]) == 0.0  # nothing depends on it
    first, second = dnnc.grad(loss, argnums=(0, 1))(p, x)
    close(first["layer"].w, 2 * x.T @ g, 1e-9)
    close(second, 2 * g @ w.T, 1e-9)
    close(dnnc.grad(loss, argnums=-1)(p, x), second)


def test_further_results_come_back() -> None:
    def f(x: Any) -> Any:
        return xp.sum(x * x), {"twice": 2 * x, "count": 3}

    (value, aux), gradient = dnnc.value_and_grad(f, has_aux=True)(X)
    close(value, (X * X).sum())
    close(aux["twice"], 2 * X)
    close(gradient, 2 * X)
    gradient, aux = dnnc.grad(f, has_aux=True)(X)
    close(gradient, 2 * X)
    assert int(aux["count"]) == 3


def test_gradients_of_gradients() -> None:
    g = f = lambda x: x**5
    for want in (5 * 1.3**4, 20 * 1.3**3, 60 * 1.3**2, 120 * 1.3):
        g = dnnc.grad(g)
        close(g(1.3), want)
    close(dnnc.jvp(dnnc.jit(dnnc.grad(f)), (1.3,), (1.0,))[1], 20 * 1.3**3)


def test_hessian_vector_product_is_the_product() -> None:
    a = rng.standard_normal((4, 4))
    x, v = rng.standard_normal(4), rng.standard_normal(4)
    f = lambda x: 0.5 * x @ (xp.asarray(a) @ x)  # noqa: E731
    product = dnnc.jvp(dnnc.grad(f), (x,), (v,))[1]
    close(product, 0.5 * (a + a.T) @ v, 1e-9)
    close(dnnc.grad(lambda x: dnnc.grad(f)(x) @ xp.asarray(v))(x), product, 1e-9)


def test_gradients_of_single_examples() -> None:
    w, xs, ys = rng.standard_normal(3), rng.standard_normal((5, 3)), rng.standard_normal(5)
    loss = lambda w, x, y: (x @ w - y) ** 2  # noqa: E731
    each = dnnc.vmap(dnnc.grad(loss), in_axes=(None, 0, 0))
    want = 2 * (xs @ w - ys)[:, None] * xs
    close(each(w, xs, ys), want, 1e-9)
    close(dnnc.jit(each)(w, xs, ys), want, 1e-9)
    total = dnnc.grad(lambda w: xp.sum(dnnc.vmap(loss, in_axes=(None, 0, 0))(w, xp.asarray(xs), xp.asarray(ys))))
    close(total(w), want.sum(0), 1e-9)


def test_a_gradient_inside_of_a_traced_function() -> None:
    @dnnc.jit
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * dnnc.grad(lambda v: xp.sum((x @ v) ** 2))(w)

    w, x = rng.standard_normal(3), rng.standard_normal((4, 3))
    close(step(w, x), w - 0.2 * x.T @ (x @ w), 1e-9)
    assert step.traces == 1
    step(w + 1, x)
    assert step.traces == 1


def test_programs_of_eager_gradients_are_found_again() -> None:
    f = dnnc.grad(lambda x: xp.sum(xp.tanh(x) * x))
    np.asarray(f(X))
    before = PROGRAMS_MADE.compiled
    for k in range(3):
        np.asarray(f(X + k))
    assert PROGRAMS_MADE.compiled == before


# --- vjp, linearize, Jacobians ----------------------------------------------------------------------------------------


def test_vjp_of_a_tree_of_results() -> None:
    a, b = rng.standard_normal((2, 3)), rng.standard_normal((3, 4))
    out, pull = dnnc.vjp(lambda a, b: {"y": a @ b, "s": xp.sum(a)}, a, b)
    close(out["y"], a @ b)
    g = rng.standard_normal((2, 4))
    da, db = pull({"y": g, "s": 3.0})
    close(da, g @ b.T + 3.0, 1e-9)
    close(db, a.T @ g, 1e-9)
    da, db = pull({"y": 2 * g, "s": 0.0})  # it may be called again
    close(da, 2 * g @ b.T, 1e-9)
    _, pull, aux = dnnc.vjp(lambda a: (a * a, "beside"), a, has_aux=True)
    close(pull(np.ones((2, 3)))[0], 2 * a)
    assert aux == "beside"


def test_results_that_are_one_value() -> None:
    (y, z), pull = dnnc.vjp(lambda x: (x, x), X)
    close(y, z)
    close(pull((xp.asarray(X), xp.asarray(2 * X)))[0], 3 * X)


def test_linearize_computes_the_function_once() -> None:
    calls = 0

    def f(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return xp.sin(x)

    y, push = dnnc.linearize(f, X)
    close(y, np.sin(X))
    close(push(X), np.cos(X) * X)
    close(push(2 * X), 2 * np.cos(X) * X)
    assert calls == 1


@pytest.mark.slow
def test_jacobians_have_the_structure_of_results_and_arguments() -> None:
    a, b = rng.standard_normal((2, 2)), rng.standard_normal(2)
    f = lambda a, b: {"y": a @ b, "z": b[0] * b}  # noqa: E731
    for jacobian in (dnnc.jacrev, dnnc.jacfwd):
        made = jacobian(f, argnums=(0, 1))(a, b)
        da, db = made["y"]
        close(da, np.einsum("ij,k->ijk", np.eye(2), b))
        close(db, a)
        assert np.asarray(made["z"][0]).shape == (2, 2, 2) and not np.asarray(made["z"][0]).any()
        close(jacobian(lambda b: f(a, b)["z"])(b), b[0] * np.eye(2) + np.outer(b, [1, 0]))


# --- how functions are differentiated ---------------------------------------------------------------------------------


def test_stop_gradient() -> None:
    close(dnnc.grad(lambda x: xp.sum(dnnc.stop_gradient(x) * x))(X), X)
    close(dnnc.grad(lambda x: xp.sum(dnnc.stop_gradient(x)))(X), 0 * X)
    close(dnnc.jvp(lambda x: dnnc.stop_gradient({"a": x})["a"] * x, (X,), (X,))[1], X * X)
    close(dnnc.stop_gradient(xp.asarray(X)), X)


@pytest.mark.slow
def test_checkpoint_computes_again() -> None:
    f = dnnc.checkpoint(lambda x, scale=2.0: xp.sin(xp.exp(x) * scale))
    plain = lambda x: xp.sum(xp.sin(xp.exp(x) * 2.0))  # noqa: E731
    close(f(xp.asarray(X)), np.sin(np.exp(X) * 2.0))
    close(dnnc.grad(lambda x: xp.sum(f(x)))(X), dnnc.grad(plain)(X))
    close(dnnc.hessian(lambda x: xp.sum(f(x)))(X), dnnc.hessian(plain)(X))
    close(dnnc.vmap(dnnc.grad(lambda x: xp.sum(f(x))))(X), dnnc.grad(plain)(X))
    g = dnnc.trace(dnnc.grad(lambda x: xp.sum(f(x))), dnnc.Spec((2, 3), "float64"))
    program = dnnc.compile(g)
    close(program(X), dnnc.grad(plain)(X))
    kept = dnnc.compile(dnnc.value_and_grad(lambda x: xp.sum(f(x))), inputs=[dnnc.Spec((2, 3), "float64")])
    assert kept.source("graph").count("exp(") == 2  # forward, and again


@pytest.mark.slow
def test_the_memory_of_a_checkpointed_chain() -> None:
    """Of 12 blocks of matrix products only the states between blocks are kept."""
    n, blocks, depth = 128, 4, 3
    weights = [rng.standard_normal((n, n)).astype(np.float32) / 16 for _ in range(blocks)]

    def block(x: Any, w: Any) -> Any:
        for _ in range(depth):
            x = xp.sin(x @ w)
        return x

    def loss(x: Any, how: Callable[..., Any]) -> Any:
        for w in weights:
            x = how(block)(x, xp.asarray(w))
        return xp.sum(x)

    spec = dnnc.Spec((4096, n))
    sizes = []
    for how in (lambda f: f, dnnc.checkpoint):
        program = dnnc.compile(dnnc.grad(lambda x: loss(x, how)), inputs=[spec])
        sizes.append(program.report.programs[-1].memory.arena)
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.slow
def test_custom_vjp() -> None:
    @dnnc.custom_vjp
    def clipped(x: Any) -> Any:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (xp.clip(g, -1, 1),))
    weights = xp.asarray([0.5, 3.0, -7.0])
    want = np.broadcast_to([0.5, 1.0, -1.0], X.shape)
    f = lambda x: xp.sum(clipped(x) * weights)  # noqa: E731
    close(f(xp.asarray(X)), (X * [0.5, 3, -7]).sum())
    close(dnnc.grad(f)(X), want)
    close(dnnc.jit(dnnc.grad(f))(X), want)
    close(dnnc.vmap(dnnc.grad(f))(X), want)
    close(dnnc.grad(lambda x: xp.sum(dnnc.vmap(f)(x)))(X), want)


def test_custom_vjp_with_residuals_and_fixed_arguments() -> None:
    power = dnnc.custom_vjp(lambda n, x, y: x**n * y, nondiff_argnums=(0,))
    seen = []

    def backward(n: int, residuals: Any, g: Any) -> Any:
        seen.append(n)
        x, scale = residuals
        return g * 100 * x * scale, None

    outside = xp.asarray(3.0)
    power.defvjp(lambda n, x, y: (x**n * y, (x, outside)), backward)
    close(dnnc.grad(lambda x: xp.sum(power(3, x, x)))(X), 300 * X)  # None is zero
    assert set(seen) == {3}


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_say_what_is_wrong() -> None:
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: dnnc.grad(lambda x: x * 2)(X), GradientError, r"one real float number, got float64 of shape \(2, 3\)"),
        (lambda: dnnc.grad(lambda x: (x, x))(1.0), GradientError, "has_aux"),
        (lambda: dnnc.grad(xp.sum)(np.arange(3)), GradientError, "argument 0 is int64, expected real floats"),
        (lambda: dnnc.grad(lambda x: xp.sum(xp.astype(x > 0, xp.float64)))(X), GradientError, "only through greater"),
        (lambda: dnnc.grad(lambda x: x, argnums=2)(1.0), InputError, "argnums=2, but the call has 1"),
        (lambda: dnnc.grad(lambda x: x)(), InputError, "cannot take 0 arguments"),
        (lambda: dnnc.grad(3), InputError, "of a model it takes wrt="),
        (lambda: dnnc.vjp(xp.sin, X)[1](np.ones(3)), InputError, r"must be float64 of shape \(2, 3\), got"),
        (lambda: dnnc.vjp(lambda x: {"a": x}, X)[1]({"b": X}), InputError, "in the structure of the results"),
        (lambda: dnnc.vjp(lambda x: xp.argmax(x), X), GradientError, "is int64, expected real floats"),
        (lambda: dnnc.jvp(xp.sin, X, X), InputError, "expected a tuple of primals"),
        (lambda: dnnc.custom_vjp(xp.sin)(1.0), InputError, "has no rule yet"),
        (lambda: dnnc.grad(lambda x: xp.real(x))(1j), GradientError, "complex128, expected real floats"),
    ]
    for run, error, message in cases:
        with pytest.raises(error, match=message):
            run()


# --- kernels of users -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ops_of_users_are_differentiated_by_their_expression() -> None:
    def pull(x: te.Tensor, m: te.Tensor) -> te.Tensor:
        (n,) = x.dims
        return te.reduce((n,), (n,), x.dtype, "sum", lambda i, j: m[j] * call("tanh", x[j] - x[i]))

    op = dnnc.custom_op("pull", pull)
    x, m = rng.standard_normal(5), rng.standard_normal(5)
    weights = xp.asarray([1.0, -2.0, 3.0, 0.5, 0.1])
    dx, dm = dnnc.grad(lambda x, m: xp.sum(op(x, m) * weights), argnums=(0, 1))(x, m)
    close(dx, differences(lambda x: xp.sum(op(x, m) * weights), x), 1e-6)
    close(dm, differences(lambda m: xp.sum(op(x, m) * weights), m), 1e-6)
    close(dnnc.jit(dnnc.grad(lambda x: xp.sum(op(x, xp.asarray(m)) * weights)))(x), dx)


def test_kernels_of_users_are_differentiated() -> None:
    f = dnnc.elementwise_kernel("T x, T y", "T z", "z = x > y ? exp(x) * y : y * y", "picked")
    x, y = rng.standard_normal(7), rng.standard_normal(7)
    dx, dy = dnnc.grad(lambda x, y: xp.sum(f(x, y)), argnums=(0, 1))(x, y)
    close(dx, np.where(x > y, np.exp(x) * y, 0.0), 1e-9)
    close(dy, np.where(x > y, np.exp(x), 2 * y), 1e-9)
    norm = dnnc.reduction_kernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
    close(dnnc.grad(lambda x: norm(x))(x), x / np.linalg.norm(x), 1e-9)
