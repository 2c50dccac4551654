"""Functions of arrays with sizes that are names: what NumPy gives, for one graph at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.frontends.trace import Spec, trace
from dnnc.ir.graph.interp import run

RNG = np.random.default_rng(62)
KERNEL = dnnc.elementwise_kernel("T x, T y", "T z", "z = x * y + x")
NORM = dnnc.reduction_kernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0")


def writes(x: Any, y: Any) -> Any:
    x[:, 1] = y
    return x


def writes_places(x: Any, y: Any) -> Any:
    x[0] = 5.0
    x[-1, 0] = y[0]
    return x


def writes_where(x: Any, y: Any) -> Any:
    x[x > 0] = 0.0
    return x


def in_place(x: Any) -> Any:
    x += x.shape[0]
    x *= 2
    return x


Pair = tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]
FUNCTIONS: dict[str, Pair] = {  # of x [n, 3] and y [n], and of NumPy arrays
    "kern": (lambda x, y: KERNEL(x, y[:, None]), lambda x, y: x * y[:, None] + x),
    "red": (lambda x, y: NORM(x, axis=0), lambda x, y: np.sqrt((x * x).sum(0))),
    "redall": (lambda x, y: NORM(x), lambda x, y: np.sqrt((x * x).sum())),
    "vecdot": (lambda x, y: xp.vecdot(x, x), lambda x, y: (x * x).sum(-1)),
    "vecdot0": (lambda x, y: xp.vecdot(x, x, axis=0), lambda x, y: (x * x).sum(0)),
    "tensordot": (lambda x, y: xp.tensordot(x, x, axes=((0,), (0,))), lambda x, y: x.T @ x),
    "tensordot2": (lambda x, y: xp.tensordot(x, x, axes=2), lambda x, y: (x * x).sum()),
    "outer": (lambda x, y: xp.linalg.outer(y, y), lambda x, y: np.outer(y, y)),
    "norm": (lambda x, y: xp.linalg.vector_norm(x, axis=0), lambda x, y: np.linalg.norm(x, axis=0)),
    "mnorm": (lambda x, y: xp.linalg.matrix_norm(x), lambda x, y: np.linalg.norm(x)),
    "trace": (lambda x, y: xp.linalg.trace(x @ x.T), lambda x, y: np.trace(x @ x.T)),
    "cumsum": (lambda x, y: xp.cumulative_sum(x, axis=0), lambda x, y: np.cumsum(x, 0)),
    "cumsum_i": (
        lambda x, y: xp.cumulative_sum(y, include_initial=True),
        lambda x, y: np.concatenate([[0], np.cumsum(y)]),
    ),
    "diff": (lambda x, y: xp.diff(x, axis=0), lambda x, y: np.diff(x, axis=0)),
    "search": (lambda x, y: xp.searchsorted(xp.sort(y), x), lambda x, y: np.searchsorted(np.sort(y), x)),
    "isin": (lambda x, y: xp.isin(x, y), lambda x, y: np.isin(x, y)),
    "mesh": (lambda x, y: xp.meshgrid(y, xp.arange(3.0))[0], lambda x, y: np.meshgrid(y, np.arange(3.0))[0]),
    "count": (lambda x, y: xp.count_nonzero(x, axis=0), lambda x, y: np.count_nonzero(x, axis=0)),
    "roll": (lambda x, y: xp.roll(x, 1, axis=0), lambda x, y: np.roll(x, 1, 0)),
    "roll-": (lambda x, y: xp.roll(y, -1), lambda x, y: np.roll(y, -1)),
    "flip": (lambda x, y: xp.flip(x), lambda x, y: np.flip(x)),
    "repeat": (lambda x, y: xp.repeat(x, 2, axis=0), lambda x, y: np.repeat(x, 2, 0)),
    "repeatall": (lambda x, y: xp.repeat(x, 2), lambda x, y: np.repeat(x, 2)),
    "tile": (lambda x, y: xp.tile(x, (2, 1, 2)), lambda x, y: np.tile(x, (2, 1, 2))),
    "moveaxis": (lambda x, y: xp.moveaxis(x, 0, 1), lambda x, y: x.T),
    "squeeze": (lambda x, y: xp.squeeze(x[:, None], axis=1), lambda x, y: x),
    "stack": (lambda x, y: xp.stack([x, x], axis=-1), lambda x, y: np.stack([x, x], -1)),
    "concatnone": (lambda x, y: xp.concat([x, y], axis=None), lambda x, y: np.concatenate([x.ravel(), y])),
    "take": (lambda x, y: xp.take(x, xp.argsort(y), axis=0), lambda x, y: x[np.argsort(y)]),
    "taa": (lambda x, y: xp.take_along_axis(x, xp.argsort(x, axis=0), axis=0), lambda x, y: np.sort(x, 0)),
    "triu": (lambda x, y: xp.triu(x @ x.T), lambda x, y: np.triu(x @ x.T)),
    "triu1": (lambda x, y: xp.triu(x @ x.T, k=1), lambda x, y: np.triu(x @ x.T, 1)),
    "fulllike": (lambda x, y: xp.full_like(x, 2.0) + xp.ones_like(y)[:, None], lambda x, y: np.full_like(x, 3.0)),
    "std": (lambda x, y: xp.std(x, axis=0), lambda x, y: x.std(0)),
    "varall": (lambda x, y: xp.var(x), lambda x, y: x.var()),
    "prod": (lambda x, y: xp.prod(x, axis=0), lambda x, y: x.prod(0)),
    "allany": (lambda x, y: xp.all(x > 0, axis=0) | xp.any(y > 0), lambda x, y: (x > 0).all(0) | (y > 0).any()),
    "set": (lambda x, y: writes(x, y), lambda x, y: writes(x, y)),
    "setrow": (lambda x, y: writes_places(x, y), lambda x, y: writes_places(x, y)),
    "mask": (lambda x, y: xp.where(y[:, None] > 0, x, 0), lambda x, y: np.where(y[:, None] > 0, x, 0)),
    "setmask": (lambda x, y: writes_where(x, y), lambda x, y: writes_where(x, y)),
    "neg": (lambda x, y: x[-1, 1] + x[0, -1], lambda x, y: x[-1, 1] + x[0, -1]),
    "slice2": (lambda x, y: x[::2, 1:], lambda x, y: x[::2, 1:]),
    "sliceneg": (lambda x, y: x[:-1:1], lambda x, y: x[:-1]),
    "sliceb": (lambda x, y: x[3:], lambda x, y: x[3:]),
    "slicen": (lambda x, y: x[: x.shape[0] // 2], lambda x, y: x[: x.shape[0] // 2]),
    "slicer": (lambda x, y: x[-2:], lambda x, y: x[-2:]),
    "sliced": (lambda x, y: x[1:-1], lambda x, y: x[1:-1]),
    "newax": (lambda x, y: x[None, ..., None], lambda x, y: x[None, ..., None]),
    "idx2": (lambda x, y: x[xp.arange(x.shape[0]), 0], lambda x, y: x[np.arange(len(x)), 0]),
    "idx3": (lambda x, y: x[xp.arange(x.shape[0]), xp.zeros(x.shape[0], dtype=xp.int64)], lambda x, y: x[:, 0]),
    "topk": (lambda x, y: xp.top_k(y, 1)[0], lambda x, y: y.max(keepdims=True)),
    "softmax": (
        lambda x, y: (
            xp.exp(x - xp.max(x, axis=0, keepdims=True))
            / xp.sum(xp.exp(x - xp.max(x, axis=0, keepdims=True)), axis=0, keepdims=True)
        ),
        lambda x, y: np.exp(x - x.max(0)) / np.exp(x - x.max(0)).sum(0),
    ),
    "pow": (lambda x, y: x**2 + y[:, None] ** x.shape[0], lambda x, y: x**2 + y[:, None] ** float(len(x))),
    "mod": (lambda x, y: xp.arange(x.shape[0]) % 2 + x.shape[0], lambda x, y: np.arange(len(x)) % 2 + len(x)),
    "arange": (lambda x, y: xp.arange(1, x.shape[0] + 1, 2), lambda x, y: np.arange(1, len(x) + 1, 2)),
    "inplace": (lambda x, y: in_place(x), lambda x, y: in_place(x)),
    "broad": (lambda x, y: xp.broadcast_arrays(x, y[:, None])[1], lambda x, y: np.broadcast_to(y[:, None], x.shape)),
    "eye": (lambda x, y: xp.eye(x.shape[0], 3, k=1) + x, lambda x, y: np.eye(len(x), 3, k=1) + x),
    "complex": (
        lambda x, y: xp.abs(xp.astype(x, xp.complex128) * 1j + y[:, None]),
        lambda x, y: np.abs(x * 1j + y[:, None]),
    ),
    "reshape": (lambda x, y: xp.reshape(x, (x.shape[0] * 3,)), lambda x, y: x.ravel()),
    "reshape-1": (lambda x, y: xp.reshape(xp.stack([x, x]), (-1, 3)), lambda x, y: np.concatenate([x, x])),
    "matmulv": (lambda x, y: y @ x, lambda x, y: y @ x),
    "matmulb": (lambda x, y: x[:, None, :] @ x[:, :, None], lambda x, y: (x * x).sum(1)[:, None, None]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    fn, expected = FUNCTIONS[name]
    g = trace(fn, Spec(("n", 3), "float64"), Spec(("n",), "float64"))
    assert all("n" in str(v.type) for v in g.inputs)
    for n in (1, 2, 5):
        x, y = RNG.standard_normal((n, 3)), np.abs(RNG.standard_normal(n))
        (got,), want = run(g, [x, y]), expected(x.copy(), y)
        assert got.shape == np.shape(want)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)
