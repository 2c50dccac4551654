"""Products of quantized operands as products of bytes: the same integers for any types and zero points."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from support.quantized import RNG, inputs, rewritten, weights


def same(g: Graph) -> list[str]:
    """Check that the integers of a graph stay what they are; the ops that are left."""
    xs = inputs(g)
    want = run(g.copy(), xs)[0]
    ops = rewritten(g)
    np.testing.assert_array_equal(run(g, xs)[0], want)
    return ops


@pytest.mark.parametrize("k", [12, 13])
@pytest.mark.parametrize("w", ["u8", "i8"])
@pytest.mark.parametrize("x", ["u8", "i8"])
@pytest.mark.parametrize("zx", ["7", "zx"])
def test_matmul_integer(x: str, w: str, zx: str, k: int) -> None:
    text = f"""\
def g(x: {x}[3, 5, {k}], zx: {x}, *, w: {w}[{k}, 18], zw: {w}[18], c: {x}):
    a = sub(cast(x, to=i32), cast({"zx" if zx == "zx" else "c"}, to=i32))
    b = sub(cast(w, to=i32), cast(zw, to=i32))
    y = matmul(a, b)
    return y"""
    data = {"w": weights(w, k, 18), "zw": weights(w, 18), "c": weights(x, 1).reshape(())}
    ops = same(parse(text, data))
    assert "matmul" in ops and ops.count("cast") <= 4


@pytest.mark.parametrize("k", [12, 13])
@pytest.mark.parametrize("zx,zy", [("7", "c"), ("zx", "c"), ("c", "7"), ("c", "zy"), ("none", "zy"), ("zx", "none")])
@pytest.mark.parametrize("x,y", [("u8", "u8"), ("i8", "u8"), ("u8", "i8"), ("i8", "i8")])
def test_products_of_two_that_change(x: str, y: str, zx: str, zy: str, k: int) -> None:
    def of(v: str, zero: str) -> str:
        zero = f"cast({v}c, to=i32)" if zero == "c" else zero if zero == "7" else f"cast({zero}, to=i32)"
        return f"cast({v}, to=i32)" if "none" in zero else f"sub(cast({v}, to=i32), {zero})"

    text = f"""\
def g(x: {x}[2, 3, 17, {k}], y: {y}[3, {k}, 5], zx: {x}, zy: {y}, *, xc: {x}, yc: {y}):
    r = matmul({of("x", zx)}, {of("y", zy)})
    return r"""
    g = parse(text, {"xc": weights(x, 1).reshape(()), "yc": weights(y, 1).reshape(())})
    same(g)
    (product,) = (n for n in g.nodes() if n.op.name == "matmul")
    assert [v.type.dtype.name for v in product.inputs] == ["u8", "i8"]


@pytest.mark.parametrize("rows,inner", [(16, 8), (17, "K")])
def test_few_rows_or_an_unknown_inner_size_stay_as_they_are(rows: int, inner: int | str) -> None:
    text = f"""\
def g(x: u8[{rows}, {inner}], y: u8[{inner}, 5]):
    r = matmul(cast(x, to=i32), cast(y, to=i32))
    return r"""
    assert rewritten(parse(text)) == ["cast", "cast", "matmul"]


@pytest.mark.parametrize("group", [1, 12])
@pytest.mark.parametrize("pads", ["(0, 0, 0, 0)", "(1, 2, 0, 1)"])
@pytest.mark.parametrize("w", ["u8", "i8"])
@pytest.mark.parametrize("zx", ["zx", "c", "none"])
def test_conv_integer(zx: str, w: str, pads: str, group: int) -> None:
    a = "cast(x, to=i32)" if zx == "none" else f"sub(cast(x, to=i32), cast({zx}, to=i32))"
    text = f"""\
def g(x: u8[2, 12, 7, 6], zx: u8, *, w: {w}[24, {12 // group}, 3, 2], zw: {w}, c: u8, b: i32[24]):
    y = conv({a}, sub(cast(w, to=i32), cast(zw, to=i32)), b, strides=(2, 1), pads={pads}, group={group})
    return y"""
    bias = RNG.integers(-999, 999, 24).astype(np.int32)
    zero = np.array(121 if w == "u8" else 3).astype(np.uint8 if w == "u8" else np.int8)
    g = parse(text, {"w": weights(w, 24, 12 // group, 3, 2), "zw": zero, "c": np.uint8(9).reshape(()), "b": bias})
    same(g)
    of_bytes = [n for n in g.nodes() if n.op.name == "conv" and n.inputs[0].type.dtype.name == "u8"]
    assert len(of_bytes) == 1


@pytest.mark.parametrize("zx", ["zx", "c"])
@pytest.mark.parametrize("w", ["u8", "i8"])
def test_wide_groups_are_convolutions_of_their_own(w: str, zx: str) -> None:
    text = f"""\
def g(x: i8[2, 40, 5, 4], zx: i8, *, w: {w}[34, 20, 3, 2], zw: {w}, c: i8, b: i32[34]):
    a = sub(cast(x, to=i32), cast({zx}, to=i32))
    y = conv(a, sub(cast(w, to=i32), cast(zw, to=i32)), b, pads=(1, 0, 1, 1), group=2)
    return y"""
    bias = RNG.integers(-999, 999, 34).astype(np.int32)
    zero = np.array(121 if w == "u8" else 3).astype(np.uint8 if w == "u8" else np.int8)
    g = parse(text, {"w": weights(w, 34, 20, 3, 2), "zw": zero, "c": np.int8(9).reshape(()), "b": bias})
    assert same(g).count("concat") == 1
    of_bytes = [n for n in g.nodes() if n.op.name == "conv" and n.inputs[1].type.dtype.name == "i8"]
    assert [n.inputs[1].type.shape[:2] for n in of_bytes] == [(17, 20)] * 2
