"""Gradients of graphs with symbolic sizes: the same graph for all sizes, the same numbers as with fixed ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.driver import compile
from dnnc.ir.dtype import DType, f32, f64
from dnnc.ir.expr import Expr, const, substitute, unwrap
from dnnc.ir.expr import dim as symbol
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.types import TensorType
from support.gradients import gradient

N, M = symbol("n"), symbol("m")
CASES: list[tuple[str, tuple[tuple[Any, ...], ...], dict[str, Any]]] = [
    ("mul", ((N, 3, M), (3, 1)), {}),
    ("div", ((N, 1), (1, M)), {}),
    ("reduce_sum", ((N, 5, M),), {"axes": (0, 2)}),
    ("reduce_mean", ((N, 5, M),), {"axes": (0, 2), "keepdims": True}),
    ("reduce_mean", ((N, M),), {"axes": None}),
    ("reduce_max", ((N, M),), {"axes": (1,)}),
    ("reduce_prod", ((N, 4, M),), {"axes": (0, 2)}),
    ("reduce_log_sum_exp", ((N, M),), {"axes": (0,)}),
    ("cumsum", ((N, M),), {"axis": 0}),
    ("cumprod", ((N, M),), {"axis": 1, "exclusive": True}),
    ("matmul", ((N, 4, M), (M, 3)), {}),
    ("matmul", ((2, N, M), (2, M, N)), {}),
    ("matmul", ((M,), (N, M, 3)), {}),
    ("softmax", ((N, M),), {"axis": 1}),
    ("layer_norm", ((N, 3, M), (M,), (M,)), {"axis": 2}),
    ("rms_norm", ((N, M), (M,)), {"axis": 1}),
    ("mean_variance_norm", ((N, 3, M),), {"axes": (0, 2)}),
    ("group_norm", ((N, 4, M), (4,), (4,)), {"groups": 2}),
    ("attention", ((2, N, 4), (2, M, 4), (2, M, 3)), {"scale": 0.5}),
    ("reshape", ((N, 3, M),), {"shape": (N * 3, M)}),
    ("expand", ((N, 1),), {"shape": (4, N, M)}),
    ("tile", ((N, M),), {"repeats": (2, 3)}),
    ("concat", ((N, 3), (M, 3), (2, 3)), {"axis": 0}),
    ("slice", ((N + 4, M),), {"starts": (3, 0), "steps": (1, 1), "shape": (N, M)}),
    ("slice", ((N * 2 + 4, 3),), {"starts": (N * 2 + 1, 0), "steps": (-2, 1), "shape": (N, 3)}),
    ("pad", ((N, M),), {"pads": (1, 0, 2, 3)}),
    ("transpose", ((N, M, 2),), {"perm": (2, 0, 1)}),
]


def resolved(x: Any, sizes: dict[Expr, Any]) -> Any:
    if isinstance(x, tuple):
        return tuple(resolved(d, sizes) for d in x)
    return unwrap(substitute(x, sizes)) if isinstance(x, Expr) else x


def graph(name: str, shapes: Any, attrs: dict[str, Any], dtype: DType, sizes: dict[Expr, Any]) -> Graph:
    g = Graph("g")
    values = [g.add_input(f"x{k}", TensorType(dtype, resolved(s, sizes))) for k, s in enumerate(shapes)]
    g.outputs = [Builder(g).op(name, *values, **{k: resolved(v, sizes) for k, v in attrs.items()})]
    return g


def arrays_for(g: Graph, rng: np.random.Generator, dtype: DType) -> list[Any]:
    return [rng.uniform(0.5, 2.0, v.type.shape).astype(dtype.numpy) for v in g.inputs]


@pytest.mark.parametrize("name,shapes,attrs", CASES, ids=lambda c: c if isinstance(c, str) else "")
def test_same_as_fixed_sizes(name: str, shapes: Any, attrs: dict[str, Any]) -> None:
    made, rng = gradient(graph(name, shapes, attrs, f64, {})).graph, np.random.default_rng(0)
    for n, m in ((2, 5), (1, 1), (4, 3)):
        fixed = gradient(graph(name, shapes, attrs, f64, {N: const(n), M: const(m)})).graph
        arrays = arrays_for(fixed, rng, f64)
        for a, b in zip(run(made, arrays), run(fixed, arrays), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.family("shapes")
@pytest.mark.parametrize("name,shapes,attrs", CASES, ids=lambda c: c if isinstance(c, str) else "")
def test_one_program_for_all_sizes(name: str, shapes: Any, attrs: dict[str, Any]) -> None:
    made, rng = gradient(graph(name, shapes, attrs, f32, {})).graph, np.random.default_rng(0)
    f = compile(made.copy(), threads=1, cache=False, verify=False)
    for n, m in ((2, 5), (7, 33)):
        arrays = arrays_for(gradient(graph(name, shapes, attrs, f32, {N: const(n), M: const(m)})).graph, rng, f32)
        got = f(*arrays)
        for a, b in zip(got if isinstance(got, tuple) else (got,), run(made, arrays, "float64"), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(b).max())))
