"""Weights of few bits stay as they are stored: which become `decode`, with which table, and which stay floats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.dtype import DType, dtype, f32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import TargetFacts
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.stored_weights import stored_weights

CONTEXT = PassContext(TargetFacts(decodes_weights=True))
RNG = np.random.default_rng(0)
ROWS, COLUMNS, BLOCK = 128, 48, 32


def quantized(kind: str, zero: Any, read: Any, rows: int = 3, axis: int = 0, block: int = BLOCK) -> Graph:
    """A graph that reads dequantized codes of a type [128, 48]; `zero`: None, a number, or "each" block's own."""
    g, t = Graph("g"), dtype(kind)
    b = Builder(g)
    x = g.add_input("x", TensorType(f32, (rows, ROWS)))
    codes = b.constant(numbers(t, (ROWS, COLUMNS)))
    shape = (ROWS // block, COLUMNS) if block else (COLUMNS if axis == 1 else ROWS,)
    scale = b.constant(RNG.random(shape, np.float32) + 0.5)
    points = numbers(t, shape) if zero == "each" else None if zero is None else np.full(shape, zero).astype(t.numpy)
    operands = [codes, scale, *([] if points is None else [b.constant(points)])]
    g.outputs = [read(b, x, b.dequantize_linear(*operands, axis=axis, block=block))]
    return g


def numbers(t: DType, shape: tuple[int, ...]) -> Any:
    if t.is_float:
        return RNG.standard_normal(shape).astype(t.numpy)
    low, high = t.range
    return RNG.integers(low, high + 1, shape).astype(t.numpy)


def product(b: Any, x: Any, w: Any) -> Any:
    return b.matmul(x, w)


CASES = [
    ("u4", 8), ("i4", None), ("u4", "each"), ("i4", "each"), ("u2", 1), ("i2", None), ("i8", None), ("u8", 128),
    ("u8", "each"), ("f4e2m1", None), ("f8e4m3fn", None), ("f8e5m2", None),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "zero"), CASES)
def test_products_decode_what_they_read(kind: str, zero: Any) -> None:
    g = quantized(kind, zero, product)
    x = RNG.standard_normal((3, ROWS)).astype(np.float32)
    want = run(g, [x])
    assert stored_weights(g, CONTEXT)
    verify(g)
    (n,) = [n for n in g.nodes() if n.op.name == "decode"]
    few, own = dtype(kind).bits <= 4, zero == "each"
    assert len(n.attrs["table"]) == (1 << dtype(kind).bits if few else 0)
    stored = "u" if few or own else "f" if kind == "f8e5m2" else "i"
    assert len(n.inputs) == 2 + own and n.inputs[0].type.dtype.kind == stored
    np.testing.assert_allclose(run(g, [x])[0], want[0], rtol=1e-5, atol=1e-4)
    compiled = dnnc.compile(g, target="llvm -threads=1")
    np.testing.assert_allclose(compiled(x), want[0], rtol=1e-5, atol=1e-3)


def test_numbers_that_are_none_stay_codes_of_floats() -> None:
    """The bits of E4M3's NaN would become those of a number in float16."""
    g = quantized("f8e4m3fn", None, product)
    codes = next(n.inputs[0] for n in g.nodes() if n.op.name == "dequantize_linear")
    g.constants[codes] = np.where(np.arange(COLUMNS) == 7, np.nan, g.constants[codes].astype(np.float32)).astype(
        dtype("f8e4m3fn").numpy
    )
    assert stored_weights(g, CONTEXT)
    (n,) = [n for n in g.nodes() if n.op.name == "decode"]
    assert n.inputs[0].type.dtype.is_float and not n.attrs["value"]


def test_scales_of_powers_of_two() -> None:
    """Microscaling formats: 4-bit floats in blocks of 32 with a power of two in 8 bits."""
    g = Graph("g")
    b = Builder(g)
    x = g.add_input("x", TensorType(f32, (3, ROWS)))
    powers = (2.0 ** RNG.integers(-9, 9, (ROWS // 32, COLUMNS))).astype(dtype("f8e8m0").numpy)
    codes = b.constant(numbers(dtype("f4e2m1"), (ROWS, COLUMNS)))
    w = b.dequantize_linear(codes, b.cast(b.constant(powers), to=f32), axis=0, block=32)
    g.outputs = [b.matmul(x, w)]
    given = [RNG.standard_normal((3, ROWS)).astype(np.float32)]
    want = run(g, given)
    assert stored_weights(g, CONTEXT)
    assert [n.inputs[0].type.dtype.name for n in g.nodes() if n.op.name == "decode"] == ["u4"]
    np.testing.assert_allclose(run(g, given)[0], want[0], rtol=1e-6)


def test_transposes_turn_codes_and_scales() -> None:
    def read(b: Any, x: Any, w: Any) -> Any:
        return b.matmul(b.matmul(x, w), b.transpose(w, perm=(1, 0)))

    g = quantized("u4", 3, read)
    assert stored_weights(g, CONTEXT)
    first, second = [n for n in g.nodes() if n.op.name == "decode"]
    found = {(n.attrs["axis"], n.inputs[0].type.shape) for n in (first, second)}
    assert found == {(0, (ROWS, COLUMNS)), (1, (COLUMNS, ROWS))}


def test_a_scale_for_each_column_is_one_block() -> None:
    g = quantized("i8", None, product, axis=1, block=0)
    assert stored_weights(g, CONTEXT)
    (n,) = [n for n in g.nodes() if n.op.name == "decode"]
    assert (n.attrs["axis"], n.attrs["block"], n.inputs[1].type.shape) == (0, ROWS, (1, COLUMNS))


OTHERS = {
    "added": lambda b, x, w: b.add(b.matmul(x, w), b.reduce_sum(w, axes=(0,))),
    "first factor": lambda b, x, w: b.matmul(b.transpose(w, perm=(1, 0)), b.transpose(x, perm=(1, 0))),
}


@pytest.mark.parametrize("read", OTHERS.values(), ids=OTHERS)
def test_what_others_read_becomes_floats(read: Any) -> None:
    assert not stored_weights(quantized("u4", 8, read), CONTEXT)
    assert not stored_weights(quantized("u4", 8, product), replace(CONTEXT, facts=TargetFacts()))
