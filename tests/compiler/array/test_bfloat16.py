"""bfloat16 as a type of arrays: promotion, numbers against PyTorch, ways in and out."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import dnnc
import dnnc.array as xp
from dnnc.array.promotion import NAMES

rng = np.random.default_rng(8)
A = rng.standard_normal((4, 8)).astype(np.float32)


def brain(a: Any) -> Any:
    return xp.asarray(a, dtype=xp.bfloat16)


@pytest.mark.parametrize("other", NAMES)
def test_promotion(other: str) -> None:
    want = {"float16": "float32", "float32": "float32", "float64": "float64"}.get(other, "bfloat16")
    want = other if other.startswith("complex") else want
    assert xp.result_type(xp.bfloat16, np.dtype(other)) == xp.result_type(np.dtype(other), xp.bfloat16)
    assert xp.result_type(xp.bfloat16, np.dtype(other)).name == want
    assert (brain(A) + xp.ones(8, dtype=np.dtype(other))).dtype.name == want


def test_numbers_do_not_widen_it() -> None:
    x = brain(A)
    assert {(x * n).dtype.name for n in (2, 0.5, True, 0, -0.0)} == {"bfloat16"}
    assert (x * 1j).dtype == xp.complex64 and (x > 0).dtype == xp.bool


@pytest.mark.slow
def test_ways_in_and_out() -> None:
    x = brain(A)
    assert x.numpy().dtype == ml_dtypes.bfloat16 and x.itemsize == 2
    assert x.tolist() == A.astype(ml_dtypes.bfloat16).astype(np.float32).tolist()
    assert type(x[0, 0].item()) is float and float(x[0, 0]) == float(A.astype(ml_dtypes.bfloat16)[0, 0])
    for y in (xp.asarray(x.numpy()), pickle.loads(pickle.dumps(x)), x.astype("float32").astype("bfloat16")):
        assert y.dtype == xp.bfloat16 and y.tolist() == x.tolist()
    assert xp.finfo(xp.bfloat16).eps == 2**-7 and xp.isdtype(xp.bfloat16, "real floating")
    assert xp.arange(3, dtype=xp.bfloat16).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.slow
def test_against_pytorch() -> None:
    x, t = brain(A), torch.tensor(A).bfloat16()
    pairs = {
        "product": (x @ x.T, t @ t.T), "mean": (x.mean(0), t.mean(0)), "exp": (xp.exp(x), t.exp()),
        "sum": (x.sum(), t.sum()), "square": (x**2, t**2), "std": (x.std(), t.std(correction=0)),
        "where": (np.where(x > 0, x, 0), torch.relu(t)), "sort": (xp.sort(x, 1), torch.sort(t, 1).values),
    }  # fmt: skip
    for name, (got, want) in pairs.items():
        assert got.dtype == xp.bfloat16, name
        np.testing.assert_allclose(got.astype("float32").numpy(), want.float().numpy(), 2**-7, err_msg=name)
    x.requires_grad = True
    xp.sum(xp.tanh(x @ x.T)).backward()
    t.requires_grad_()
    torch.tanh(t @ t.T).sum().backward()
    assert x.grad.dtype == xp.bfloat16
    np.testing.assert_allclose(x.grad.astype("float32").numpy(), t.grad.float().numpy(), 2**-6, 2**-6)
    y = x.detach()
    assert dnnc.jit(lambda v: v * 2 + 1)(y).dtype == xp.bfloat16
    assert dnnc.grad(lambda v: xp.sum(v * v))(y).tolist() == (2 * y).tolist()
