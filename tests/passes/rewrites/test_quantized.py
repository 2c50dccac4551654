"""Quantized models in bytes: the ops that are left, floats of dequantized operands within one step."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.rewrites.quantized import quantized
from support.quantized import CTX, RNG, inputs, rewritten, weights


def near(g: Graph) -> list[str]:
    """Check that all quantized results are within one step, 99.9 % of them equal; the ops that are left."""
    xs, before = inputs(g), g.copy()
    decompose(before, CTX)
    want = run(before, xs)[0].astype(np.int64)
    ops = rewritten(g)
    got = run(g, xs)[0].astype(np.int64)
    assert np.abs(got - want).max() <= 1
    assert (got != want).mean() <= 1e-3 or want.size < 1000
    assert want.min() < want.max()
    return ops


CONV = """\
def g(x: f32[1, 16, 12, 12], *, w: i8[32, 16, 3, 3], sw: f32[32], b: i32[32], sb: f32[32], s: f32, t: f32, z: {0}):
    q = quantize_linear(x, s, z, dtype={0})
    bias = dequantize_linear(b, sb, axis=0)
    c = conv(dequantize_linear(q, s, z), dequantize_linear(w, sw, axis=0), bias, pads=(1, 1, 1, 1))
    y = quantize_linear(relu(c), t, z, dtype={0})
    return y"""


def conv(dtype: str, zero: int) -> Graph:
    scales = RNG.uniform(0.001, 0.003, 32).astype(np.float32)
    data = {
        "w": weights("i8", 32, 16, 3, 3), "sw": scales, "b": RNG.integers(-2000, 2000, 32).astype(np.int32),
        "sb": np.float32(0.05) * scales, "s": np.float32(0.05), "t": np.float32(0.09),
        "z": np.array(zero, np.uint8 if dtype == "u8" else np.int8),
    }  # fmt: skip
    return parse(CONV.format(dtype), {k: np.asarray(v) for k, v in data.items()})


@pytest.mark.parametrize("dtype,zero", [("u8", 0), ("u8", 131), ("i8", 0), ("i8", -128)])
def test_convolution(dtype: str, zero: int) -> None:
    ops = near(conv(dtype, zero))
    assert "div" not in ops and "dequantize_linear" not in ops
    assert ("pad" in ops) == (zero + (128 if dtype == "i8" else 0) != 0)


def test_strict_numerics_keep_floats_and_other_targets_all() -> None:
    for ctx in (PassContext(CTX.facts, "strict"), PassContext()):
        g = conv("u8", 0)
        quantized(g, ctx)
        assert [n.op.name for n in g.nodes()].count("dequantize_linear") == 3


RESIDUAL = """\
def g(x: f32[8, 6], *, w: i8[6, 6], s: f32, t: f32, z: u8, u: f32[6], b: f32[6]):
    a = dequantize_linear(quantize_linear(x, s, z, dtype=u8), s, z)
    c = gemm(a, dequantize_linear(w, u, axis=0), b, trans_b=True, alpha=0.5, beta=2.0)
    d = dequantize_linear(quantize_linear(c, t, z, dtype=u8), t, z)
    y = quantize_linear(add(d, a), t, z, dtype=u8)
    return y"""
MOVED = """\
def g(x: u8[2, 8, 4, 6], *, s: f32, t: f32, z: u8, v: u8):
    a = dequantize_linear(x, s, z)
    p = max_pool(a, kernel=(2, 2), pads=(1, 0, 0, 0))
    r = reshape(transpose(p, perm=(0, 2, 3, 1)), shape=(2, 20, 8))
    c = concat(r, relu(r), axis=1)
    y = quantize_linear(c, {scale}, {zero}, dtype=u8)
    return y"""
NUMBERS = {
    "s": np.float32(0.04), "t": np.float32(0.07), "z": np.uint8(117), "v": np.uint8(4), "w": weights("i8", 6, 6),
    "u": RNG.uniform(0.005, 0.02, 6).astype(np.float32), "b": RNG.standard_normal(6).astype(np.float32),
}  # fmt: skip


def graph(text: str) -> Graph:
    return parse(text, {k: np.asarray(a) for k, a in NUMBERS.items()})


def test_products_and_residuals() -> None:
    ops = near(graph(RESIDUAL))
    assert ops.count("matmul") == 1 and not {"gemm", "div"} & set(ops)


def test_bytes_are_moved() -> None:
    g = graph(MOVED.format(scale="s", zero="z"))
    ops = near(g)
    assert ops[:3] == ["max_pool", "transpose", "reshape"] and ops[-1] == "concat"
    assert all(v.type.dtype.name == "u8" for n in g.nodes() if n.op.name in ("max_pool", "concat") for v in n.inputs)


AVERAGED = """\
def g(x: u8[2, 3, 9, 8], *, s: f32, t: f32, z: u8, v: u8):
    p = {of}
    y = quantize_linear(p, t, v, dtype=u8)
    return y"""
UP = "shape=(2, 3, 18, 16), coords=((1, 0, 1), (1, 0, 1), (2, -1, 4), (2, -1, 4))"


@pytest.mark.parametrize(
    "op",
    [
        "avg_pool({x}, kernel=(3, 2))",
        "avg_pool({x}, kernel=(3, 2), pads=(1, 0, 1, 1))",
        "avg_pool({x}, kernel=(3, 3), strides=(2, 1), pads=(1, 1, 1, 1), count_include_pad=True)",
        "resize({x}, " + UP + ")",
        "resize({x}, " + UP + ", mode='cubic')",
        "resize({x}, " + UP + ", mode='nearest')",
        "resize({x}, " + UP + ", mode='nearest', extrapolation=2.5)",
        "resize({x}, " + UP + ", extrapolation=2.5)",
    ],
)
def test_means_and_interpolations_of_codes(op: str) -> None:
    """They are within a step of those of numbers. Means and the nearest element are computed of codes."""
    g = graph(AVERAGED.format(of=op.format(x="dequantize_linear(x, s, z)")))
    near(g)
    (n,) = (n for n in g.nodes() if n.op.name in ("avg_pool", "resize"))
    of = n.inputs[0].node
    assert (of is not None and of.op.name == "dequantize_linear") == ("resize" in op and not op.endswith("'nearest')"))


BORDERS = """\
def g(x: u8[2, 4, 6, 8], *, s: f32, t: f32, z: u8, v: u8, i: i64[6]):
    p = {of}
    y = quantize_linear({between}(p), {scale}, dtype=u8)
    return y"""
MOVES = (
    "pad({x}, pads=(0, 0, 1, 2, 0, 0, 3, 1))",
    "pad({x}, pads=(0, 0, 1, 2, 0, 0, 3, 1), mode='reflect')",
    "pad({x}, pads=(0, 1, 0, 2, 0, 0, 3, 1), mode='edge')",
    "pad({x}, pads=(0, 0, 1, 2, 0, 0, 3, 1), mode='wrap')",
    "slice({x}, starts=(0, 1, 0, 2), steps=(1, 1, 2, 1), shape=(2, 2, 3, 4))",
    "expand({x}, shape=(4, 2, 4, 6, 8))",
    "resize({x}, shape=(2, 4, 12, 16), coords=((1, 0, 1), (1, 0, 1), (2, -1, 4), (2, -1, 4)), mode='nearest')",
    "trilu({x}, k=1, upper=True)",
    "gather({x}, i, axis=1)",
    "depth_to_space({x}, block=2, mode='DCR')",
    "space_to_depth({x}, block=2)",
)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("zero", [0, 117])
def test_borders_slices_and_copies_are_bytes(move: str, zero: int) -> None:
    """Behind dequantization, and ahead of quantization where the result is no smaller. Zeros have the code of zero."""
    numbers = {k: np.asarray(a) for k, a in (NUMBERS | {"z": np.uint8(zero), "v": np.uint8(zero)}).items()}
    numbers["i"] = np.array([3, 0, 1, 3, 3, 2])
    moved = zero == 0 or "trilu" not in move
    for of, between, scale in (
        (move.format(x="dequantize_linear(x, s, z)"), "relu", "t, v"),
        (move.format(x="sigmoid(dequantize_linear(x, s, z))"), "", "t, v"),
    ):
        g = parse(BORDERS.format(of=of, between=between, scale=scale), numbers)
        near(g)
        (n,) = (n for n in g.nodes() if n.op.name == move.split("(")[0])
        ahead = between or "slice" not in move
        assert (n.output.type.dtype.name == "u8") == bool(moved and ahead)


def test_other_scales_are_computed_ahead_of_a_concatenation() -> None:
    ops = near(graph(MOVED.format(scale="t", zero="v")))
    assert ops[-1] == "concat" and ops.count("clip") == 2


def test_without_zero_points() -> None:
    g = parse(
        "def g(x: u8[4, 6], *, s: f32, t: f32):\n    d = transpose(dequantize_linear(x, s), perm=(1, 0))\n"
        "    y = quantize_linear(d, t, dtype=u8)\n    return y",
        {"s": np.asarray(NUMBERS["s"]), "t": np.asarray(NUMBERS["t"])},
    )
    assert "quantize_linear" not in near(g)


@pytest.mark.parametrize("bias,in_floats", [(2000, True), (1 << 23, True), (1 << 24, False), ((1 << 31) - 1, False)])
def test_a_depthwise_sum_starts_at_its_bias_while_floats_are_exact(bias: int, in_floats: bool) -> None:
    """The integers of a convolution of images of one channel, and those of float32, are the same."""
    g = parse("def g(x: u8[1, 6, 9, 9]):\n    return sub(cast(x, to=i32), 117)")
    b = Builder(g)
    w = b.constant(RNG.integers(-128, 128, (6, 1, 3, 3)).astype(np.int32))
    biases = b.constant(RNG.permutation([bias, -bias, bias - 1, 0, 3, -3]).astype(np.int32))
    g.outputs = [b.conv(g.outputs[0], w, biases, pads=(1, 1, 1, 1), group=6)]
    xs = [RNG.integers(0, 256, (1, 6, 9, 9)).astype(np.uint8)]
    want = run(g, xs)[0]
    ops = rewritten(g)
    (conv,) = (n for n in g.nodes() if n.op.name == "conv")
    assert conv.output.type.dtype.name == "f32" and ("add" not in ops) == in_floats
    np.testing.assert_array_equal(run(g, xs, "as-is")[0], want)


WITH_BIAS = """\
def g(x: u8[1, 8, 5, 5], *, w: i8[4, 8, 3, 3], s: f32, t: f32[4], b: i32[4], r: f32[4], zb: i32[{n}]):
    y = conv(dequantize_linear(x, s), dequantize_linear(w, t, axis=0), dequantize_linear(b, r, zb, axis=0))
    return y"""


@pytest.mark.parametrize("zeros", [[0, 0, 0, 0], [7, -5, 0, 1 << 20], [(1 << 31) - 1, 0, 0, 0]])
def test_a_bias_in_integers_may_have_a_zero_point_for_each_channel(zeros: list[int]) -> None:
    t = np.asarray([0.5, 0.25, 1, 2], np.float32)
    data = {"w": weights("i8", 4, 8, 3, 3), "s": np.asarray(np.float32(0.04)), "t": t, "r": np.float32(0.04) * t}
    data |= {"b": np.asarray([-900, 80, 1 << 22, 3], np.int32), "zb": np.asarray(zeros, np.int32)}
    g = parse(WITH_BIAS.format(n=4), data)
    xs = [RNG.integers(0, 256, (1, 8, 5, 5)).astype(np.uint8)]
    want = run(g, xs, "as-is")[0]
    assert ("add" in rewritten(g)) == (abs(-900 - zeros[0]) > np.iinfo(np.int32).max)
    np.testing.assert_allclose(run(g, xs, "as-is")[0], want, rtol=1e-5, atol=1e-3)


def test_a_bias_that_would_overflow_is_added_in_floats() -> None:
    t = np.ones(4, np.float32)
    data = {"w": weights("i8", 4, 8, 3, 3), "s": np.asarray(np.float32(0.5)), "t": t, "r": np.float32(0.5) * t}
    for top in (1 << 30, (1 << 31) - 1):
        data |= {"b": np.asarray([top, -top, 5, 0], np.int32), "zb": np.zeros(4, np.int32)}
        g = parse(WITH_BIAS.format(n=4), data)
        xs = [RNG.integers(0, 256, (1, 8, 5, 5)).astype(np.uint8)]
        want = run(g, xs)[0]
        assert ("add" in rewritten(g)) == (top > 1 << 30)
        np.testing.assert_allclose(run(g, xs, "as-is")[0], want, rtol=1e-6, atol=1)


IN_FLOATS = """\
def g(x: u8[1, 16, 8, 8], *, w: i8[32, 16, 3, 3], s: f32, of_outputs: f32[32], of_inputs: f32[16]):
    d = dequantize_linear(x, s)
    y = conv(d, dequantize_linear(w, of_outputs, axis=0))
    z = conv(d, dequantize_linear(w, of_inputs, axis=1))
    return y, z"""


def test_products_that_stay_in_floats_are_named() -> None:
    data = {"w": weights("i8", 32, 16, 3, 3), "s": np.asarray(np.float32(0.04))}
    data |= {"of_outputs": np.ones(32, "f4"), "of_inputs": np.ones(16, "f4")}
    notes: list[str] = []
    for numerics in ("standard", "strict"):
        quantized(parse(IN_FLOATS, data), PassContext(CTX.facts, numerics, note=notes.append))
    assert notes == ["conv stays in floats: the scales are not those of the results"]


def test_halves_of_steps_are_rounded_as_by_division() -> None:
    """A scale that the call gives: x / s decides on which side of a half an element lies, not x * (1 / s)."""
    g = parse("def g(x: f32[2000], s: f32, z: u8):\n    return quantize_linear(x, s, z, dtype=u8)")
    s = np.float32(5) / np.float32(255)
    x = (RNG.integers(-150, 100, 2000).astype(np.float32) + np.float32(0.5)) * s
    assert "quantize_linear" not in rewritten(g)
    (got,) = run(g, [x, s, np.array(153, np.uint8)])
    np.testing.assert_array_equal(got, np.clip(np.rint(x / s) + 153, 0, 255).astype(np.uint8))


GROUPS = """\
def g(x: u8[1, 32, 6, 6], *, w: i8[64, 16, 3, 3], sw: f32[64], b: f32[64, 1, 1], s: f32, t: f32, z: u8):
    c = conv(dequantize_linear(x, s, z), dequantize_linear(w, sw, axis=0), group=2)
    y = quantize_linear({relu}(add(c, b)), t, z, dtype=u8)
    return y"""


@pytest.mark.parametrize("relu,joined", [("relu", "u8"), ("sigmoid", "f32")])
def test_groups_of_a_convolution_are_joined_as_bytes(relu: str, joined: str) -> None:
    data = {
        "w": weights("i8", 64, 16, 3, 3), "sw": RNG.uniform(0.001, 0.003, 64).astype(np.float32),
        "b": RNG.standard_normal((64, 1, 1)).astype(np.float32), "s": np.float32(0.05),
        "t": np.float32(0.09 if relu == "relu" else 0.01), "z": np.uint8(3),
    }  # fmt: skip
    g = parse(GROUPS.format(relu=relu), {k: np.asarray(v) for k, v in data.items()})
    assert near(g).count("conv") == 2
    (whole,) = (n for n in g.nodes() if n.op.name == "concat")
    assert whole.output.type.dtype.name == joined
