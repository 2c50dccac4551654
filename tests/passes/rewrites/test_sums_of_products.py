"""Sums of products as one product: the graph, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites import sums_of_products as module
from dnnc.passes.rewrites.dce import dce

UNROLLED = """
def g(a: f32[4, 16], x: f32[4, 24], b: f32[4, 16], y: f32[4, 24], w: f32[16, 24], c: f32[16, 3], z: f32[3, 24]):
    p = matmul(transpose(a, perm=(1, 0)), x)
    q = matmul(transpose(b, perm=(1, 0)), y)
    r = matmul(c, z)
    return add(add(add(p, w), q), r)"""


def joined(text: str) -> Graph:
    """The graph after the pass, which gives the same numbers."""
    g = parse(text)
    arrays = [np.random.default_rng(k).standard_normal(v.type.shape) for k, v in enumerate(g.inputs)]
    want = run(g, arrays, "float64")
    module.sums_of_products(g, PassContext())
    dce(g, PassContext())
    for made, exact in zip(run(g, arrays, "float64"), want, strict=True):
        np.testing.assert_allclose(made, exact, rtol=1e-12, atol=1e-12)
    return g


def ops(g: Graph) -> list[str]:
    return [n.op.name for n in g.nodes()]


def test_operands_are_joined_along_the_inner_axis() -> None:
    g = joined(UNROLLED.replace(", c: f32[16, 3], z: f32[3, 24]", "").replace("    r = matmul(c, z)\n", "")
               .replace("add(add(add(p, w), q), r)", "add(add(p, w), q)"))  # fmt: skip
    assert ops(g) == ["concat", "transpose", "concat", "matmul", "add"]
    turned = next(n for n in g.nodes() if n.op.name == "transpose").inputs[0]
    assert turned is not None and turned.type.shape == (8, 16)


def test_factors_that_are_not_all_transposed_are_joined_as_they_are() -> None:
    g = joined(UNROLLED)
    assert ops(g).count("matmul") == 1
    product = next(n for n in g.nodes() if n.op.name == "matmul")
    assert product.inputs[0] is not None and product.inputs[0].type.shape == (16, 11)


@pytest.mark.parametrize(
    "old, new",
    [
        ("    return add", "    return p, q, r, add"),  # others read them
        ("f32[4,", "f32[400,"),  # their operands are larger than their sums
    ],
)
def test_what_is_not_joined(old: str, new: str) -> None:
    assert ops(joined(UNROLLED.replace(old, new))).count("matmul") == 3


def test_long_sums_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 20)
    given = ", ".join(f"a{k}: f32[4, 16], x{k}: f32[4, 24]" for k in range(12))
    terms = "\n".join(f"    p{k} = matmul(transpose(a{k}, perm=(1, 0)), x{k})" for k in range(12))
    total = "p0"
    for k in range(1, 12):
        total = f"add({total}, p{k})"
    g = joined(f"def g({given}):\n{terms}\n    return {total}")
    lengths = [n.inputs[0].type.shape[1] for n in g.nodes() if n.op.name == "matmul" and n.inputs[0] is not None]
    assert sorted(lengths) == [8, 20, 20]


def test_doubled_sums_take_time_that_grows_with_their_length() -> None:
    doubled = "\n".join(f"    s{k} = add(s{k - 1}, s{k - 1})" for k in range(1, 60))
    g = parse(f"def g(a: f32[16, 2], x: f32[2, 16]):\n    s0 = matmul(a, x)\n{doubled}\n    return s59")
    assert not module.sums_of_products(g, PassContext())


def test_constant_factors_stay_as_they_are() -> None:
    g = parse("def g(a: f32[16, 2], b: f32[16, 2], w: f32[2, 16], v: f32[2, 16]):\n"
              "    return add(matmul(a, w), matmul(b, v))")  # fmt: skip
    for v in g.inputs[2:]:
        g.replace_all_uses(v, Builder(g, next(iter(g.nodes()))).constant(np.ones((2, 16), np.float32)))
    assert not module.sums_of_products(g, PassContext())


def test_strict_numerics_keep_the_order_of_a_sum() -> None:
    assert not module.sums_of_products(parse(UNROLLED), PassContext(numerics="strict"))
