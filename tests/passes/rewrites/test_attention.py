"""Attention out of its parts: the forms that exporters write, the same numbers, and what must be left alone."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import TargetFacts
from dnnc.ir.tolerances import bound
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.rewrites.attention import attention, attention_parts

ON = PassContext(TargetFacts(fuses_attention=True))
PARAMS = "q: f32[2, 3, 5, 8], k: f32[2, 3, 7, 8], v: f32[2, 3, 7, 4]"


def text(*lines: str, params: str = PARAMS) -> str:
    return "\n    ".join([f"def g({params}):", *lines])


FORMS = {
    "plain": (text("return matmul(softmax(matmul(q, transpose(k, perm=(0, 1, 3, 2)))), v)"), "attention(q, k, v)"),
    "scaled": (
        text("return matmul(softmax(mul(matmul(q, transpose(k, perm=(0, 1, 3, 2))), 0.5)), v)"),
        "attention(q, k, v, scale=0.5",
    ),
    "divided": (
        text("return matmul(softmax(div(matmul(q, transpose(k, perm=(0, 1, 3, 2))), 4.0)), v)"),
        "attention(q, k, v, scale=0.25",
    ),
    "query scaled": (
        text("return matmul(softmax(matmul(mul(q, 0.5), transpose(k, perm=(0, 1, 3, 2)))), v)"),
        "attention(q, k, v, scale=0.5",
    ),
    "masked": (
        text(
            "s = add(m, mul(matmul(q, transpose(k, perm=(0, 1, 3, 2))), 0.5))",
            "return matmul(softmax(s), v)",
            params=PARAMS + ", m: f32[2, 1, 1, 7]",
        ),
        "attention(q, k, v, m, scale=0.5",
    ),
    "rows without keys": (
        text(
            "p = softmax(add(matmul(q, transpose(k, perm=(0, 1, 3, 2))), m))",
            "return matmul(where(isnan(p), z, p), v)",
            params=PARAMS + ", m: f32[5, 7], *, z: f32 = 0.0",
        ),
        'masked_rows="zero"',
    ),
    "keys turned within a reshaped batch": (
        text(
            "t = reshape(transpose(reshape(k, shape=(6, 7, 8)), perm=(0, 2, 1)), shape=(2, 3, 8, 7))",
            "return matmul(softmax(matmul(q, t)), v)",
        ),
        "attention(q, v",
    ),
    "keys as columns": (
        text("return matmul(softmax(matmul(q, k)), v)", params="q: f32[2, 5, 8], k: f32[2, 8, 7], v: f32[2, 7, 4]"),
        "attention(q, v3, v)",
    ),
}


def after(g: Graph) -> Graph:
    """The graph as the whole pipeline up to this pass leaves it."""
    names = [p.name for p in LEVELS[3]]
    PassManager().run(g, LEVELS[3][: names.index("attention") + 1], ON)
    verify(g)
    return g


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    before, want = FORMS[name]
    g = parse(before)
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal([int(d) for d in v.type.shape]).astype(np.float32) for v in g.inputs]  # type: ignore[arg-type]
    if name == "rows without keys":
        arrays[-1][2] = -np.inf
    expected = run(g, arrays, "float64")[0]
    made = after(g)
    ops = [n.op.name for n in made.nodes() if n.op.name != "reshape"]  # views
    assert ops == (["transpose", "attention"] if name == "keys as columns" else ["attention"])
    assert want in str(made).replace("'", '"')
    got = run(made, arrays, "float64")[0]
    assert np.abs(got - expected).max() <= bound(made.outputs[0].type.dtype, 100, expected)
    assert not attention(made, ON)


@pytest.mark.parametrize(
    ("why", "given"),
    [
        (
            "somebody else reads the scores",
            text("s = matmul(q, transpose(k, perm=(0, 1, 3, 2)))", "return matmul(softmax(s), v), s"),
        ),
        (
            "somebody else reads the weights",
            text("p = softmax(matmul(q, transpose(k, perm=(0, 1, 3, 2))))", "return matmul(p, v), p"),
        ),
        (
            "the softmax goes over the queries",
            text("return matmul(softmax(matmul(q, transpose(k, perm=(0, 1, 3, 2))), axis=2), v)"),
        ),
        (
            "a product of matrices of no batch",
            text("return matmul(softmax(matmul(q, k)), v)", params="q: f32[5, 8], k: f32[8, 7], v: f32[7, 4]"),
        ),
        (
            "wide heads",
            text(
                "return matmul(softmax(matmul(q, k)), v)",
                params="q: f32[1, 5, 300], k: f32[1, 300, 7], v: f32[1, 7, 4]",
            ),
        ),
        (
            "double precision",
            text("return matmul(softmax(matmul(q, k)), v)", params="q: f64[1, 5, 8], k: f64[1, 8, 7], v: f64[1, 7, 4]"),
        ),
        (
            "a mask that is larger than the scores",
            text(
                "return matmul(softmax(add(matmul(q, k), m)), v)",
                params="q: f32[1, 5, 8], k: f32[1, 8, 7], v: f32[2, 7, 4], m: f32[2, 5, 7]",
            ),
        ),
    ],
)
def test_left_alone(why: str, given: str) -> None:
    g = after(parse(given))
    assert "attention" not in [n.op.name for n in g.nodes()], why


def test_strict_numerics_and_targets_without_the_kernel_keep_the_parts() -> None:
    for ctx in (PassContext(TargetFacts(fuses_attention=True), numerics="strict"), PassContext()):
        assert not attention(parse(FORMS["plain"][0]), ctx)


def test_in_half_precision_the_mask_stays_single() -> None:
    g = after(parse(FORMS["masked"][0]))
    ctx = PassContext(TargetFacts(fuses_attention=True), precision="float16")
    PassManager().run(g, [p for p in LEVELS[3] if p.name == "precision"], ctx)
    n = next(n for n in g.nodes() if n.op.name == "attention")
    assert [str(v.type.dtype) for v in n.inputs if v is not None] == ["f16", "f16", "f16", "f32"]


def test_a_mask_that_is_the_same_for_all_queries_is_not_repeated() -> None:
    constants = "t: bool[1, 1, 5, 1] = [[[[True], [True], [True], [True], [True]]]], y: f32 = 0.0, n: f32 = -3.0e38"
    lines = (
        "w = where(logical_and(m, t), y, n)",
        "s = add(mul(matmul(q, transpose(k, perm=(0, 1, 3, 2))), 0.5), w)",
        "return matmul(softmax(s), v)",
    )
    g = after(parse(text(*lines, params=f"{PARAMS}, m: bool[2, 1, 1, 7], *, {constants}")))
    n = next(n for n in g.nodes() if n.op.name == "attention")
    assert n.inputs[3] is not None and str(n.inputs[3].type) == "f32[2, 1, 1, 7]"


@pytest.mark.parametrize(
    "given,params",
    [
        ("attention(q, k, v, scale=0.35)", PARAMS),
        ("attention(q, k, v, m, scale=0.25)", PARAMS + ", m: f32[2, 1, 1, 7]"),
        (
            'attention(q, k, v, m, scale=0.5, masked_rows="zero")',
            "q: f32[4, 8], k: f32[6, 8], v: f32[6, 3], m: f32[4, 1]",
        ),
        ("attention(q, k, v, m, scale=0.25)", "q: f16[3, 16], k: f16[9, 16], v: f16[9, 5], m: f32[3, 9]"),
    ],
)
def test_parts_for_targets_without_the_kernel(given: str, params: str) -> None:
    g = parse(text(f"return {given}", params=params))
    parts = g.copy()
    assert attention_parts(parts, PassContext()) and not attention_parts(g.copy(), ON)
    verify(parts)
    assert "attention" not in [n.op.name for n in parts.nodes()]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in g.inputs]
    if "zero" in given:
        arrays[3][1] = -np.inf  # a row without keys
    (want,), (got,) = run(g, arrays), run(parts, arrays)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=2e-3 if got.dtype == np.float16 else 1e-6)
    assert got.dtype == want.dtype
