"""Products that share an operand, and equal parts of one product's columns: one value whose parts are places, left
alone elsewhere, the same numbers.
"""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import GPU_SPLIT, TargetFacts
from dnnc.ir.tolerances import bound
from dnnc.options import make_options
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.rewrites.merge_parallel_matmuls import siblings
from dnnc.tools.sample_graphs import graph_of
from dnnc.tune_session import program_of

HEAD = (
    "def g(x: f32[2, 5, 8], *, a: f32[8, 48], b: f32[8, 48], c: f32[8, 48], d: f32[48], e: f32[48], f: f32[48]):\n    "
)
QKV = HEAD + "\n    ".join(
    [
        "q = transpose(reshape(add(matmul(x, a), d), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
        "k = transpose(reshape(add(matmul(x, b), e), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
        "v = transpose(reshape(add(matmul(x, c), f), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
        "return relu(q), exp(k), tanh(v)",
    ]
)


def test_queries_keys_and_values() -> None:
    g = graph_of(QKV)
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    want = run(g, [x], "float64")
    assert siblings(g, PassContext())
    verify(g)
    assert [n.op.name for n in g.nodes()] == [
        "matmul",
        "add",
        "reshape",
        "transpose",
        *("slice", "reshape") * 3,
        "relu",
        "exp",
        "tanh",
    ]
    stacked = next(n for n in g.nodes() if n.op.name == "transpose").output
    assert stacked.type.shape == (3, 2, 3, 5, 16)
    for a, b in zip(run(g, [x], "float64"), want):
        np.testing.assert_array_equal(a, b)
    assert not siblings(g, PassContext())


def test_nothing_is_copied() -> None:
    g = graph_of(QKV)
    f = dnnc.compile(g, cache=False)
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    for got, want, v in zip(f(x), run(g, [x], "float64"), g.outputs):
        assert np.abs(got - want).max() <= bound(v.type.dtype, 100, want)
    assert f.report.programs[-1].kernels[0].name.startswith("matmul_add_reshape_transpose")
    assert f.report.programs[-1].calls == 4  # the product, and what follows each part


@pytest.mark.parametrize(
    ("why", "body"),
    [
        ("one product alone", "return relu(reshape(matmul(x, a), shape=(2, 5, 3, 16)))"),
        (
            "different ends",
            "return relu(reshape(matmul(x, a), shape=(2, 5, 3, 16))), relu(reshape(matmul(x, b), shape=(2, 5, 16, 3)))",
        ),
        (
            "a bias and none",
            "return relu(reshape(add(matmul(x, a), d), shape=(2, 5, 3, 16))), relu(reshape(matmul(x, b), shape=(2, 5, "
            "3, 16)))",
        ),
        ("no reshape: parts would be columns", "return relu(matmul(x, a)), relu(matmul(x, b))"),
        (
            "results of the graph",
            "return reshape(matmul(x, a), shape=(2, 5, 3, 16)), reshape(matmul(x, b), shape=(2, 5, 3, 16))",
        ),
        (
            "another reader",
            "m = matmul(x, a)\n    return relu(reshape(m, shape=(2, 5, 3, 16))), relu(reshape(matmul(x, b), shape=(2, "
            "5, 3, 16))), exp(m)",
        ),
    ],
)
def test_left_alone(why: str, body: str) -> None:
    assert not siblings(graph_of(HEAD + body), PassContext()), why


CUTS = "def g(x: f32[2, 5, 8], *, w: f32[8, 96], d: f32[96]):\n    y = add(matmul(x, w), d)\n    " + "\n    ".join(
    f"{n} = slice(y, starts=(0, 0, {32 * k}), steps=(1, 1, 1), shape=(2, 5, 32))" for k, n in enumerate("abc")
)
ENDS = "\n    return relu({}), exp({}), tanh({})"
TURNED = "transpose(reshape({}, shape=(2, 5, 2, 16)), perm=(0, 2, 1, 3))"


def cut(*chains: str) -> str:
    """Three parts of a product, and what follows each."""
    return CUTS + ENDS.format(*(c.format(n) for c, n in zip(chains, "abc")))


@pytest.mark.parametrize("numerics", ["fast", "strict"])
@pytest.mark.parametrize(
    ("chains", "ops", "stacked"),
    [
        ((TURNED,) * 3, ["matmul", "add", "reshape", "transpose", *("slice", "reshape") * 3], (3, 2, 2, 5, 16)),
        (
            ("reshape({}, shape=(10, 2, 1, 16))",) * 3,
            ["matmul", "add", "reshape", "transpose", *("slice", "reshape") * 3],
            (3, 10, 2, 1, 16),
        ),
        (  # keys that are transposed, as without a kernel for attention: the parts are places, what follows stays
            (TURNED, TURNED.replace("(0, 2, 1, 3)", "(0, 2, 3, 1)"), TURNED),
            ["matmul", "add", "reshape", "transpose", *("slice", "reshape") * 3, *("reshape", "transpose") * 3],
            (3, 2, 5, 32),
        ),
    ],
    ids=["alike", "a row each", "not alike"],
)
def test_columns_of_one_product(
    chains: tuple[str, ...], ops: list[str], stacked: tuple[int, ...], numerics: str
) -> None:
    g = graph_of(cut(*chains))
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    want = run(g, [x], "float64")
    assert siblings(g, PassContext(numerics=numerics))
    verify(g)
    assert sorted(n.op.name for n in g.nodes()) == sorted([*ops, "relu", "exp", "tanh"])
    assert next(n for n in g.nodes() if n.op.name == "transpose").output.type.shape == stacked
    for a, b in zip(run(g, [x], "float64"), want):
        np.testing.assert_array_equal(a, b)
    assert not siblings(g, PassContext())


def test_columns_are_not_copied() -> None:
    g = graph_of(cut(TURNED, TURNED, TURNED))
    f = dnnc.compile(g, cache=False)
    x = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    for got, want, v in zip(f(x), run(g, [x], "float64"), g.outputs):
        assert np.abs(got - want).max() <= bound(v.type.dtype, 100, want)
    assert f.report.programs[-1].kernels[0].name.startswith("matmul_add_reshape_transpose")
    assert f.report.programs[-1].calls == 4


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("computed from where they are: gates", CUTS + ENDS.format("a", "b", "c")),
        ("one part is", CUTS + ENDS.format(TURNED.format("a"), TURNED.format("b"), "c")),
        ("parts that overlap", cut(TURNED, TURNED, TURNED).replace("(0, 0, 64)", "(0, 0, 63)")),
        (
            "every second column",
            cut(TURNED, TURNED, TURNED).replace(
                "starts=(0, 0, 0), steps=(1, 1, 1)", "starts=(0, 0, 0), steps=(1, 1, 2)"
            ),
        ),
        ("a part twice", cut(TURNED, TURNED, TURNED).replace("(0, 0, 64)", "(0, 0, 32)")),
        ("another reader", cut(TURNED, TURNED, TURNED) + ", exp(y)"),
        ("no product", cut(TURNED, TURNED, TURNED).replace("add(matmul(x, w), d)", "exp(add(matmul(x, w), d))")),
        ("one row: places as they are", cut(*("reshape({}, shape=(1, 2, 1, 16))",) * 3).replace("2, 5, ", "1, 1, ")),
        ("rows mixed with columns", cut(*("reshape({}, shape=(4, 80))",) * 3)),
        ("results of the graph", CUTS + "\n    return a, b, c"),
        (
            "a part of a size that is open",
            cut(*("reshape({}, shape=(2, 5, n, 1))",) * 3)
            .replace("(2, 5, 32)", "(2, 5, n)")
            .replace("(x:", "(z: f32[n], x:"),
        ),
    ],
)
def test_columns_left_alone(why: str, text: str) -> None:
    assert not siblings(graph_of(text), PassContext()), why


@pytest.mark.slow
@pytest.mark.parametrize("s", [1, 6])
def test_the_pipeline_cuts_what_attention_reads(s: int) -> None:
    """A decoder's step: keys and values go behind the past, queries to attention; several rows or one."""
    text = f"""
def g(x: f32[2, {s}, 8], k0: f32[2, 3, 7, 16], v0: f32[2, 3, 7, 16], *, w: f32[8, 144], d: f32[144]):
    y = add(matmul(x, w), d)
    q = transpose(reshape(slice(y, starts=(0, 0, 0), steps=(1, 1, 1), shape=(2, {s}, 48)), shape=(2, {s}, 3, 16)),
        perm=(0, 2, 1, 3))
    k = transpose(reshape(slice(y, starts=(0, 0, 48), steps=(1, 1, 1), shape=(2, {s}, 48)), shape=(2, {s}, 3, 16)),
        perm=(0, 2, 1, 3))
    v = transpose(reshape(slice(y, starts=(0, 0, 96), steps=(1, 1, 1), shape=(2, {s}, 48)), shape=(2, {s}, 3, 16)),
        perm=(0, 2, 1, 3))
    k1 = concat(k0, k, axis=2)
    v1 = concat(v0, v, axis=2)
    o = matmul(softmax(matmul(q, transpose(k1, perm=(0, 1, 3, 2)))), v1)
    return o, k1, v1
"""
    g = graph_of(text)
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal([int(d) for d in v.type.shape]).astype(np.float32) for v in g.inputs]  # type: ignore[call-overload]
    want = run(g, arrays, "float64")
    names = [
        k.kernel.name
        for k in program_of(graph_of(text), make_options({"target": "cuda -arch=sm_90a", "cache": False})).steps
    ]
    assert len(names) == 4 and names[0] == "matmul_add_reshape_transpose", (
        names
    )  # the product, two concatenations, attention
    f = dnnc.compile(g, cache=False)
    for got, w, v in zip(f(*arrays), want, g.outputs):
        assert np.abs(got - w).max() <= bound(v.type.dtype, 200, w)


def test_strict_numerics_keep_each_product_as_it_is() -> None:
    assert not siblings(graph_of(QKV), PassContext(numerics="strict"))


def test_the_pipeline_merges_what_attention_reads() -> None:
    text = HEAD + "\n    ".join(
        [
            "q = transpose(reshape(matmul(x, a), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
            "k = transpose(reshape(matmul(x, b), shape=(2, 5, 3, 16)), perm=(0, 2, 3, 1))",
            "v = transpose(reshape(matmul(x, c), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))",
            "return matmul(softmax(matmul(q, k)), v)",
        ]
    )
    g = graph_of(text)
    PassManager().run(
        g, LEVELS[3], PassContext(TargetFacts(fuses_attention=True, channels_last=True, reductions=GPU_SPLIT))
    )
    ops = [n.op.name for n in g.nodes()]
    assert ops.count("matmul") == 1 and ops.count("attention") == 1


def test_products_of_bytes_with_their_scales() -> None:
    """Zero points, scales (one of them a number for all columns) and biases lie side by side as the weights do."""
    text = """
def g(x: u8[2, 5, 8], *, a: i8[8, 48], b: i8[8, 48], p: i32[48], q: i32[48], s: f32[48], t: f32, d: f32[48]):
    m = matmul(x, a, out_dtype=i32)
    n = matmul(x, b, out_dtype=i32)
    u = transpose(reshape(add(mul(cast(add(m, p), to=f32), s), d), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))
    v = transpose(reshape(add(mul(cast(add(n, q), to=f32), t), d), shape=(2, 5, 3, 16)), perm=(0, 2, 1, 3))
    return relu(u), exp(v)"""
    rng = np.random.default_rng(1)
    given = {name: rng.integers(-128, 128, (8, 48)).astype(np.int8) for name in "ab"}
    given |= {name: rng.integers(-999, 999, 48).astype(np.int32) for name in "pq"}
    given |= {"s": rng.random(48).astype(np.float32), "d": rng.random(48).astype(np.float32), "t": np.float32(0.25)}
    g = parse(text, {k: np.asarray(v) for k, v in given.items()})
    x = rng.integers(0, 256, (2, 5, 8)).astype(np.uint8)
    want = run(g, [x], "float64")
    assert siblings(g, PassContext())
    verify(g)
    assert [n.op.name for n in g.nodes()].count("matmul") == 1
    for a, b in zip(run(g, [x], "float64"), want):
        np.testing.assert_array_equal(a, b)
