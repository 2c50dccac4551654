"""Long running sums in parts: the graph, the numbers in both directions and with a rest, and those that stay one."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph.text import parse
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.split_scans import split_scans
from support.passes import check_pass


def test_parts() -> None:
    before = """
def f(x: i32[65536]):
    y = cumsum(x, axis=0)
    return y
"""
    after = """
def f(x: i32[65536]):
    v0 = reshape(x, shape=(1, 65536))
    v1 = reshape(v0, shape=(1, 64, 1024))
    v2 = reduce_sum(v1, axes=(2,), keepdims=True)
    v3 = cumsum(v2, axis=1, exclusive=True)
    v4 = cumsum(v1, axis=2)
    v5 = add(v4, v3)
    v6 = reshape(v5, shape=(1, 65536))
    y = reshape(v6, shape=(65536,))
    return y
"""
    check_pass(split_scans, before, after)


@pytest.mark.parametrize(
    "text",
    [
        "cumsum(x, axis=0)  # short\nx: f32[60000]",
        "cumsum(x, axis=1)  # many rows\nx: f32[8, 65536]",
        "cumsum(x, axis=0)  # columns side by side\nx: f32[65536, 3]",
        "cumsum(x, axis=0)  # rounded at each step\nx: f16[65536]",
        "cumprod(x, axis=0)  # infinity times nothing\nx: f32[65536]",
    ],
)
def test_stays_one(text: str) -> None:
    op, x = text.split("\n")
    g = parse(f"def f({x}):\n    y = {op.split('  #')[0]}\n    return y")
    assert not split_scans(g, PassContext())


def test_strict_numerics_keep_one_order_of_floats_and_gpus_their_scans() -> None:
    for dtype, ctx, split in (
        ("f32", PassContext(numerics="strict"), False),
        ("i32", PassContext(numerics="strict"), True),
        ("f32", PassContext(TargetFacts(serial_rows=False)), False),
    ):
        assert split_scans(parse(f"def f(x: {dtype}[65536]):\n    y = cumsum(x, axis=0)\n    return y"), ctx) == split


@pytest.mark.slow
def test_floats_are_nearer_to_the_sum() -> None:
    g = parse("def f(x: f32[200003]):\n    y = cumsum(x, axis=0)\n    return y")
    x = np.random.default_rng(0).standard_normal(200003).astype(np.float32)
    want = np.cumsum(x.astype(np.float64))
    parts, one = (
        np.abs(dnnc.compile(g, target="llvm", threads=2, numerics=n)(x) - want).max() for n in ("standard", "strict")
    )
    assert parts < one < 1e-5 * np.abs(x).sum()


@pytest.mark.parametrize("n", [65536, 65599])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_numbers(n: int, exclusive: bool, reverse: bool) -> None:
    g = parse(
        f"def f(x: i64[2, {n}]):\n    y = cumsum(x, axis=1, exclusive={exclusive}, reverse={reverse})\n    return y"
    )
    assert split_scans(g.copy(), PassContext())
    x = np.random.default_rng(n).integers(-99, 99, (2, n))
    want = np.cumsum(x[:, ::-1] if reverse else x, 1)
    want = want - (x[:, ::-1] if reverse else x) if exclusive else want
    got = dnnc.compile(g, target="llvm", threads=2, strict_compile=True)(x)
    np.testing.assert_array_equal(got, want[:, ::-1] if reverse else want)


def test_products_of_integers_wrap_alike() -> None:
    g = parse("def f(x: i32[65540]):\n    y = cumprod(x, axis=0)\n    return y")
    x = np.random.default_rng(0).choice(np.array([-1, 1, 3, 5], np.int32), 65540)
    np.testing.assert_array_equal(
        dnnc.compile(g, target="llvm", threads=2, strict_compile=True)(x), np.cumprod(x, dtype=np.int32)
    )
