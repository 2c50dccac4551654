"""Functions compiled at their calls: when they are traced again, and what they take and give."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.ir.errors import InputError

RNG = np.random.default_rng(33)
X = RNG.standard_normal((4, 3), np.float32)


@dataclass
class Layer:
    w: Any
    b: Any
    activation: str = "tanh"

    def __post_init__(self) -> None:
        assert isinstance(self.w, np.ndarray)

    @dnnc.jit
    def forward(self, x: Any) -> Any:
        return getattr(xp, self.activation)(x @ self.w + self.b)


LAYER = Layer(RNG.standard_normal((3, 2), np.float32), np.zeros(2, np.float32))
Point = namedtuple("Point", "x y")


def test_trees_go_in_and_out() -> None:
    @dnnc.jit
    def f(layer: Layer, points: list[Any], *, scale: float = 2.0) -> Any:
        h = xp.tanh(points[0].x @ layer.w + layer.b)
        return {"h": h, "rest": (xp.sum(h) * scale, "fixed", None), "layer": layer, "p": Point(points[0].y, 3)}

    made = f(LAYER, [Point(X, np.arange(3))], scale=0.5)
    h = np.tanh(X @ LAYER.w + LAYER.b)
    np.testing.assert_allclose(made["h"], h, rtol=1e-5)
    np.testing.assert_allclose(made["rest"][0], h.sum() * 0.5, rtol=1e-5)
    assert made["rest"][1:] == ("fixed", None) and made["p"].y == 3 and made["p"].x.tolist() == [0, 1, 2]
    assert type(made["layer"]) is Layer and np.array_equal(made["layer"].w, LAYER.w) and made["h"].dtype == np.float32


def test_methods_of_dataclasses() -> None:
    np.testing.assert_allclose(LAYER.forward(X), np.tanh(X @ LAYER.w), rtol=1e-5)
    other = Layer(LAYER.w, LAYER.b, "exp")
    np.testing.assert_allclose(other.forward(x=X), np.exp(X @ LAYER.w), rtol=1e-5)


@pytest.mark.slow
def test_traced_again_for_what_a_program_cannot_serve() -> None:
    @dnnc.jit(static="power", threads=1)
    def f(x: Any, power: int, shift: Any = 0) -> Any:
        return x**power + shift

    def traces(*args: Any, **named: Any) -> int:
        before = f.traces
        assert np.allclose(f(*args, **named), args[0] ** named.get("power", args[-1]) + named.get("shift", 0))
        return int(f.traces - before)

    assert traces(X, 2) == 1
    assert traces(X + 1, 2) == traces(xp.asarray(X).numpy(), power=2) == traces(X, 2, shift=0) == 0
    assert traces(X, 3) == traces(X[:2], 2) == traces(X.astype(np.float64), 2) == traces(X, 2, shift=1.0) == 1
    assert traces(X, 2, shift=1) == traces(X, 2, shift=True) == traces(X, 2, shift=np.float32(1)) == 1
    assert traces(X, 2, shift=np.float32(2)) == 0


def test_zeros_of_both_signs_are_two_programs() -> None:
    f = dnnc.jit(lambda x, s: xp.copysign(x, s))
    assert f(X, -0.0).numpy().max() <= 0 <= f(X, 0.0).numpy().min()


def test_the_oldest_program_goes() -> None:
    f = dnnc.jit(lambda x: x + 1, programs=2)
    for n in (1, 2, 1, 3, 1):
        f(np.ones(n))
    assert f.traces == 3
    f(np.ones(2))
    assert f.traces == 4


@pytest.mark.slow
def test_arguments_of_all_kinds() -> None:
    f = dnnc.jit(lambda x: (x * 2, x.shape))
    for x in (X, X.T, X[:, ::2], X.astype(">f4"), X + 1j, X > 0, np.float32(3)):
        made, shape = f(x)
        assert (
            shape == np.shape(x)
            and np.allclose(made, x * 2)
            and made.dtype == (np.int64 if x.dtype == bool else x.dtype.newbyteorder("="))
        )
    lazy = xp.asarray(X) + 1
    assert np.array_equal(f(lazy)[0], (X + 1) * 2) and np.array_equal(lazy, X + 1)


@pytest.mark.slow
def test_one_program_however_a_call_is_written() -> None:
    """Calls with plain arrays alone go a shorter way, which must not be seen."""

    @dnnc.jit(threads=1)
    def f(x: Any, y: Any) -> Any:
        return x - 2 * y

    y = X[::-1] + 1
    for a in (X, xp.asarray(X), xp.asarray(X) * 1, np.asfortranarray(X)):
        for b in (y, xp.asarray(y)):
            for made in (f(a, b), f(a, y=b), f(y=b, x=a)):
                assert type(made) is xp.Array and made.dtype == np.float32 and np.array_equal(made, X - 2 * y)
    assert f.traces == 1
    assert f(X, y.astype(">f4")).tolist() == (X - 2 * y).tolist() and f.traces == 1
    assert f(X, y.astype(np.float64)).dtype == np.float64 and f(X, y + 1j).dtype == np.complex64 and f.traces == 3
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        f(X)

    @dnnc.jit
    def g(x: Any, *more: Any, scale: Any = y) -> Any:
        return sum(more, x) * scale

    for _ in range(2):
        assert (
            np.array_equal(g(X), X * y)
            and np.array_equal(g(X, y), (X + y) * y)
            and np.array_equal(g(X, y, scale=X), (X + y) * X)
        )
    assert g.traces == 2


def test_defaults_that_change() -> None:
    scale, shift = [2.0], X.copy()
    f = dnnc.jit(lambda x, by=scale: x * by[0])
    g = dnnc.jit(lambda x, by=shift, eps=0.5: x * by + eps)
    for k in (2.0, 3.0):
        scale[0], shift[:] = k, k
        assert np.array_equal(f(X), X * np.float32(k)) and np.array_equal(g(X), X * np.float32(k) + np.float32(0.5))


def test_results_that_nothing_computes() -> None:
    f = dnnc.jit(lambda x: (x, x, xp.ones(2), np.arange(2), 5))
    x = X.copy()
    a, b, c, d, e = f(x)
    x[:] = 0
    assert np.array_equal(a, X) and np.array_equal(b, X) and c.tolist() == [1, 1] and d.tolist() == [0, 1] and e == 5
    assert dnnc.jit(lambda x: None)(X) is None
    assert dnnc.jit(lambda n: xp.arange(n) * 2)(3).tolist() == [0, 2, 4]


def test_functions_within_functions_are_one_program() -> None:
    inner = dnnc.jit(lambda x: xp.sin(x))
    outer = dnnc.jit(lambda x: inner(x) + inner(x * 2))
    np.testing.assert_allclose(outer(X), np.sin(X) + np.sin(X * 2), rtol=1e-4, atol=1e-6)
    assert inner.traces == 0 and outer.traces == 1


def test_errors() -> None:
    with pytest.raises(InputError, match="has no argument n; it has x"):
        dnnc.jit(lambda x: x, static=("n",))
    with pytest.raises(InputError, match="unknown option 'thread'"):
        dnnc.jit(lambda x: x, thread=1)
    with pytest.raises(InputError, match=r"x\.fn is a function: .*static="):
        dnnc.jit(lambda x: x)({"fn": test_errors})
    with pytest.raises(InputError, match="s: a static argument must be hashable, a list is not"):
        dnnc.jit(lambda x, s: x, static="s")(X, [1])
