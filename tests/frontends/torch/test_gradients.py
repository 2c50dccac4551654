"""Gradients of every operator against PyTorch: forward and backward are compiled, in float64, and nothing is left."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gradient_cases import GRADIENTS
from operator_cases import CASES
from test_operators import operands
from trained import assert_same, compiled, gradients

from dnnc.ir.errors import DnncWarning

pytestmark = pytest.mark.slow

OFF = {"hardsigmoid": 1e-7}  # PyTorch's has 1/6 in float32
WITHOUT = (  # a gradient in PyTorch, or a form of it here
    "floor_divide of floats",
    "scatter less than there is",
    "batch_norm",
    "batch_norm without weights",
    "cdist inf",
    "grid_sample",
    "grid_sample, nearest",
)
FLOATS = [c for c in CASES if any(o.kind == "float" for o in c[2]) and c[0] not in WITHOUT]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@pytest.mark.family("samples")
@pytest.mark.parametrize("case", GRADIENTS, ids=[n.replace(" ", "_") for n, _, _ in GRADIENTS])
def test_gradient(case: Any) -> None:
    check(case)


@pytest.mark.family("samples")
@pytest.mark.parametrize("case", FLOATS, ids=[n.replace(" ", "_") for n, _, _ in FLOATS])
def test_gradient_of_operator(case: Any) -> None:
    check(case)


def check(case: Any) -> None:
    name, fn, given = case
    tensors = operands(name, given, torch.float64)
    want = gradients(fn, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DnncWarning)
        made = gradients(compiled(lambda *args: fn(*args)), tensors)
    assert_same(made, want, OFF.get(name, 1e-9))
