"""fold_batch_norm: norms, scales and shifts go into weights; values stay within rounding of float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.rewrites.fold import fold
from dnnc.passes.rewrites.fold_batch_norm import fold_batch_norm
from support.passes import check_no_match, check_pass, random_inputs

W = "w: f32[2, 2, 1, 1] = [[[[1.0]], [[2.0]]], [[[3.0]], [[4.0]]]]"


def test_scale_and_shift_of_a_convolution() -> None:
    check_pass(
        fold_batch_norm,
        f"""
def f(x: f32[1, 2, 3, 3], *, {W}, b: f32[2] = [1.0, -1.0], s: f32[2, 1, 1] = [[[2.0]], [[-0.5]]],
    t: f32[1, 2, 1, 1] = [[[[4.0]], [[8.0]]]]):
    y = sub(mul(s, conv(x, w, b)), t)
    return y
""",
        """
def f(x: f32[1, 2, 3, 3], *, w: f32[2, 2, 1, 1] = [[[[2.0]], [[4.0]]], [[[-1.5]], [[-2.0]]]], b: f32[2] = [-2.0, -7.5]):
    y = conv(x, w, b)
    return y
""",
    )


def test_a_convolution_without_bias_gets_one() -> None:
    check_pass(
        fold_batch_norm,
        f"def f(x: f32[1, 2, 3, 3], *, {W}, t: f32 = 3.0, s: f32 = 2.0):\n    y = div(add(conv(x, w), t), s)\n    "
        "return y\n",
        """
def f(x: f32[1, 2, 3, 3], *, w: f32[2, 2, 1, 1] = [[[[0.5]], [[1.0]]], [[[1.5]], [[2.0]]]], t: f32[2] = [1.5, 1.5]):
    y = conv(x, w, t)
    return y
""",
    )


def test_batch_norm_of_a_matrix_product() -> None:
    check_pass(
        fold_batch_norm,
        """
def f(x: f32[3, 2], *, w: f32[2, 2] = [[1.0, 2.0], [3.0, 4.0]], b: f32[2] = [1.0, 2.0], g: f32[2] = [2.0, 3.0],
    h: f32[2] = [1.0, 1.0],
      mu: f32[2] = [0.5, -1.0], var: f32[2] = [0.25, 0.5]):
    y = batch_norm(add(matmul(x, w), b), g, h, mu, var, epsilon=0.0)
    return y
""".replace("epsilon=0.0", "epsilon=0.75").replace("[0.25, 0.5]", "[3.25, 0.25]"),
        """
def f(x: f32[3, 2], *, w: f32[2, 2] = [[1.0, 6.0], [3.0, 12.0]], b: f32[2] = [1.5, 10.0]):
    y = add(matmul(x, w), b)
    return y
""",
    )


def model(kind: str, group: int, dtype: str, rng: np.random.Generator) -> tuple[Graph, Any]:
    """A contraction with bias, batch norm, a scale, a shift, as text and data."""
    if kind == "matmul":
        head, z, channels, weights = "x: f32[5, 8]", "add(matmul(x, w), b)", 6, (8, 6)
    elif kind == "conv":
        head, z, channels = "x: f32[2, 4, 6, 5]", f"conv(x, w, b, pads=(1, 0, 1, 2), strides=(2, 1), group={group})", 6
        weights = (6, 4 // group, 3, 3)
    else:
        head, z, channels = "x: f32[2, 4, 6, 5]", f"conv_transpose(x, w, b, strides=(2, 2), group={group})", 6
        weights = (4, 6 // group, 3, 3)
    data = {
        "w": rng.standard_normal(weights),
        "b": rng.standard_normal(channels),
        "s": rng.standard_normal((channels, 1, 1)),
    }
    data |= {k: rng.uniform(0.5, 2, channels) for k in ("g", "h", "mu", "var")}
    data["s"] = data["s"].reshape(-1) if kind == "matmul" else data["s"]
    arrays = {k: a.astype(dtype) for k, a in data.items()}
    name = {"float32": "f32", "float16": "f16", "float64": "f64"}[dtype]
    params = ", ".join(f"{k}: f32{list(a.shape)}" for k, a in arrays.items())
    text = f"def f({head}, *, {params}):\n    return add(mul(batch_norm({z}, g, h, mu, var), s), 0.5)\n".replace(
        "f32", name
    )
    return parse(text, arrays), arrays


CASES = [
    (kind, group, dtype)
    for kind in ("conv", "conv_transpose")
    for group in (1, 2)
    for dtype in ("float32", "float16", "float64")
]


@pytest.mark.parametrize(("kind", "group", "dtype"), [*CASES, ("matmul", 1, "float32"), ("matmul", 1, "float64")])
def test_against_float64(kind: str, group: int, dtype: str) -> None:
    g, _ = model(kind, group, dtype, np.random.default_rng(3))
    inputs = random_inputs(g)
    (want,) = run(g, inputs, precision="float64")
    assert fold_batch_norm(g, PassContext()) and fold_batch_norm(g, PassContext()) is False
    verify(g)
    assert [n.op.name for n in g.nodes()] == (["matmul", "add"] if kind == "matmul" else [kind])
    (got,) = run(g, inputs, precision="float64")
    eps = {"float32": 2.0**-23, "float16": 2.0**-10, "float64": 2.0**-52}[dtype]
    assert np.abs(got - want).max() <= 8 * eps * np.abs(want).max()


def test_a_sum_in_a_half_type_keeps_its_batch_norm() -> None:
    g, data = model("matmul", 1, "float16", np.random.default_rng(3))
    check_no_match(
        fold_batch_norm,
        str(g),
        "cannot take up a scale, and f16 would lose digits",
        {**data, **{g.digest(v): a for v, a in g.constants.items()}},
    )


def test_the_decomposed_form_folds_too() -> None:
    g, _ = model("conv", 1, "float32", np.random.default_rng(1))
    inputs = random_inputs(g)
    (want,) = run(g, inputs)
    for p in (decompose, fold, fold_batch_norm):
        assert p(g, PassContext())
    assert len(g) == 1
    (got,) = run(g, inputs)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_batch_norm_alone_becomes_scale_and_shift() -> None:
    check_pass(
        fold_batch_norm,
        """
def f(x: f32[1, 2, 3], *, g: f32[2] = [2.0, 1.0], h: f32[2] = [1.0, 1.0], mu: f32[2] = [2.0, 3.0],
    var: f32[2] = [3.25, 0.25]):
    y = relu(batch_norm(x, g, h, mu, var, epsilon=0.75))
    return y
""",
        """
def f(x: f32[1, 2, 3], *, g: f32[2, 1] = [[1.0], [1.0]], h: f32[2, 1] = [[-1.0], [-2.0]]):
    y = relu(add(mul(x, g), h))
    return y
""",
    )


def test_shared_weights_are_copied() -> None:
    g = parse(f"def f(x: f32[1, 2, 3, 3], *, {W}):\n    return mul(conv(x, w), 2.0), conv(relu(x), w)\n")
    assert fold_batch_norm(g, PassContext())
    assert [float(a.ravel()[0]) for a in g.constants.values()] == [1.0, 2.0]
    assert [n.inputs[1].name for n in g.nodes() if n.op.name == "conv" and n.inputs[1]] == ["w_0", "w"]


CONV = f"def f(x: f32[1, 2, 3, 3], v: f32[2, 2, 1, 1], p: f32[2, 1, 1], *, {W}):\n    "
STAYS = [
    (CONV + "z = conv(x, w)\n    return mul(z, 2.0), relu(z)\n", "z has 2 readers"),
    (CONV + "z = conv(x, w)\n    return mul(z, 2.0), z\n", "z is an output of the graph"),
    (CONV + "return mul(conv(x, v), 2.0)\n", "v is not a constant"),
    (CONV + "return mul(conv(x, w), p)\n", "neither operand of mul is a constant"),
    (CONV + "return mul(conv(x, w), inf)\n", "a folded constant would not be finite in f32"),
    (CONV + "return div(conv(x, w), 0.0)\n", "a folded constant would not be finite in f32"),
    (CONV + "return mul(conv(x, w), [1.0, 2.0, 3.0])\n", "does not vary along axis 1 alone"),
    (CONV + "return mul(relu(conv(x, w)), 2.0)\n", "is not made by conv or conv_transpose"),
    (
        "def f(x: f16[1, 2, 3], *, g: f16[2] = [1, 2], h: f16[2] = [1, 2], mu: f16[2] = [1, 2], var: f16[2] = [1, "
        "2]):\n"
        "    return batch_norm(x, g, h, mu, var)\n",
        "x cannot take up a scale, and f16 would lose digits",
    ),
    (
        "def f(x: i32[3, 2], *, w: i32[2, 2] = [[1, 2], [3, 4]]):\n    return mul(matmul(x, w), 2)\n",
        "matmul is not computed in floats",
    ),
    (
        "def f(x: f32[3, 2], *, w: f32[2] = [1.0, 2.0]):\n    return mul(matmul(x, w), 2.0)\n",
        "the weights are a vector",
    ),
]


@pytest.mark.parametrize(("text", "reason"), STAYS)
def test_rule_says_why_it_does_not_fire(text: str, reason: str) -> None:
    check_no_match(fold_batch_norm, text, reason)


def test_strict_numerics_keep_the_graph() -> None:
    text = CONV + "return mul(conv(x, w), 2.0)\n"
    check_no_match(fold_batch_norm, text, "strict numerics exclude", ctx=PassContext(numerics="strict"))
