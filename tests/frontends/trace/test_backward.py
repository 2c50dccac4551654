"""`backward` of lazy arrays: the gradients of `dnnc.grad`, whatever was evaluated or written in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array.errors import ValueInputError
from dnnc.ir.errors import GradientError, InputError

rng = np.random.default_rng(3)


def parameter(*shape: int) -> Any:
    x = xp.asarray(rng.standard_normal(shape))
    x.requires_grad = True
    return x


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), 1e-9, 1e-12)


def loss(x: Any, w: Any) -> Any:
    return xp.sum(xp.tanh(x @ w) ** 2 * x[0, ...]) + xp.sum(w[1, :2])


@pytest.mark.slow
@pytest.mark.parametrize("looks", [False, True], ids=["unseen", "seen"])
def test_backward_is_grad(looks: bool) -> None:
    x, w = parameter(4, 3), parameter(3, 3)
    h = xp.tanh(x @ w)
    if looks:
        np.asarray(h)
    y = xp.sum(h**2 * x[0, ...])
    if looks:
        float(y)
    y = y + xp.sum(w[1, :2])
    y.backward()
    dx, dw = dnnc.grad(loss, (0, 1))(x.numpy(), w.numpy())
    close(x.grad, dx)
    close(w.grad, dw)
    y.backward()  # adds
    close(x.grad, 2 * np.asarray(dx))
    x.grad = None
    y.backward(3.0)
    close(x.grad, 3 * np.asarray(dx))


@pytest.mark.slow
def test_control_flow_of_python() -> None:
    x = parameter(3)
    y = x
    for k in range(70):  # deeper than one program of calls
        y = y * 1.01 if float(y[0]) > 0 or k % 2 else xp.sin(y)
    xp.sum(y).backward()
    h = 1e-6

    def run(v: Any) -> float:
        first = x.numpy()
        out = v
        ref = first
        for k in range(70):
            taken = ref[0] > 0 or k % 2
            out, ref = (out * 1.01, ref * 1.01) if taken else (np.sin(out), np.sin(ref))
        return float(out.sum())

    for k in range(3):
        d = np.eye(3)[k] * h
        assert float(x.grad[k]) == pytest.approx((run(x.numpy() + d) - run(x.numpy() - d)) / (2 * h), rel=1e-6)


@pytest.mark.slow
def test_a_training_loop_in_plain_python() -> None:
    w, b = parameter(3, 1), parameter(1)
    xs = rng.standard_normal((20, 3))
    target = xs @ [[1.0], [-2.0], [0.5]] + 0.7
    for _ in range(300):
        error = xp.mean((xp.asarray(xs) @ w + b - xp.asarray(target)) ** 2)
        w.grad = b.grad = None
        error.backward()
        w -= 0.2 * w.grad
        b -= 0.2 * b.grad
        assert w.requires_grad and b.requires_grad
    assert float(error) < 1e-8
    np.testing.assert_allclose(w.numpy()[:, 0], [1, -2, 0.5], atol=1e-3)


def test_truncated_backpropagation_through_time() -> None:
    w = parameter(1)
    h = xp.asarray([1.0])
    for _ in range(3):
        h = h * w
    xp.sum(h).unchain_backward()
    held = h.numpy()
    xp.sum(h * w).backward()
    close(w.grad, held)  # and not 4 w^3


def test_results_of_jitted_functions_have_gradients() -> None:
    x = parameter(3)
    f = dnnc.jit(lambda v: xp.exp(v))
    f(np.ones(3))
    xp.sum(f(x)).backward()
    close(x.grad, np.exp(x.numpy()))


def test_writing_into_results() -> None:
    x = parameter(4)
    y = x * 2
    y[1] = x[0] * 5
    y += x
    xp.sum(y).backward()
    close(x.grad, [8.0, 1.0, 3.0, 3.0])


def test_control_flow_of_the_program() -> None:
    x = parameter(3)
    y = dnnc.cond(xp.sum(x) > 100.0, lambda v: v, lambda v: v * v, x)
    xp.sum(y).backward()
    close(x.grad, 2 * x.numpy())


def test_gradients_end() -> None:
    x = parameter(3)
    xp.sum(dnnc.stop_gradient(x) * x).backward()
    close(x.grad, x.numpy())
    x.requires_grad = False
    assert not x.requires_grad
    with pytest.raises(GradientError, match="requires a gradient"):
        xp.sum(x).backward()


def test_errors() -> None:
    x = parameter(2, 3)
    with pytest.raises(GradientError, match=r"an array of shape \(2, 3\) needs the gradient"):
        (x * 2).backward()
    with pytest.raises(InputError, match="the gradient must be float64"):
        (x * 2).backward(np.ones(3))
    with pytest.raises(GradientError, match="expected real floats"):
        xp.arange(3).requires_grad = True
    with pytest.raises(GradientError, match="bool, expected real floats"):
        (x > 0).backward(True)
    with pytest.raises(ValueInputError, match="gradients do not flow between devices"):
        x.to_device("cuda:0")
    with pytest.raises(GradientError, match=r"take dnnc\.grad"):
        dnnc.jit(lambda v: v.backward())(np.ones(3))
