"""How floats are stored: text before and after, numbers within the format's precision, kept types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.ir.dtype import bf16, f16
from dnnc.ir.graph import digest
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.tolerances import EPS
from dnnc.passes.base import Pass, PassContext, PassManager
from dnnc.passes.rewrites.precision import STORAGE, precision, unfit
from dnnc.tools.sample_graphs import graph_of
from support.passes import check_pass, random_inputs
from support.random_graphs import random_graph

RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.standard_normal((16, 16)).astype(np.float32), "b": RNG.standard_normal(16).astype(np.float32)}
SMALL = {"float16": f16, "bfloat16": bf16}


def becomes(before: str, after: str, to: str, weights: dict[str, Any] = WEIGHTS) -> None:
    """One text becomes the other, in which W and B stand for the weights in the new type."""
    made = {name: a.astype(STORAGE[to].numpy) for name, a in weights.items()}
    data = {**weights, **{digest(a): a for a in made.values()}}
    for name, a in made.items():
        after = after.replace(name.upper(), f'{STORAGE[to]}[{", ".join(map(str, a.shape))}] = const("{digest(a)}")')
    check_pass(precision, before, after, data, ctx=PassContext(precision=to), eps=EPS[str(SMALL.get(to, f16))])


def types_of(text: str, to: str, **constants: Any) -> dict[str, str]:
    """The type of every value by its name, after the pass."""
    g = parse(text, {k: np.asarray(a, np.float32) for k, a in constants.items()})
    precision(g, PassContext(precision=to))
    verify(g)
    return {v.name: str(v.type.dtype) for v in (*g.constants, *(v for n in g.nodes() for v in n.outputs))}


LAYER = """\
def g(x: f32[4, 16], *, w: f32[16, 16], b: f32[16]):
    h = relu(add(matmul(x, w), b))
    y = add(matmul(h, w), h)
    return y
"""


@pytest.mark.parametrize("to", SMALL)
def test_contractions_and_elementwise_ops_store_the_asked_type(to: str) -> None:
    after = """\
def g(x: f32[4, 16], *, w: W, b: B):
    h = relu(add(matmul(cast(x, to=T), w), b))
    y = cast(add(matmul(h, w), h), to=f32)
    return y
"""
    becomes(LAYER, after.replace("to=T", f"to={SMALL[to]}"), to)


def test_norms_and_softmax_are_float32_between_casts() -> None:
    becomes(
        """\
def g(x: f32[4, 16], *, b: f32[16], w: f32[16, 16]):
    y = matmul(softmax(matmul(layer_norm(x, b), w)), w)
    return y
""",
        """\
def g(x: f32[4, 16], *, b: f32[16], w: W):
    y = cast(matmul(cast(softmax(cast(matmul(cast(layer_norm(x, b), to=f16), w), to=f32)), to=f16), w), to=f32)
    return y
""",
        "float16",
        WEIGHTS,
    )


def test_what_a_reduction_reads_and_makes_stays_float32_up_to_the_next_contraction() -> None:
    becomes(
        """\
def g(x: f32[4, 16], *, w: f32[16, 16]):
    z = matmul(x, w)
    d = div(z, sqrt(reduce_sum(mul(z, z), axes=(1,), keepdims=True)))
    y = matmul(d, w)
    return y
""",
        """\
def g(x: f32[4, 16], *, w: W):
    z = matmul(cast(x, to=f16), w)
    v32 = cast(z, to=f32)
    d = div(v32, sqrt(reduce_sum(mul(v32, v32), axes=(1,), keepdims=True)))
    y = cast(matmul(cast(d, to=f16), w), to=f32)
    return y
""",
        "float16",
        {"w": WEIGHTS["w"]},
    )


def test_pools_and_movement_follow() -> None:
    found = types_of(
        """\
def g(x: f32[1, 2, 4, 4]):
    a = max_pool(neg(x), kernel=(2, 2))
    b = transpose(a, perm=(0, 2, 3, 1))
    c = concat(b, b, axis=0)
    return relu(c)
""",
        "bfloat16",
    )
    assert {found[k] for k in "abc"} == {"bf16"}


def test_numbers_that_are_integers_in_disguise_stay_float32() -> None:
    found = types_of(
        """\
def g(x: f32[4], i: i64[4]):
    a = mul(x, 3.0)
    b = cast(floor(a), to=i64)
    c = mul(x, 5.0)
    d = less(c, 1.0)
    e = mul(cast(i, to=f32), 0.5)
    h = mul(x, 7.0)
    return b, d, e, h
""",
        "bfloat16",
    )
    assert [found[k] for k in "ace"] == ["f32"] * 3
    assert (
        list(found.values()).count("bf16") == 3
    )  # the product by 7, which nothing but the caller reads: its operands and itself


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("number", "to", "word"),
    [
        (1e6, "float16", "overflows"),
        (1e6, "bfloat16", ""),
        (-3.4028234e38, "bfloat16", "overflows"),
        (1e-12, "float16", "underflows"),
    ],
)
def test_constants_that_do_not_fit_keep_their_op_float32(number: float, to: str, word: str) -> None:
    g = parse(
        "def g(x: f32[4, 16], *, w: f32[16, 16], k: f32):\n    return softmax(add(matmul(x, w), k))",
        {"w": WEIGHTS["w"], "k": np.float32(number)},
    )
    manager = PassManager()
    manager.run(g, [Pass("precision", precision, "")], PassContext(precision=to))
    (add,) = (n for n in g.nodes() if n.op.name == "add")
    assert str(add.output.type.dtype) == ("f32" if word else str(SMALL[to]))
    assert [word in x and "k " in x for x in manager.records[0].notes] == [True] * bool(word)
    assert all(x in str(manager.records[0]) for x in manager.records[0].notes)


@pytest.mark.parametrize("to", SMALL)
def test_a_mask_that_says_never_leaves_attention_in_the_asked_type(to: str) -> None:
    """A causal mask of exporters, the lowest float32, which no half can hold: it is added to scores in registers, so it
    stays float32 alone.
    """
    mask = np.triu(np.full((4, 4), np.finfo(np.float32).min, np.float32), 1)
    text = (
        "def g(q: f32[2, 4, 16], k: f32[2, 4, 16], v: f32[2, 4, 16], *, m: f32[4, 4]):\n"
        "    return attention(q, k, v, m, scale=0.25)"
    )
    g = parse(text, {"m": mask})
    inputs = random_inputs(g, 3)
    want = run(g, inputs, "float64")[0]
    precision(g, PassContext(precision=to))
    verify(g)
    (n,) = (n for n in g.nodes() if n.op.name == "attention")
    assert [str(v.type.dtype) for v in (*n.inputs, n.output) if v is not None] == [
        *[str(SMALL[to])] * 3,
        "f32",
        str(SMALL[to]),
    ]
    assert np.abs(run(g, inputs, "float64")[0] - want).max() <= 16 * EPS[str(SMALL[to])]


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "values",
    [[70000.0, 1.0], [np.inf, 70000.0], [np.nan, -70000.0], [1e-12, 1e-12], [np.inf, np.nan], [65519.0, 0.0], []],
)
def test_unfit(values: list[float]) -> None:
    a = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        assert unfit(a, f16) == ("overflows" if (np.isinf(a.astype(np.float16)) & np.isfinite(a)).any() else "")
    assert unfit(np.float32(1e-9).reshape(1), f16) == "underflows" and unfit(np.zeros(1, np.float32), f16) == ""


def test_a_half_model_in_float32() -> None:
    weights = {"w": RNG.standard_normal((16, 16)).astype(np.float16)}
    becomes(
        """\
def g(x: f16[4, 16], *, w: f16[16, 16]):
    y = cast(relu(cast(matmul(x, w), to=f32)), to=f16)
    return y
""",
        """\
def g(x: f16[4, 16], *, w: W):
    y = cast(relu(matmul(cast(x, to=f32), w)), to=f16)
    return y
""",
        "float32",
        weights,
    )


def test_casts_of_a_mixed_model_stay_where_types_differ() -> None:
    text = """\
def g(x: f16[4, 16]):
    y = cast(softmax(cast(mul(x, x), to=f32)), to=f16)
    return y
"""
    assert sorted(types_of(text, "float16").values()) == ["f16", "f16", "f32", "f32"]
    assert sorted(types_of(text, "bfloat16").values()) == [
        "bf16",
        "bf16",
        "f16",
        "f32",
        "f32",
    ]  # in and out as they are declared
    assert sorted(types_of(text, "float32").values()) == ["f16", "f32", "f32", "f32"]


def test_nothing_to_do() -> None:
    for text, to in (
        (LAYER, None),
        (LAYER, "float32"),
        (LAYER, "tf32"),
        ("def g(x: f64[3], i: i32[3]):\n    return add(x, x), add(i, i)", "float16"),
    ):
        g = parse(text, WEIGHTS)
        before = str(g)
        assert precision(g, PassContext(precision=to)) is False and str(g) == before


@pytest.mark.slow
@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32"])
def test_random_graphs_stay_valid_and_keep_their_signature(to: str) -> None:
    changed = 0
    for seed in range(60):
        g, _ = random_graph(seed, 12)
        before = [v.type for v in (*g.inputs, *g.outputs)]
        changed += precision(g, PassContext(precision=to))
        verify(g)
        assert [v.type for v in (*g.inputs, *g.outputs)] == before
        text = str(g)
        assert precision(g, PassContext(precision=to)) is False and str(g) == text
    assert changed > (10 if to == "float32" else 40)


def test_numbers_of_a_stored_network() -> None:
    """Interpreted with every value rounded to its type: off by that type's precision, no more and not much less."""
    g = graph_of(LAYER, seed=3)
    want = run(g, random_inputs(g), "float64")[0]
    for to, t in SMALL.items():
        stored = g.copy()
        precision(stored, PassContext(precision=to))
        got = run(stored, random_inputs(g))[0]
        error = np.abs(got - want).max() / np.abs(want).max()
        assert EPS[str(t)] / 32 < error < 4 * EPS[str(t)]


def test_products_of_integers_are_scaled_in_float32_and_stored_like_others() -> None:
    text = """def g(x: u8[4, 16], r: f32[4, 8], *, w: i8[16, 8], s: f32[8]):
    p = matmul(x, w, out_dtype=i32)
    f = cast(p, to=f32)
    m = mul(f, s)
    y = add(m, r)
    z = exp(cast(x, to=f32))
    return y, z"""
    g = parse(text, {"w": np.ones((16, 8), np.int8), "s": np.ones(8, np.float32)})
    precision(g, PassContext(precision="float16"))
    verify(g)
    types = {v.name: str(v.type.dtype) for n in g.nodes() for v in n.outputs}
    adds = [n for n in g.nodes() if n.op.name == "add"]
    assert types["f"] == types["m"] == "f32" and adds[0].output.type.dtype is f16
    assert next(n for n in g.nodes() if n.op.name == "exp").output.type.dtype is not f16
