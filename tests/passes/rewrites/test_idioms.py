"""idioms: the spellings that exporters use become one op each; what only resembles them stays."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.canonicalize import canonicalize
from dnnc.passes.rewrites.cse import cse
from dnnc.passes.rewrites.idioms import idioms
from support.passes import check_no_match, check_pass, compare, random_inputs


def prepared(graph: Graph, ctx: PassContext) -> bool:
    """The pass where it stands in the pipeline."""
    return any([canonicalize(graph, ctx), cse(graph, ctx), canonicalize(graph, ctx), idioms(graph, ctx)])


ROWS = """
    m = reduce_mean(x, axes=(-1,), keepdims=True)
    d = sub(x, m)
    v = reduce_mean({square}, axes=(-1,), keepdims=True)
    y = {normal}
"""
SQUARES = ("mul(d, d)", "pow(d, 2.0)", "mul(sub(x, m), sub(x, m))")
NORMALS = (
    "div(d, sqrt(add(v, 0.5)))",
    "div(d, pow(add(0.5, v), 0.5))",
    "mul(d, reciprocal(sqrt(add(v, 0.5))))",
    "mul(div(one, sqrt(add(v, 0.5))), d)",
    "mul(d, pow(add(v, 0.5), -0.5))",
)


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("normal", NORMALS)
def test_standardize(square: str, normal: str) -> None:
    before = f"def f(x: f32[3, 8], *, one: f32 = 1.0):{ROWS.format(square=square, normal=normal)}    return y\n"
    after = "def f(x: f32[3, 8]):\n    y = mean_variance_norm(x, axes=(1,), epsilon=0.5)\n    return y\n"
    if "one" not in normal:
        before = before.replace(", *, one: f32 = 1.0", "")
    check_pass(prepared, before, after)


def test_layer_norm() -> None:
    check_pass(
        prepared,
        f"""
def f(x: f32[3, 4], *, g: f32[4] = [1.0, 2.0, 0.5, 3.0],
    h: f32[4] = [0.0, 1.0, -1.0, 2.0]):{ROWS.format(square="mul(d, d)", normal=NORMALS[0])}
    z = add(h, mul(g, y))
    return z
""",
        """
def f(x: f32[3, 4], *, g: f32[4] = [1.0, 2.0, 0.5, 3.0], h: f32[4] = [0.0, 1.0, -1.0, 2.0]):
    z = layer_norm(x, g, h, axis=1, epsilon=0.5)
    return z
""",
    )


def test_layer_norm_over_two_axes_by_inputs() -> None:
    check_pass(
        idioms,
        """
def f(x: f32[2, 3, 4], g: f32[3, 4]):
    y = mean_variance_norm(x, axes=(1, 2), epsilon=0.25)
    z = mul(y, g)
    return z
""",
        "def f(x: f32[2, 3, 4], g: f32[3, 4]):\n    z = layer_norm(x, g, axis=1, epsilon=0.25)\n    return z\n",
    )


def test_rms_norm() -> None:
    check_pass(
        prepared,
        """
def f(x: f32[3, 4], *, g: f32[4] = [1.0, 2.0, 0.5, 3.0]):
    s = reduce_mean(pow(x, 2.0), axes=(-1,), keepdims=True)
    z = mul(g, mul(x, reciprocal(sqrt(add(s, 0.5)))))
    return z
""",
        "def f(x: f32[3, 4], *, g: f32[4] = [1.0, 2.0, 0.5, 3.0]):\n    z = rms_norm(x, g, axis=1, epsilon=0.5)\n    "
        "return z\n",
    )


def test_softmax_and_log_softmax() -> None:
    check_pass(
        idioms,
        """
def f(x: f32[2, 5, 3]):
    e = exp(sub(x, reduce_max(x, axes=(1,), keepdims=True)))
    y = div(e, reduce_sum(e, axes=(-2,), keepdims=True))
    d = sub(y, reduce_max(y, axes=(2,), keepdims=True))
    z = sub(d, log(reduce_sum(exp(d), axes=(2,), keepdims=True)))
    return z
""",
        "def f(x: f32[2, 5, 3]):\n    y = softmax(x, axis=1)\n    z = log_softmax(y, axis=2)\n    return z\n",
    )


HALF_LAST = "mul(mul(x, add({gate}, 1.0)), 0.5)"
HALF_FIRST = "mul(mul(x, 0.5), add(1.0, {gate}))"
HALF_INSIDE = "mul(x, mul(0.5, add({gate}, 1.0)))"
HALVED = "div(mul(x, add({gate}, 1.0)), 2.0)"
ERF = ("erf(div(x, 1.4142135))", "erf(mul(0.70710677, x))")
CUBE = "tanh(mul(0.7978846, add(x, mul(0.044715, pow(x, 3.0)))))"
FACTORED = "tanh(mul(x, add(mul(mul(x, x), 0.035677407), 0.7978846)))"
SCALED = "tanh(mul(mul(x, 0.7978846), add(1.0, mul(0.044715, mul(x, x)))))"


@pytest.mark.parametrize("form", [HALF_LAST, HALF_FIRST, HALF_INSIDE, HALVED])
@pytest.mark.parametrize(
    ("gate", "kind"), [*((g, "none") for g in ERF), *((g, "tanh") for g in (CUBE, FACTORED, SCALED))]
)
def test_gelu(form: str, gate: str, kind: str) -> None:
    before = f"def f(h: f32[3, 50]):\n    x = exp(h)\n    y = {form.format(gate=gate)}\n    return y\n"
    after = f'def f(h: f32[3, 50]):\n    x = exp(h)\n    y = gelu(x, approximate="{kind}")\n    return y\n'
    check_pass(prepared, before, after)


def test_gelu_of_half_floats_has_rounded_constants() -> None:
    before = "def f(x: f16[9]):\n    return mul(mul(x, 0.5), add(erf(div(x, 1.4142)), 1.0))\n"
    check_pass(prepared, before, "def f(x: f16[9]):\n    return gelu(x)\n")


NORMAL = ROWS.format(square="mul(d, d)", normal="div(d, sqrt(add(v, 0.5)))")
STAYS = [
    (f"def f(x: f32[3, 8]):{NORMAL}    return y, v\n", "v is an output of the graph"),
    (f"def f(x: f32[3, 8]):{NORMAL}    return y\n".replace("add(v, 0.5)", "add(v, -0.5)"), "is no epsilon"),
    (
        f"def f(x: f32[8, 8]):{NORMAL}    return y\n".replace(", keepdims=True", ""),
        "reduce_mean does not keep the reduced dims",
    ),
    (
        "def f(x: f32[3, 8], r: f32[3, 8]):\n    y = mul(mean_variance_norm(x, axes=(1,)), r)\n    return y\n",
        "r is as large as the rows",
    ),
    (
        "def f(x: f32[3, 8], r: f32[8]):\n    y = mul(mean_variance_norm(x, axes=(1,)), exp(r))\n    return y\n",
        "is no parameter",
    ),
    (
        "def f(x: f32[3, 8, 2], r: f32[2]):\n    y = mul(mean_variance_norm(x, axes=(0, 1)), r)\n    return y\n",
        "the axes (0, 1) are not the last ones",
    ),
    (
        "def f(x: f32[3, 8], s: f32[8], t: f32[8], u: f32[8]):\n    return add(layer_norm(x, s, t), u)\n",
        "it has a bias already",
    ),
    (
        # overflows where softmax does not
        "def f(x: f32[3, 8]):\n    e = exp(x)\n    return div(e, reduce_sum(e, axes=(1,), keepdims=True))\n",
        "x is not made by sub",
    ),
    (
        "def f(x: f32[3, 8]):\n    e = exp(sub(x, reduce_max(x, axes=(0,), keepdims=True)))\n    return div(e, "
        "reduce_sum(e, axes=(1,), keepdims=True))\n",
        "the maximum is over axes (0,), the sum over (1,)",
    ),
    (
        "def f(x: f32[9]):\n    return mul(mul(x, 0.25), add(erf(mul(x, 0.70710677)), 1.0))\n",
        "the numeric factor is 0.25 instead of 0.5",
    ),
    (
        "def f(x: f32[9]):\n    return mul(mul(x, 0.5), add(erf(mul(x, 0.7)), 1.0))\n",
        "the argument of erf is the polynomial {1: 0.69",
    ),
    (
        "def f(x: f32[9]):\n    return mul(mul(x, 0.5), add(erf(mul(x, 0.70710677)), 2.0))\n",
        "is added to the gate instead of 1",
    ),
    (
        "def f(x: f32[9], z: f32[9]):\n    return mul(mul(z, 0.5), add(erf(mul(x, 0.70710677)), 1.0))\n",
        "x is not made by add or mul or div or pow",
    ),
]


OTHER_MEAN = f"def f(x: f32[3, 8]):{NORMAL}    return y\n".replace("(-1,)", "(0,)", 1)


@pytest.mark.parametrize(
    "text",
    [
        f"def f(x: f32[3, 8]):{NORMAL}    return y, d\n",
        f"def f(x: f32[3, 8]):{NORMAL}    return add(y, exp(d))\n",
        OTHER_MEAN,
    ],
)
def test_a_deviation_of_another_kind_is_normalized_by_itself(text: str) -> None:
    g = parse(text)
    inputs = random_inputs(g)
    want = run(g, inputs)
    assert idioms(g, PassContext())
    assert [n.op.name for n in g.nodes()][:3] == ["reduce_mean", "sub", "rms_norm"]
    compare(want, run(g, inputs))


@pytest.mark.parametrize(("text", "reason"), STAYS)
def test_what_resembles_an_idiom_stays(text: str, reason: str) -> None:
    check_no_match(idioms, text, reason)


@pytest.mark.parametrize(
    "text",
    [
        f"def f(x: f32[3, 8]):{NORMAL}    return y\n",
        "def f(x: f32[9]):\n    return mul(mul(x, 0.5), add(erf(mul(x, 0.70710677)), 1.0))\n",
    ],
)
def test_strict_numerics_keep_the_chain(text: str) -> None:
    check_no_match(idioms, text, "strict numerics exclude", ctx=PassContext(numerics="strict"))


def test_a_residual_is_not_taken_for_a_bias() -> None:
    g = parse(
        "def f(x: f32[3, 8], *, s: f32[8]):\n    y = layer_norm(x, s)\n    return add(y, x)\n",
        {"s": np.ones(8, np.float32)},
    )
    assert idioms(g, PassContext()) is False
