"""Every operator against PyTorch: the graph that is read is interpreted, in both float types; every ninth goes through
native code too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from operator_cases import CASES, Operand
from torch.utils import _pytree as pytree

import dnnc
from dnnc.frontends.torch.dims import Dims
from dnnc.frontends.torch.importer import Output, Read, read_fx
from dnnc.frontends.torch.tensors import array_of
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.verify import verify

pytestmark = pytest.mark.family("samples")

BOUND = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1.2e-1}
HALF = (torch.float16, torch.bfloat16)
NOT_IN_HALF = (
    "cdist 1",
    "cdist 2",
    "cdist 3",
    "cdist inf",
    "avg_pool3d",
    "local_response_norm",
)  # torch itself has no kernels for these
IN_HALF = [c for c in CASES if c[0] not in NOT_IN_HALF]


def operands(name: str, given: tuple[Operand, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return [o.draw(dtype, g) for o in given]


@cache
def table() -> dict[Any, Any]:
    from dnnc.frontends.torch.decompose import for_compile

    return for_compile()


def read(fn: Callable[..., Any], tensors: list[torch.Tensor]) -> Read:
    from functorch.compile import aot_function  # which takes longer than PyTorch itself

    found: list[Read] = []

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(read_fx(module, Dims()))
        return module

    with torch.no_grad():
        aot_function(
            lambda *a: pytree.tree_leaves(fn(*a)), compiler, inference_compiler=compiler, decompositions=table()
        )(*tensors)
    return found[0]


def close(name: str, made: Any, want: torch.Tensor, bound: float) -> None:
    expected = array_of(want)
    assert made.dtype == expected.dtype and made.shape == expected.shape, (
        f"{name}: {made.dtype} {made.shape}, torch {expected.dtype} {expected.shape}"
    )
    if expected.dtype.kind != "f":
        assert np.array_equal(made, expected), f"{name}: {made} {expected}"
        return
    scale = max(1.0, float(np.nanmax(np.abs(np.where(np.isinf(expected), 0, expected)), initial=0)))
    assert np.allclose(made, expected, rtol=0, atol=bound * scale, equal_nan=True), (
        f"{name}: {np.abs(made - expected).max()}"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("case", CASES, ids=[n.replace(" ", "_") for n, _, _ in CASES])
def test_operator(case: Any, dtype: torch.dtype) -> None:
    name, fn, given = case
    tensors = operands(name, given, dtype)
    found = read(fn, tensors)
    verify(found.graph)
    places = [int(p.rsplit("_", 1)[0].removeprefix("arg")) for p in found.inputs]
    arrays = [array_of(tensors[k]) for k in places]
    made = run(found.graph, arrays)
    wanted = pytree.tree_leaves(fn(*tensors))
    assert len(found.results) == len(wanted)
    for r, want in zip(found.results, wanted):
        assert isinstance(r, Output)
        close(name, made[r.index], want, BOUND[dtype])


@pytest.mark.parametrize("dtype", HALF, ids=["f16", "bf16"])
@pytest.mark.parametrize("case", IN_HALF, ids=[n.replace(" ", "_") for n, _, _ in IN_HALF])
def test_half(case: Any, dtype: torch.dtype) -> None:
    """Types as torch has them, and floats close to torch's; steps of a function may come where rounding puts them."""
    name, fn, given = case
    tensors = operands(name, given, dtype)
    found = read(fn, tensors)
    places = [int(p.rsplit("_", 1)[0].removeprefix("arg")) for p in found.inputs]
    made = run(found.graph, [array_of(tensors[k]) for k in places])
    for r, want in zip(found.results, pytree.tree_leaves(fn(*tensors))):
        x = np.asarray(made[r.index])
        assert x.dtype == array_of(want).dtype and x.shape == tuple(want.shape)
        if want.is_floating_point():
            close(name, x.astype(np.float64), want.double(), BOUND[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[4::9], ids=[n.replace(" ", "_") for n, _, _ in CASES[4::9]])
def test_native(case: Any) -> None:
    name, fn, given = case
    tensors = operands(name, given, torch.float32)
    found = read(fn, tensors)
    places = [int(p.rsplit("_", 1)[0].removeprefix("arg")) for p in found.inputs]
    f = dnnc.compile(found.graph, threads=1)
    made = f(*(array_of(tensors[k]) for k in places))
    made = made if isinstance(made, tuple) else (made,)
    for r, want in zip(found.results, pytree.tree_leaves(fn(*tensors))):
        close(name, made[r.index], want, BOUND[torch.float32])
