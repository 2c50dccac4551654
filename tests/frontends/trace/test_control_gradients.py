"""Gradients through scan, while_loop and cond of array code, and through recurrent layers of ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import dnnc
import dnnc.array as xp
from dnnc.frontends.onnx import from_onnx
from dnnc.frontends.trace import Spec, trace
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.errors import InputError
from dnnc.ir.graph.interp import run

RNG = np.random.default_rng(12)
Array = Any
STEPS, BATCH, INPUTS, UNITS = 5, 3, 4, 6
KINDS: dict[str, tuple[Any, str, list[int]]] = {  # PyTorch's layer, ONNX's op, ONNX's gates among PyTorch's
    "rnn": (torch.nn.RNN, "RNN", [0]),
    "gru": (torch.nn.GRU, "GRU", [1, 0, 2]),
    "lstm": (torch.nn.LSTM, "LSTM", [0, 3, 1, 2]),
}


def layer_model(kind: str, directions: int) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """One recurrent layer, weights and states among its inputs."""
    _, op, gates = KINDS[kind]
    n = len(gates) * UNITS
    shapes = {
        "x": (STEPS, BATCH, INPUTS),
        "w": (directions, n, INPUTS),
        "r": (directions, n, UNITS),
        "b": (directions, 2 * n),
    }
    shapes |= {"h0": (directions, BATCH, UNITS)} | ({"c0": (directions, BATCH, UNITS)} if kind == "lstm" else {})
    attrs: dict[str, Any] = {"hidden_size": UNITS, "direction": "bidirectional" if directions == 2 else "forward"}
    if kind == "gru":
        attrs["linear_before_reset"] = 1
    names = ["x", "w", "r", "b", "", "h0", *(["c0"] if kind == "lstm" else [])]
    results = ["y", "h", *(["c"] if kind == "lstm" else [])]
    inputs = [helper.make_tensor_value_info(k, TensorProto.DOUBLE, s) for k, s in shapes.items()]
    outputs = [helper.make_tensor_value_info(k, TensorProto.DOUBLE, None) for k in results]
    g = helper.make_graph([helper.make_node(op, names, results, **attrs)], "layer", inputs, outputs)
    return helper.make_model(g, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), shapes


def by_torch(kind: str, directions: int, given: dict[str, Array], cotangents: list[Array]) -> dict[str, Array]:
    """The gradients of PyTorch's layer, in ONNX's arrangement."""
    make, _, gates = KINDS[kind]
    layer = make(INPUTS, UNITS, bidirectional=directions == 2).double()
    back = np.argsort(gates)

    def ours(a: Array) -> Array:  # gates in PyTorch's order -> ONNX's
        return a.reshape(len(gates), UNITS, -1)[gates].reshape(a.shape)

    def theirs(a: Array) -> Array:
        return a.reshape(len(gates), UNITS, -1)[back].reshape(a.shape)

    suffixes = ["_l0", "_l0_reverse"][:directions]
    with torch.no_grad():
        for d, s in enumerate(suffixes):
            halves = np.split(given["b"][d], 2)
            values = (given["w"][d], given["r"][d], *halves)
            for name, a in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), values):
                getattr(layer, name + s).copy_(torch.tensor(theirs(a)))
    x, *states = (torch.tensor(given[k], requires_grad=True) for k in ("x", "h0", "c0") if k in given)
    y, last = layer(x, tuple(states) if kind == "lstm" else states[0])
    last = last if kind == "lstm" else (last,)
    wanted = [torch.tensor(c) for c in cotangents]
    wanted[0] = wanted[0].permute(0, 2, 1, 3).reshape(y.shape)  # ONNX has directions in front of rows
    torch.autograd.backward([y, *last], wanted)

    def grads(name: str) -> list[Array]:
        return [ours(getattr(layer, name + s).grad.numpy()) for s in suffixes]

    biases = [np.concatenate(pair) for pair in zip(grads("bias_ih"), grads("bias_hh"))]
    out = {"x": x.grad.numpy(), "w": np.stack(grads("weight_ih")), "r": np.stack(grads("weight_hh"))}
    return out | {"b": np.stack(biases)} | {k: s.grad.numpy() for k, s in zip(("h0", "c0"), states)}


@pytest.mark.slow
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_of_onnx(kind: str, directions: int) -> None:
    model, shapes = layer_model(kind, directions)
    g = from_onnx(model)
    given = {k: RNG.standard_normal(s) * 0.5 for k, s in shapes.items()}
    inputs = list(g.inputs)
    cotangents = {o: g.add_input("cotangent", o.type) for o in g.outputs}
    g.outputs = [c for c in pullback(g, cotangents, inputs) if c is not None]
    assert len(g.outputs) == len(inputs)
    weights = [RNG.standard_normal(o.type.shape) for o in cotangents]
    want = by_torch(kind, directions, given, weights)
    arrays = [*(given[v.name] for v in inputs), *weights]
    for made in (run(g, arrays), dnnc.compile(g, threads=1)(*arrays)):
        for v, a in zip(inputs, made):
            np.testing.assert_allclose(a, want[v.name], rtol=1e-9, atol=1e-11, err_msg=v.name)


# --- array code -------------------------------------------------------------------------------------------------------


def both(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of a program, and of the function by itself."""
    return [dnnc.jit(fn, threads=1)(*args), fn(*map(xp.asarray, args))]


def chain(x: Any, w: Any, rows: Any, checkpoint: int | None = None) -> Any:
    """A scan with two states and two results."""

    def step(s: Any, row: Any) -> Any:
        h = xp.tanh(s["h"] @ w + row)
        return {"h": h, "sum": s["sum"] + xp.sum(h * row)}, (h * h, xp.sum(h))

    last, (squares, sums) = dnnc.scan(step, {"h": x, "sum": 0.0}, rows, checkpoint=checkpoint)
    return last["sum"] + xp.sum(squares * squares) + xp.sum(sums) * xp.sum(last["h"])


def chain_torch(x: Any, w: Any, rows: Any) -> Any:
    total, squares, sums = torch.zeros((), dtype=torch.float64), [], []
    for row in rows:
        x = torch.tanh(x @ w + row)
        total = total + (x * row).sum()
        squares.append(x * x)
        sums.append(x.sum())
    return total + (torch.stack(squares) ** 2).sum() + sum(sums) * x.sum()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [None, 3])
def test_scan_with_several_states(checkpoint: int | None) -> None:
    args = [RNG.standard_normal(s) * 0.5 for s in ((2, 3), (3, 3), (7, 2, 3))]
    given = [torch.tensor(a, requires_grad=True) for a in args]
    chain_torch(*given).backward()
    grad = dnnc.grad(lambda *a: chain(*a, checkpoint=checkpoint), argnums=(0, 1, 2))
    for made in both(grad, *args):
        for a, want in zip(made, given):
            np.testing.assert_allclose(np.asarray(a), want.grad.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [None, 2])
def test_second_derivatives_through_scan(checkpoint: int | None) -> None:
    args = [RNG.standard_normal(s) * 0.5 for s in ((2, 3), (3, 3), (4, 2, 3))]
    v = RNG.standard_normal((3, 3))
    x, w, rows = (torch.tensor(a, requires_grad=True) for a in args)
    (first,) = torch.autograd.grad(chain_torch(x, w, rows), w, create_graph=True)
    (want,) = torch.autograd.grad((first * torch.tensor(v)).sum(), w)

    def along(x: Any, w: Any, rows: Any) -> Any:
        return xp.sum(dnnc.grad(lambda w: chain(x, w, rows, checkpoint))(w) * v)

    got = dnnc.jit(dnnc.grad(along, argnums=1), threads=1)(*args)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-9, atol=1e-11)
    forward = dnnc.jit(
        lambda x, w, rows: dnnc.jvp(dnnc.grad(lambda w: chain(x, w, rows, checkpoint)), (w,), (v,))[1], threads=1
    )
    np.testing.assert_allclose(forward(*args), want.numpy(), rtol=1e-9, atol=1e-11)


def newton(a: Any, bound: int | None = 60) -> Any:
    """The root of x^3 = a."""
    state = {"x": xp.ones_like(a), "old": xp.zeros_like(a)}

    def step(s: Any) -> Any:
        return {"x": s["x"] - (s["x"] ** 3 - a) / (3 * s["x"] ** 2), "old": s["x"]}

    return dnnc.while_loop(lambda s: xp.abs(s["x"] - s["old"]) > 1e-12, step, state, bound=bound)["x"]


@pytest.mark.slow
def test_a_bounded_while_loop_gives_the_derivative_of_a_root() -> None:
    for made in both(dnnc.value_and_grad(newton), np.array(2.0)):
        np.testing.assert_allclose([float(x) for x in made], [2 ** (1 / 3), 2 ** (-2 / 3) / 3], rtol=1e-12)
    value, tangent = dnnc.jit(lambda a: dnnc.jvp(lambda a: newton(a, None), (a,), (1.0,)))(np.array(2.0))
    np.testing.assert_allclose([float(value), float(tangent)], [2 ** (1 / 3), 2 ** (-2 / 3) / 3], rtol=1e-12)


def test_a_bound_that_is_reached_is_an_error() -> None:
    def doubled(x: Any, bound: int) -> Any:
        return dnnc.while_loop(lambda s: s < 100.0, lambda s: 2 * s, x, bound=bound)

    assert float(doubled(xp.asarray(1.0), 7)) == 128.0
    with pytest.raises(InputError, match="still holds after 6 iterations; give it a larger bound"):
        doubled(xp.asarray(1.0), 6)
    with pytest.raises(InputError, match="bound"):
        doubled(xp.asarray(1.0), 0)
    g = trace(lambda x: doubled(x, 6), Spec((), "float64"))
    assert float(run(g, [np.array(1.6)])[0]) == 102.4
    with pytest.raises(InputError, match="still holds when its bound is reached"):
        run(g, [np.array(1.0)])


@pytest.mark.slow
def test_a_program_stops_at_a_bound() -> None:
    f = dnnc.jit(lambda x: dnnc.while_loop(lambda s: s < 100.0, lambda s: 2 * s, x, bound=6), threads=1)
    assert float(f(np.array(1.6))) == 102.4
    with pytest.raises(InputError, match=r"loop with a bound reached it .* in within_bound.*larger bound"):
        f(np.array(1.0))


@pytest.mark.slow
def test_cond_inside_scan() -> None:
    xs, w = RNG.standard_normal(9), np.array(0.7)

    def f(w: Any, xs: Any) -> Any:
        def step(s: Any, x: Any) -> Any:
            s = dnnc.cond(x > 0, lambda: s * xp.cos(w * x), lambda: s + w * w)
            return s, s

        last, every = dnnc.scan(step, 1.0, xs)
        return last + xp.sum(every * every)

    def by_torch(w: Any, xs: Any) -> Any:
        s, every = torch.ones((), dtype=torch.float64), []
        for x in xs:
            s = s * torch.cos(w * x) if x > 0 else s + w * w
            every.append(s)
        return s + sum(y * y for y in every)

    given = [torch.tensor(a, requires_grad=True) for a in (w, xs)]
    by_torch(*given).backward()
    for made in both(dnnc.grad(f, argnums=(0, 1)), w, xs):
        for a, want in zip(made, given):
            np.testing.assert_allclose(np.asarray(a), want.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_checkpoints_take_a_tenth_of_the_memory() -> None:
    """Of a gradient through 1,000 steps: the arena of the program."""

    def loss(w: Any, x: Any, every: int | None) -> Any:
        def step(h: Any, _: Any) -> Any:
            return xp.tanh(h @ w) + 0.1 * h, None

        return xp.sum(dnnc.scan(step, x, None, length=1000, checkpoint=every)[0])

    arena = {}
    values = {}
    w, x = RNG.standard_normal((32, 32)) * 0.1, RNG.standard_normal((8, 32))
    for every in (None, 32):
        g = trace(lambda w, x: dnnc.grad(loss)(w, x, every), Spec(w.shape, "float64"), Spec(x.shape, "float64"))
        f = dnnc.compile(g, threads=1)
        arena[every], values[every] = f.report.programs[-1].memory.arena, f(w, x)
    assert arena[32] * 10 <= arena[None]
    np.testing.assert_allclose(values[32], values[None], rtol=1e-9, atol=1e-12)


def decay(y: Any, rate: Any) -> Any:
    """y * exp(-rate) by 20 steps of Runge and Kutta, in a loop that ends by its time."""

    def step(s: Any) -> Any:
        y, h = s["y"], 0.05
        k1 = -rate * y
        k2 = -rate * (y + h / 2 * k1)
        k3 = -rate * (y + h / 2 * k2)
        k4 = -rate * (y + h * k3)
        return {"y": y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), "t": s["t"] + h}

    return dnnc.while_loop(lambda s: s["t"] < 1.0 - 1e-9, step, {"y": y, "t": 0.0}, bound=25)["y"]


@pytest.mark.slow
def test_a_differential_equation() -> None:
    y, rate = np.array(2.0), np.array(0.7)
    exact = 2 * np.exp(-0.7)
    value, slopes = dnnc.jit(dnnc.value_and_grad(decay, argnums=(0, 1)), threads=1)(y, rate)
    np.testing.assert_allclose([float(value), *map(float, slopes)], [exact, exact / 2, -exact], atol=1e-7)
    bend = dnnc.jit(dnnc.grad(dnnc.grad(decay, argnums=1), argnums=1), threads=1)(y, rate)
    np.testing.assert_allclose(float(bend), exact, atol=1e-6)
    ys, rates = np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.7, 0.9])
    each = dnnc.jit(dnnc.vmap(dnnc.grad(decay, argnums=1)), threads=1)(ys, rates)
    np.testing.assert_allclose(each, -ys * np.exp(-rates), atol=1e-6)


@pytest.mark.slow
def test_functions_with_rules_of_their_own_inside_scan() -> None:
    """checkpoint and custom_vjp in a body give the numbers of the plain function."""
    w, x, rows = (RNG.standard_normal(s) * 0.5 for s in ((3, 3), (3,), (6, 3)))
    square = dnnc.custom_vjp(lambda x: x * x)
    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    step = dnnc.checkpoint(lambda h, row, w: xp.tanh(h @ w + row))

    def loss(w: Any, x: Any, special: bool, every: int | None) -> Any:
        def one(h: Any, row: Any) -> Any:
            y = step(h, row, w) if special else xp.tanh(h @ w + row)
            return y, xp.sum(square(y) if special else y * y)

        last, sums = dnnc.scan(one, x, rows, checkpoint=every)
        return xp.sum(last) + xp.sum(sums)

    want = dnnc.grad(lambda w: loss(w, xp.asarray(x), False, None))(w)
    for every in (None, 2):
        got = dnnc.jit(dnnc.grad(lambda w, x, k=every: loss(w, x, True, k)), threads=1)(w, x)
        np.testing.assert_allclose(got, np.asarray(want), rtol=1e-10, atol=1e-12)
