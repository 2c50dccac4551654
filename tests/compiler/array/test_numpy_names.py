"""NumPy's functions and methods on dnnc arrays give NumPy's numbers by our own functions, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc import nn, optim
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.ir.errors import InputError

rng = np.random.default_rng(5)
A = rng.random((3, 4))


def same(got: Any, want: Any) -> None:
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for g, w in zip(got, want):
            same(g, w)
        return
    assert isinstance(got, (xp.Array, bool))
    np.testing.assert_allclose(np.asarray(got), want, 1e-12, 1e-12)


CALLS: dict[str, Callable[[Any], Any]] = {
    "exp": lambda x: np.exp(x),
    "add, NumPy first": lambda x: np.add(A, x),
    "operators, NumPy first": lambda x: (A + x, A * x, A @ x.T, A > x, A[0] - x),
    "power, arctan2": lambda x: (np.power(x, 2), np.arctan2(x, A), np.abs(-x), np.logaddexp(x, x)),
    "mean, std": lambda x: (np.mean(x), np.mean(x, 0), np.std(x, ddof=1), np.var(x, axis=0, keepdims=True)),
    "reduce, outer, accumulate": lambda x: (np.add.reduce(x), np.multiply.outer(x, A[0]), np.add.accumulate(x, 1)),
    "concatenate": lambda x: (np.concatenate([x, A], 1), np.stack([x, A]), np.vstack([x, A]), np.hstack([x[0], x[1]])),
    "columns": lambda x: (np.dstack([x, x]), np.column_stack([x, A[:, 0]])),
    "split": lambda x: (np.split(x, 2, axis=1), np.array_split(x, 3, axis=1), np.split(x, [1, -1]), np.hsplit(x, 2)),
    "norm": lambda x: [np.linalg.norm(x, o, a) for o, a in ((None, None), (1, None), (3, 0), (np.inf, (0, 1)))],
    "clip, where": lambda x: (np.clip(x, 0.2, 0.4), np.where(x > 0.5, x, 0), np.maximum(x, 0.3), np.where(x > 0.5)),
    "products": lambda x: (np.dot(x, A.T), np.inner(x, x), np.outer(x, x), np.vdot(x, x), np.dot(x, A[None].mT)),
    "shapes": lambda x: (np.reshape(x, (4, 3)), np.transpose(x), np.ravel(x), np.swapaxes(x, 0, 1), np.tril(x, 1)),
    "pad": lambda x: [np.pad(x, ((1, 2), (5, 3)), m) for m in ("constant", "edge", "reflect", "symmetric", "wrap")],
    "cumsum": lambda x: (np.cumsum(x), np.cumsum(x, 1), np.cumprod(x, axis=0), np.diff(x, 1, 0)),
    "sort": lambda x: (np.sort(x, axis=0), np.argsort(x), np.argmax(x, axis=0), np.unique(x[0])),
    "quantile": lambda x: (np.median(x, 1), np.percentile(x, [20, 70], 1), np.quantile(x, 0.3, (0, 1), keepdims=True)),
    "average": lambda x: (np.allclose(x, A), np.average(x, 0, weights=A[:, 0]), np.average(x), np.ptp(x, axis=1)),
    "histogram": lambda x: (np.histogram(x, 5), np.histogram(x, [0.1, 0.5, 0.6], weights=A)),
    "bincount": lambda x: np.bincount((x * 5).astype(np.int64).ravel(), x.ravel(), 9),
    "interp": lambda x: np.interp(x, [0.2, 0.5, 0.6], [1.0, 4.0, 2.0]),
    "diagonals": lambda x: (np.trace(x, 1), np.diagonal(x), np.diag(x[0], -1), np.diag(x)),
    "take": lambda x: (np.take(x, [1, 2], axis=1), np.repeat(x, 2), np.tile(x, (2, 2)), np.roll(x, 1, axis=0)),
    "not finite": lambda x: (np.nan_to_num(np.log(x * (x > 0.5))), np.isclose(x, A + [0, 1e-9, 1e-3, 1e-7])),
    "round": lambda x: (np.round(x, 2), np.round(x * 1000, -1)),
    "einsum": lambda x: np.einsum("ij,kj->ik", x, A),
    "methods": lambda x: (
        (x.sum(0), x.mean(), x.max(1), x.min(), x.prod(), x.std(ddof=1), x.var(0), x.any(), x.all(0), x.argmin(1))
        + (x.cumsum(), x.clip(0.2, 0.5), x.round(1), x.argsort(), x.ravel(), x.flatten(), x.conj(), x.dot(A.T))
        + (x.transpose(1, 0), x.transpose(), x.swapaxes(0, 1), x[:1].squeeze(), x.repeat(2, 1), x.take([3, 5]))
        + (x.trace(), x.diagonal(1), x[0, 1:2].searchsorted(0.5), x.copy(), x.reshape(-1), x.astype("float32"))
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", CALLS)
def test_functions_of_numpy(name: str) -> None:
    same(CALLS[name](xp.asarray(A)), CALLS[name](A))


def test_nothing_is_copied_to_the_host_unasked() -> None:
    x = xp.asarray(A)
    for call in (lambda: np.unwrap(x), lambda: np.frexp(x), lambda: np.linalg.multi_dot([x, x.T])):
        with pytest.raises(TypeInputError, match="no counterpart of numpy"):
            call()
    with pytest.raises(TypeInputError, match=r"numpy.nancumsum; the nearest is"):
        np.nancumsum(x)
    with pytest.raises(TypeInputError, match="takes no where="):
        np.sum(x, where=A > 0)
    with pytest.raises(TypeInputError, match="out= is a NumPy array"):
        np.add(x, x, out=np.zeros((3, 4)))
    np.add(x, 1.0, out=x)
    same(x, A + 1)


def test_what_is_missing_names_the_nearest() -> None:
    x = xp.asarray(A)
    for name, near in (("permute", "dnnc.array.permute_dims"), ("clamp", "clip"), ("numel", "size")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; the nearest is {near}$"):
            getattr(x, name)
    with pytest.raises(AttributeError, match=r"dnnc.array has no 'unsqueeze'; the nearest is expand_dims"):
        xp.unsqueeze  # noqa: B018
    assert not hasattr(x, "no_such_thing_at_all")
    for module, name, near in ((nn, "Conv2D", "Conv2d"), (nn.functional, "rellu", "relu"), (optim, "Adamw", "AdamW")):
        with pytest.raises(AttributeError, match=f"{module.__name__} has no '{name}'; the nearest is {near}$"):
            getattr(module, name)


@pytest.mark.slow
def test_methods_that_write() -> None:
    x = xp.asarray(A)
    y = x.copy()
    x.sort(0)
    same(x, np.sort(A, 0))
    x.fill(2)
    same(x, np.full((3, 4), 2.0))
    same(y, A)
    assert y.item(1, 2) == A[1, 2] and y.item(5) == A.item(5) and y.nbytes == A.nbytes
    y.requires_grad = True
    assert y.detach().tolist() == A.tolist() and not y.detach().requires_grad


# --- einsum -----------------------------------------------------------------------------------------------------------

EINSUMS = [
    ("ij,jk->ik", (2, 3), (3, 4)), ("ij,jk", (2, 3), (3, 4)), ("ba", (2, 3)), ("ii", (3, 3)), ("ii->i", (3, 3)),
    ("iij->j", (3, 3, 2)), ("...ij,...jk->...ik", (5, 1, 2, 3), (4, 3, 2)), ("...i->...", (2, 3)), ("ij->", (2, 3)),
    ("i,i,i->i", (3,), (3,), (3,)), ("ab,bc,cd,de->ae", (2, 3), (3, 4), (4, 5), (5, 2)), ("i,j->ij", (2,), (3,)),
    ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)), ("ij,ij->", (2, 3), (2, 3)), ("i...,i...", (3, 2), (3, 2)),
    ("ab,ab,c->c", (2, 3), (2, 3), (4,)), ("ij,kj->", (1, 3), (2, 1)), ("abc,cba", (2, 3, 4), (4, 3, 2)),
    (",->", (), ()),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", EINSUMS, ids=lambda c: c[0])
def test_einsum(case: Any) -> None:
    text, *shapes = case
    arrays = [rng.standard_normal(s) for s in shapes]
    want = np.einsum(text, *arrays)
    for optimize in (True, False):
        same(xp.einsum(text, *map(xp.asarray, arrays), optimize=optimize), want)
    given = [xp.asarray(a) for a in arrays]
    for x in given:
        x.requires_grad = True
    weights = rng.standard_normal(want.shape)
    xp.sum(xp.einsum(text, *given) * weights).backward()
    for k, x in enumerate(given):  # linear in each operand that occurs once
        v = rng.standard_normal(x.shape)
        moved = np.einsum(text, *arrays[:k], v, *arrays[k + 1 :])
        assert np.sum(x.grad.numpy() * v) == pytest.approx(np.sum(moved * weights), rel=1e-9, abs=1e-12)


def test_einsum_by_numbers_of_axes() -> None:
    x, y = A, rng.standard_normal((4, 2))
    same(xp.einsum(xp.asarray(x), [0, 1], xp.asarray(y), [1, 2], [0, 2]), x @ y)
    same(xp.einsum(xp.asarray(x), [..., 1], xp.asarray(y), [1, 2]), x @ y)
    ints = np.arange(6, dtype=np.int8).reshape(2, 3)
    got = xp.einsum("ij,kj->ik", xp.asarray(ints), xp.asarray(ints))
    assert got.dtype == xp.int8 and got.tolist() == np.einsum("ij,kj->ik", ints, ints).tolist()


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("ij,jk", [(2, 3)], "is for 2 operands, got 1"),
        ("ij", [(2,)], "2 labels for an operand of shape"),
        ("ij,jk", [(2, 3), (4, 2)], "'j' is 3 and 4"),
        ("ij->k", [(2, 3)], "'k' of the result must occur"),
        ("ii", [(2, 3)], "are both 'i', but differ"),
        ("i$", [(2, 3)], "expected letters"),
    ],
)
def test_einsum_of_what_does_not_fit(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueInputError, match=message):
        xp.einsum(text, *(xp.ones(s) for s in shapes))


# --- traced, differentiated -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_they_are_traced_and_differentiated() -> None:
    def f(x: Any) -> Any:
        y = np.concatenate([np.pad(x, 1, "reflect"), np.exp(np.vstack([x, x]))[:, [0, 1, 2, 3, 0, 1]]])
        z = xp.einsum("ij,kj,kj->ik", y, y, xp.tril(y)) + y.mean(1)
        return (
            np.median(z, axis=0).sum()
            + xp.logsumexp(x)
            + np.percentile(x, 30)
            + np.interp(x, [0.1, 0.4, 0.7], A[1, :3]).sum()
        )

    x = np.sort(A, None).reshape(3, 4)
    want = float(f(xp.asarray(x)))
    assert float(dnnc.jit(f)(x)) == pytest.approx(want, rel=1e-12)
    v = rng.standard_normal(x.shape)
    got = float(np.sum(dnnc.grad(f)(x).numpy() * v))
    h = 1e-6
    slope = (float(f(xp.asarray(x + h * v))) - float(f(xp.asarray(x - h * v)))) / (2 * h)
    assert got == pytest.approx(slope, rel=1e-6)
    y = xp.asarray(x)
    y.requires_grad = True
    f(y).backward()
    np.testing.assert_allclose(y.grad.numpy(), dnnc.grad(f)(x).numpy(), 1e-12)


def test_arguments_that_do_not_fit() -> None:
    x = xp.asarray(A)
    for call, message in (
        (lambda: xp.split(x, 3, axis=1), "do not make 3 equal parts; array_split"),
        (lambda: xp.pad(x, -1), "widths are not negative"),
        (lambda: xp.pad(x, 1, mode="mean"), "expected one of constant"),
        (lambda: xp.quantile(x, 1.5), "shares from 0 to 1"),
        (lambda: xp.bincount(x), "vector of integers"),
        (lambda: xp.average(x, 0, weights=[1.0, 2.0]), r"weights of shape \(2,\)"),
        (lambda: xp.diag(xp.ones((1, 1, 1))), "a vector or a matrix"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            call()
