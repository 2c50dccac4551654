"""`backward` of lazy arrays: the gradients of `dnnc.grad`, whatever was evaluated or written in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc import nn, optim
from dnnc.array.errors import ValueInputError
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.frontends.trace import backward
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


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_the_state_of_truncated_backpropagation_is_computed_with_the_step(early: bool) -> None:
    """Programs of later steps begin with its contents: they are one program, which does not grow."""
    w = parameter(3, 3)
    first, xs = w.numpy().copy(), rng.standard_normal((6, 2, 3))
    state, other, made = xp.asarray(np.zeros((2, 3))), np.zeros((2, 3)), []
    for x in xs:
        other = np.tanh(x + other @ first)
        state = xp.tanh(xp.asarray(x) + state @ w)
        seen = xp.sum(state * state)
        w.grad = None
        seen.backward()
        if early:
            state.unchain_backward()
        w -= 0.0 * w.grad
        close(seen, np.sum(other * other))
        if not early:
            state.unchain_backward()
        assert state._parts[0].call is None
        close(state, other)
        made.append(PROGRAMS_MADE.compiled)
    assert made[-1] == made[2]


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


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_seen_before_is_one_launch_and_no_derivation(monkeypatch: Any) -> None:
    w, v, x = parameter(3, 5), parameter(5, 1), xp.asarray(rng.standard_normal((4, 3)))

    def step(rate: float) -> Any:
        error = xp.mean(xp.tanh(x @ w) @ v)
        w.grad = v.grad = None
        error.backward()
        for p in (w, v):
            p -= rate * p.grad
        return error

    def expected() -> tuple[Any, Any, Any]:
        a, b, c = x.numpy(), w.numpy(), v.numpy()
        h = np.tanh(a @ b)
        return np.mean(h @ c), b - 0.1 * (a.T @ ((1 - h * h) * c[:, 0] / 4)), c - 0.1 * h.T @ np.full((4, 1), 0.25)

    want = expected()
    close(step(0.1), want[0])
    close(w, want[1])
    close(v, want[2])
    before = PROGRAMS_MADE.compiled
    runs: list[int] = []
    run = PROGRAMS_MADE.run
    monkeypatch.setattr(PROGRAMS_MADE, "run", lambda *args: (runs.append(1), run(*args))[1])
    monkeypatch.setattr(backward, "pullback", None)  # nobody derives it again
    want = expected()
    close(step(0.1), want[0])  # to look at the error computes the step
    close(w, want[1])
    close(v, want[2])
    w.grad.numpy()
    assert runs == [1] and PROGRAMS_MADE.compiled == before
    for _ in range(5):
        step(0.2)  # nobody looks: a step is computed ahead of the derivation of the next one
    before = PROGRAMS_MADE.compiled
    for _ in range(5):
        step(0.2)
    assert len(runs) == 10 and PROGRAMS_MADE.compiled == before


def test_structures_differ_by_their_roots() -> None:
    for needed in ([True, True], [True, False], [False, True], [True, True]):
        x, y = (xp.asarray(np.array([2.0, 3.0])) for _ in range(2))
        x.requires_grad, y.requires_grad = needed
        xp.sum(x * y * y).backward()
        for a, n, want in ((x, needed[0], [4.0, 9.0]), (y, needed[1], [8.0, 18.0])):
            if n:
                close(a.grad, want)
            else:
                assert a.grad is None


def test_an_operand_twice_is_not_two_operands() -> None:
    x, y = parameter(3), parameter(3)
    xp.sum(x * y).backward()
    xp.sum(x * x).backward()
    close(x.grad, y.numpy() + 2 * x.numpy())
    close(y.grad, x.numpy())


@pytest.mark.parametrize("looks", [False, True], ids=["unseen", "seen"])
def test_a_result_of_several(looks: bool) -> None:
    x = parameter(6)
    values, _ = xp.top_k(x, 3)
    if looks:
        np.asarray(values)
    xp.sum(values * xp.asarray([1.0, 2.0, 3.0])).backward()
    want = np.zeros(6)
    want[np.argsort(-x.numpy())[:3]] = [1, 2, 3]
    close(x.grad, want)


def test_parameters_without_elements() -> None:
    x, empty = parameter(3), parameter(0, 3)
    (xp.sum(empty) + xp.sum(xp.concat([empty, xp.expand_dims(x, axis=0)], axis=0) ** 2)).backward()
    close(x.grad, 2 * x.numpy())
    assert empty.grad is None or empty.grad.shape == (0, 3)


@pytest.mark.slow
def test_writing_many_times_before_anybody_looks() -> None:
    x = parameter(3)
    want = x.numpy()
    for _ in range(200):
        x *= 0.99
    assert x.requires_grad
    close(x, want * 0.99**200)
    xp.sum(x * 2).backward()
    close(x.grad, [2.0, 2.0, 2.0])


def test_gradients_are_written_to_before_the_step() -> None:
    x = parameter(3)
    before = x.numpy()
    xp.sum(x * x).backward()
    x.grad *= 0.5
    x -= x.grad
    close(x, np.zeros(3))
    close(x.grad, before)


def test_rules_of_users_hold() -> None:
    @dnnc.custom_vjp
    def f(x: Any) -> Any:
        return x * 2

    f.defvjp(lambda x: (x * 2, ()), lambda _, g: (g * 100,))
    x, bias = parameter(3), parameter(3)
    xp.sum(f(x)).backward()
    close(x.grad, [100.0, 100.0, 100.0])
    x.grad = None
    g = dnnc.checkpoint(lambda v: xp.tanh(v + bias) * v)
    xp.sum(g(x)).backward()
    slope = 1 - np.tanh(x.numpy() + bias.numpy()) ** 2
    close(x.grad, np.tanh(x.numpy() + bias.numpy()) + slope * x.numpy())
    close(bias.grad, slope * x.numpy())  # of what the function reads from around it too


def test_steps_that_read_each_other() -> None:
    x = parameter(3)
    first, second = xp.sum(x * x), xp.sum(x * x * x)
    first.backward()
    second.backward()  # adds
    norm = xp.sum(x.grad * x.grad)
    x -= 0.1 * x.grad
    old = 2 * x.grad.numpy()  # computes both, and x
    assert float(norm) == pytest.approx(float(np.sum(old * old) / 4))
    v = x.numpy() + 0.05 * old
    close(first, np.sum(v**2))
    close(second, np.sum(v**3))


@pytest.mark.slow
def test_what_is_made_of_a_step_computes_it_once() -> None:
    x = parameter(4, 4)
    total = xp.asarray(0.0)
    error = xp.mean(xp.tanh(x @ x))
    error.backward()
    x -= x.grad
    total = total + error
    float(total)
    for a in (error, x.grad, x):
        assert a._parts[0].call is None


@pytest.mark.slow
def test_stochastic_depth_shares_its_kernels() -> None:
    blocks = [[parameter(8, 8), parameter(8), parameter(8, 8)] for _ in range(54)]
    x, kernels, depths = xp.asarray(rng.standard_normal((4, 8))), set(), set()
    for _ in range(4):
        h = x
        used = [b for b in blocks if rng.random() < 0.7]
        for w, b, v in used:
            h = h + xp.maximum(h @ (0.1 * w) + b, 0.0) @ (0.1 * v)
        error = xp.mean(h * h)
        error.backward()
        for b in used:
            for p in b:
                p -= 0.01 * p.grad
                p.grad = None
        float(error)
        depths.add(len(used))
        kernels |= {k.symbol for k in PROGRAMS_MADE.last.notes}
    assert len(depths) > 1 and len(kernels) <= 60


@pytest.mark.slow
def test_running_statistics_are_computed_with_the_step(monkeypatch: Any) -> None:
    """However deep the network is, and though nobody reads them: steps are one program, which does not grow."""
    net = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()) for _ in range(40)))  # deeper than DEEPEST
    optimizer = optim.SGD(net.parameters(), lr=0.01)
    x, first = xp.asarray(rng.standard_normal((6, 3)).astype(np.float32)), net[0][0]
    runs: list[int] = []
    run = PROGRAMS_MADE.run
    monkeypatch.setattr(PROGRAMS_MADE, "run", lambda *args: (runs.append(1), run(*args))[1])
    for k in range(4):
        optimizer.zero_grad()
        xp.sum(net(x)).backward()
        optimizer.step()
        if k == 1:
            before = PROGRAMS_MADE.compiled, len(runs)
    assert (PROGRAMS_MADE.compiled, len(runs)) == (before[0], before[1] + 2)
    assert all(b._parts[0].call is None for b in net.buffers())
    mean = np.mean(x.numpy(), axis=0)
    np.testing.assert_allclose(first.running_mean.numpy(), mean * (1 - 0.9**4), rtol=1e-4)
    assert int(first.num_batches_tracked) == 4
    net(x)  # the same without a step: the result of a forward pass brings them along
    y = net(x)
    y.numpy()
    np.testing.assert_allclose(first.running_mean.numpy(), mean * (1 - 0.9**6), rtol=1e-4)


def test_a_walk_that_begins_within_a_history() -> None:
    """What is asked for first lies ahead of the loss, and is computed from what belongs to the same step."""
    w = parameter(3)
    h = w * 2.0
    inner = h * h
    xp.sum(inner).backward()
    h.unchain_backward()  # computed with the step
    close(inner, 4 * w.numpy() ** 2)
    close(w.grad, 8 * w.numpy())


def test_no_grad() -> None:
    x = parameter(3)
    with dnnc.no_grad():
        y = x * x
        x *= 2.0  # still a parameter
    with pytest.raises(GradientError, match="depends on no array"):
        xp.sum(y).backward()
    square = dnnc.no_grad()(lambda: x * x)
    with pytest.raises(GradientError, match="depends on no array"):
        xp.sum(square()).backward()
    xp.sum(x * x).backward()
    close(x.grad, 2 * x.numpy())


@pytest.mark.slow
def test_a_jitted_function_sees_the_parameters_that_it_captures() -> None:
    w = parameter(3, 3)
    f = dnnc.jit(lambda x: xp.sum(x @ w))
    x = np.ones((2, 3))
    f(x).backward()
    close(w.grad, np.full((3, 3), 2.0))
    w *= 2.0
    assert float(f(x)) == pytest.approx(2 * w.numpy().sum())
    with dnnc.no_grad():  # as a constant
        assert float(f(x)) == pytest.approx(2 * w.numpy().sum())
        w *= 2.0
        assert float(f(x)) == pytest.approx(w.numpy().sum())
    assert float(f(x)) == pytest.approx(2 * w.numpy().sum())


@pytest.mark.slow
def test_a_loss_that_is_read_ahead_of_backward_is_not_computed_again() -> None:
    def products() -> int:
        """In the program that ran last."""
        return sum(len(k.calls) for k in PROGRAMS_MADE.last.notes if "matmul" in k.name)

    w, v, x = parameter(32, 32), parameter(32, 32), xp.asarray(rng.standard_normal((16, 32)))
    for looks, forward, both in ((True, 2, 3), (False, 0, 5)):  # gradients are of v, tanh(x @ w), w
        w.grad = v.grad = None
        error = xp.mean(xp.tanh(xp.tanh(x @ w) @ v) ** 2)
        assert not looks or (float(error) > 0 and products() == forward)
        error.backward()
        h = np.tanh(x.numpy() @ w.numpy())
        y = np.tanh(h @ v.numpy())
        g = 2 * y * (1 - y * y) / y.size
        close(v.grad, h.T @ g)
        assert products() == both
        close(w.grad, x.numpy().T @ (g @ v.numpy().T * (1 - h * h)))
