"""Long reductions with few results in two steps: the graph, the numbers, and those that stay one."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import GPU_SPLIT, TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.split_reduce import split_reductions
from support.passes import check_pass

GPU = PassContext(TargetFacts(channels_last=True, reductions=GPU_SPLIT))


def test_columns() -> None:
    before = """
def f(x: f16[1, 4096, 32]):
    y: f16[1, 32] = reduce_mean(x, axes=(1,))
    return y
"""
    after = """
def f(x: f16[1, 4096, 32]):
    y = cast(reduce_mean(reduce_mean(cast(reshape(x, shape=(1, 64, 64, 32)), to=f32), axes=(2,)), axes=(1,)), to=f16)
    return y
"""
    check_pass(split_reductions, before, after, ctx=GPU)


def test_images() -> None:
    before = """
def f(x: f32[1, 8, 64, 48]):
    y: f32[1, 8] = reduce_mean(x, axes=(2, 3))
    return y
"""
    after = """
def f(x: f32[1, 8, 64, 48]):
    y = reduce_mean(reduce_mean(x, axes=(3,), keepdims=True), axes=(2, 3))
    return y
"""
    check_pass(split_reductions, before, after, ctx=GPU)


@pytest.mark.parametrize("op", ["reduce_sum", "reduce_max", "reduce_min", "reduce_mean"])
@pytest.mark.parametrize(
    "shape,axes", [("2, 300, 400, 1", "(1, 2)"), ("70000", "None"), ("3, 66000", "(1,)"), ("4, 4096, 5", "(1,)")]
)
def test_numbers(op: str, shape: str, axes: str) -> None:
    g = parse(f"def f(x: f32[{shape}]):\n    y = {op}(x, axes={axes}, keepdims=True)\n    return y\n")
    x = np.random.default_rng(0).standard_normal([int(d) for d in shape.split(",")]).astype(np.float32)
    (want,) = run(g, [x], "float64")
    assert split_reductions(g, GPU)
    verify(g)
    assert sum(n.op.name == op for n in g.nodes()) == 2
    (got,) = run(g, [x], "float64")
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "inputs,call",
    [
        ("x: f32[65, 70000]", "reduce_sum(x, axes=(1,))"),  # enough rows
        ("x: f32[16384, 4096]", "reduce_sum(x, axes=(0,))"),  # enough columns
        ("x: f32[1, 1000, 32]", "reduce_sum(x, axes=(1,))"),  # short
        ("x: f32[70001]", "reduce_sum(x)"),  # a prime: no parts of one size
        ("x: f32[3000, 2, 3000]", "reduce_sum(x, axes=(0, 2))"),  # axes apart
    ],
)
def test_what_stays(inputs: str, call: str) -> None:
    g = parse(f"def f({inputs}):\n    y = {call}\n    return y\n")
    assert not split_reductions(g, GPU)


SPREAD = """
def f(x: f32[{shape}]):
    d = sub(x, reduce_mean(x, axes=(0,), keepdims=True))
    y = reduce_mean(mul(d, d), axes=(0,))
    return y
"""


def test_reductions_whose_results_go_back_to_their_rows() -> None:
    assert not split_reductions(
        parse(SPREAD.format(shape="4096, 512")), GPU
    )  # one kernel of 64 blocks, which reads x once
    g = parse(SPREAD.format(shape="65536, 128"))
    assert split_reductions(g, GPU) and sum(n.op.name == "reduce_mean" for n in g.nodes()) == 4


@pytest.mark.slow
def test_a_norm_of_few_long_rows_is_taken_apart() -> None:
    text = "def f(x: {dtype}[{shape}]):\n    y = mean_variance_norm(x, axes={axes}, epsilon=0.001)\n    return y\n"
    for shape, axes in (("4096, 512", "(0,)"), ("65536, 512", "(0,)"), ("32, 3, 32, 32", "(0, 2, 3)")):
        assert not split_reductions(parse(text.format(dtype="f32", shape=shape, axes=axes)), GPU)
    for dtype, shape, axes in (("f32", "65536, 16", "(0,)"), ("f16", "2, 524288", "(1,)")):
        g = parse(text.format(dtype=dtype, shape=shape, axes=axes))
        x = (
            np.random.default_rng(0)
            .standard_normal([int(d) for d in shape.split(",")])
            .astype(dtype.replace("f", "float"))
        )
        (want,) = run(g, [x], "float64")
        assert split_reductions(g, GPU)
        verify(g)
        assert [n.op.name for n in g.nodes()].count("reduce_mean") == 4
        (got,) = run(g, [x], "float64")
        np.testing.assert_allclose(
            got, want, rtol=1e-3 if dtype == "f16" else 1e-7, atol=1e-3 if dtype == "f16" else 1e-7
        )


def test_not_when_the_order_is_fixed() -> None:
    text = "def f(x: f32[131072]):\n    y = reduce_sum(x)\n    return y\n"
    assert not split_reductions(parse(text), PassContext())  # short for a CPU
    assert not split_reductions(
        parse(text), PassContext(TargetFacts(channels_last=True, reductions=GPU_SPLIT), numerics="strict")
    )
    assert split_reductions(parse(text), GPU)


def test_what_is_computed_before_stays_in_the_kernel() -> None:
    before = """
def f(x: f32[100000], z: f32[100000], s: f32[1]):
    d: f32[100000] = sub(x, mul(z, s))
    y: f32 = reduce_sum(mul(d, d), axes=(0,))
    return y
"""
    after = """
def f(x: f32[100000], z: f32[100000], s: f32[1]):
    v4 = sub(reshape(x, shape=(1, 20, 5000, 1)), mul(reshape(z, shape=(1, 20, 5000, 1)), reshape(s, shape=())))
    y = reshape(reduce_sum(reduce_sum(mul(v4, v4), axes=(2,)), axes=(1,)), shape=())
    return y
"""
    check_pass(split_reductions, before, after, ctx=GPU)


def test_what_others_read_is_not_computed_twice() -> None:
    text = "def f(x: f32[70000]):\n    d = exp(x)\n    y = reduce_sum(d, axes=(0,))\n    return y, d\n"
    g = parse(text)
    assert split_reductions(g, GPU)
    assert [n.op.name for n in g.nodes()].count("exp") == 1


def test_parts_are_whole_chunks() -> None:
    g = parse("def f(x: f32[100000000]):\n    y = reduce_sum(x, axes=(0,))\n    return y\n")
    split_reductions(g, GPU)
    shape = next(n.attrs["shape"] for n in g.nodes() if n.op.name == "reshape")
    assert shape[1] >= 128 and shape[2] % 4 == 0


CPU = PassContext()


def test_sums_of_a_cpu() -> None:
    before = """
def f(x: f32[1048576], y: f32[1048576]):
    z: f32 = reduce_sum(mul(x, y), axes=(0,), keepdims=False)
    return z
"""
    after = """
def f(x: f32[1048576], y: f32[1048576]):
    v2 = mul(reshape(x, shape=(1, 64, 16384, 1)), reshape(y, shape=(1, 64, 16384, 1)))
    z = reshape(reduce_sum(reduce_sum(v2, axes=(2,), keepdims=False), axes=(1,), keepdims=False), shape=())
    return z
"""
    check_pass(split_reductions, before, after, ctx=CPU)


def test_what_does_not_fill_a_part_is_added() -> None:
    before = """
def f(x: f32[300007]):
    z: f32 = reduce_max(abs(x), axes=(0,), keepdims=False)
    return z
"""
    g = parse(before)
    assert split_reductions(g, CPU)
    verify(g)
    sizes = [n.inputs[0].type.shape for n in g.nodes() if n.op.name == "reduce_max" and n.inputs[0] is not None]
    assert sizes == [(1, 36, 8320, 1), (1, 36, 1), (1, 487, 1)] and 36 * 8320 + 487 == 300007
    x = np.random.default_rng(0).standard_normal(300007).astype(np.float32)
    for at in (0, 299519, 299520, 300006):  # first and last, and both sides of the border
        y = x.copy()
        y[at] = -9.0
        assert run(g, [y])[0] == 9.0


LONG = [
    ("300007", "None"),
    ("300007, 3", "(0,)"),
    ("601, 500, 1", "(0, 1)"),
    ("4099, 80", "(0,)"),
    ("3, 400000", "(1,)"),
    ("1000003", "(0,)"),
]


VALUES = {
    "f32": lambda r, n: r.uniform(0.99, 1.01, n),
    "f16": lambda r, n: r.uniform(0.1, 0.3, n),
    "i32": lambda r, n: r.integers(0, 99, n),
}
CASES = [
    (op, t)
    for op in ("reduce_sum", "reduce_max", "reduce_min", "reduce_mean", "reduce_prod")
    for t in VALUES
    if (op, t) != ("reduce_prod", "f16")
]


@pytest.mark.parametrize("op, dtype", CASES)
@pytest.mark.parametrize("shape, axes", LONG)
def test_numbers_of_a_cpu(op: str, dtype: str, shape: str, axes: str) -> None:
    g = parse(f"def f(x: {dtype}[{shape}]):\n    y = {op}(mul(x, x), axes={axes}, keepdims=True)\n    return y\n")
    x = VALUES[dtype](np.random.default_rng(0), [int(d) for d in shape.split(",")]).astype(BY_NAME[dtype].numpy)
    (want,) = run(g, [x], "float64")
    assert split_reductions(g, CPU) != (
        op == "reduce_mean" and dtype == "i32"
    )  # means of integers are rounded: they stay
    verify(g)
    (got,) = run(g, [x], "float64")
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-3 if dtype == "f16" else 1e-9)


def test_means_of_integers_stay_on_gpus_too() -> None:
    for shape, axes in (("1, 4096, 32", "(1,)"), ("1, 8, 64, 48", "(2, 3)"), ("131072", "(0,)")):
        assert not split_reductions(
            parse(f"def f(x: i32[{shape}]):\n    y = reduce_mean(x, axes={axes})\n    return y\n"), GPU
        )


@pytest.mark.parametrize(
    "shape, axes",
    [
        ("70, 3000", "(1,)"),
        ("64, 16384", "(1,)"),
        ("200000", "(0,)"),
        ("4096, 8192", "(0,)"),
        ("1, 32, 112, 112", "(2, 3)"),
        ("1, 100000", "(0,)"),
    ],
)
def test_what_a_cpu_keeps(shape: str, axes: str) -> None:
    """Rows enough for all threads, or too little work."""
    assert not split_reductions(
        parse(f"def f(x: f32[{shape}]):\n    y = reduce_sum(x, axes={axes})\n    return y\n"), CPU
    )


def test_a_product_of_two_long_vectors_is_such_a_sum() -> None:
    before = """
def f(x: f32[1, 524288], y: f32[524288, 1]):
    z = matmul(x, y)
    return z
"""
    after = """
def f(x: f32[1, 524288], y: f32[524288, 1]):
    v0 = reshape(x, shape=(524288,))
    v1 = reshape(y, shape=(524288,))
    v4 = mul(reshape(v0, shape=(1, 64, 8192, 1)), reshape(v1, shape=(1, 64, 8192, 1)))
    v7 = reshape(reduce_sum(reduce_sum(v4, axes=(2,), keepdims=False), axes=(1,), keepdims=False), shape=())
    z = reshape(v7, shape=(1, 1))
    return z
"""
    check_pass(split_reductions, before, after, ctx=CPU)
    for kept in (
        "x: f32[1, 1000], y: f32[1000, 1]",
        "x: f32[2, 524288], y: f32[524288, 1]",
        "x: f16[1, 524288], y: f16[524288, 1]",
    ):
        assert not split_reductions(parse(f"def f({kept}):\n    z = matmul(x, y)\n    return z\n"), CPU)
    assert not split_reductions(parse(before), PassContext(numerics="strict"))


@pytest.mark.parametrize("ctx", [CPU, GPU])
def test_what_is_repeated_is_not_written_to_memory_for_its_sum(ctx: PassContext) -> None:
    for call in (
        "expand(x, shape=(1000000, 1000000))",
        "mul(expand(x, shape=(1000000, 1000000)), 2.0)",
        "reshape(expand(x, shape=(1000000, 1000000)), shape=(1000000000000,))",
    ):
        assert not split_reductions(
            parse(f"def f(x: f32[1, 1000000]):\n    y = reduce_sum({call})\n    return y\n"), ctx
        )


def test_what_a_cpu_reads_in_another_order_stays_in_one_kernel() -> None:
    text = "def f(x: f32[1000, 1000]):\n    y = reduce_sum(exp({x}))\n    return y\n"
    assert not split_reductions(parse(text.format(x="transpose(x, perm=(1, 0))")), CPU)
    assert split_reductions(parse(text.format(x="reshape(x, shape=(100, 10000))")), CPU)
