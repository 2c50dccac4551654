"""Scatters by rows and ranges: the graph before and after, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.dce import dce
from dnnc.passes.rewrites.scatters import scatters, wide_sums

GRID = np.stack(np.meshgrid(np.arange(2), np.arange(3), np.arange(4), indexing="ij"), -1)


def checked(g: Graph, numerics: str = "standard") -> str:
    """Run the passes; the ops that are left. The numbers stay."""
    rng = np.random.default_rng(0)
    small = min(int(str(d)) for d in g.inputs[0].type.shape)
    xs = [rng.integers(0, small if v.name == "at" else 9, v.type.shape).astype(v.type.dtype.numpy) for v in g.inputs]
    want = run(g.copy(), xs, "float64")[0]
    ctx = PassContext(numerics=numerics)
    scatters(g, ctx)
    wide_sums(g, ctx)
    dce(g, ctx)
    np.testing.assert_array_equal(run(g, xs, "float64")[0], want)
    return " ".join(n.op.name for n in g.nodes())


@pytest.mark.parametrize(
    "shape,at,left",
    [
        ("2, 3, 4", GRID, "reshape"),
        ("5, 3, 4", GRID, "reshape slice concat"),
        ("2, 6, 4", GRID + [0, 2, 0], "reshape slice slice concat"),
        ("4, 3, 7", GRID + [1, 0, 3], "reshape slice concat slice slice concat"),
        ("6, 4", np.array([[2], [-3]]), "reshape slice slice concat"),
        ("6, 4", np.array([[3], [2]]), "scatter_nd"),
        ("6, 4", np.array([[3], [3]]), "scatter_nd"),
        ("3, 4", np.stack([np.full(4, 2), np.arange(4)], -1), "reshape slice concat"),
        ("3, 4", np.stack([np.repeat([2, 0], 4), np.tile(np.arange(4), 2)], -1).reshape(2, 4, 2), "scatter_nd"),
    ],
)
def test_constant_indices(shape: str, at: np.ndarray, left: str) -> None:
    tail = shape.split(", ")[at.shape[-1] :]
    u = ", ".join([*map(str, at.shape[:-1]), *tail])
    dims = ", ".join(map(str, at.shape))
    text = f"def g(x: f32[{shape}], u: f32[{u}], *, at: i64[{dims}]):\n    y = scatter_nd(x, at, u)\n    return y"
    g = parse(text, {"at": at.astype(np.int64)})
    assert checked(g) == left
    if left == "scatter_nd" and at.ndim == 3:
        assert g.constants[next(iter(g.nodes())).inputs[1]].shape == (2, 1)


def test_sums_of_constant_rows() -> None:
    at = np.stack([np.repeat([2, 2], 4), np.tile(np.arange(4), 2)], -1).reshape(2, 4, 2)
    g = parse(
        "def g(x: f32[3, 4], u: f32[2, 4], *, at: i64[2, 4, 2]):\n    y = scatter_nd(x, at, u, reduction='add')\n    "
        "return y",
        {"at": at},
    )
    assert checked(g) == "scatter_nd"
    assert g.constants[next(iter(g.nodes())).inputs[1]].tolist() == [[2], [2]]


def test_expanded_indices_name_rows() -> None:
    text = """def g(x: f32[5, 3], at: i64[7, 1], u: f32[7, 3]):
    a = expand(at, shape=(7, 3))
    y = scatter_elements(x, a, u, axis=0, reduction='add')
    return y"""
    assert checked(parse(text, {})).endswith("reshape scatter_nd")
    other = text.replace("x: f32[5, 3]", "x: f32[5, 4]")  # not all columns
    assert checked(parse(other, {})) == "expand scatter_elements"


@pytest.mark.parametrize("dtype", ("f16", "bf16", "f32"))
def test_sums_are_wide(dtype: str) -> None:
    g = parse(
        f"def g(x: {dtype}[5], at: i64[30], u: {dtype}[30]):\n    y = scatter_elements(x, at, u, reduction='add')\n    "
        "return y",
        {},
    )
    small = BY_NAME[dtype].bits < 32
    assert checked(g) == ("cast cast scatter_elements cast" if small else "scatter_elements")


@pytest.mark.parametrize(
    "start,left",
    [
        (np.zeros((3, 4), np.float32), "expand scatter_nd"),
        (np.full((3, 4), 2.5, np.float32), "expand scatter_nd"),
        (np.arange(12, dtype=np.float32).reshape(3, 4), "scatter_nd"),
        (np.array([[0.0] * 4, [-0.0] * 4, [0.0] * 4], np.float32), "scatter_nd"),
    ],
)
def test_what_starts_as_one_number(start: np.ndarray, left: str) -> None:
    """Two zeros are two numbers."""
    text = "def g(u: f32[2, 4], at: i64[2, 1], *, x: f32[3, 4]):\n    y = scatter_nd(x, at, u, reduction='add')\n"
    assert checked(parse(text + "    return y", {"x": start})) == left


@pytest.mark.parametrize(
    ("numerics", "start", "made", "changes"),
    [
        ("standard", 0.0, "matmul(x, x)", True),
        ("strict", 0.0, "matmul(x, x)", False),
        ("standard", 1.0, "matmul(x, x)", False),
        ("standard", 0.0, "relu(x)", False),  # computed where it is added
    ],
)
def test_a_sum_starts_as_a_product(numerics: str, start: float, made: str, changes: bool) -> None:
    """Updates that are added to zeros are added to the product, on either side of it."""
    for parts in ("s, h", "h, s"):
        text = (
            f"def g(x: f32[4, 4], at: i64[9, 1], u: f32[9, 4], *, z: f32[4, 4]):\n    h = {made}\n"
            f"    s = scatter_nd(z, at, u, reduction='add')\n    return add({parts})"
        )
        left = checked(parse(text, {"z": np.full((4, 4), start, np.float32)}), numerics)
        first = made.split("(")[0]
        assert left == (f"{first} scatter_nd" if changes else f"{first} expand scatter_nd add")
