"""Chains from bytes to bytes as tables: what becomes one, and that the codes are those of the operators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.quantized import requantized
from support.quantized import CTX

RECODES = replace(CTX, facts=replace(CTX.facts, recodes_bytes=True))
CODES = np.arange(256, dtype=np.uint8).reshape(2, 128)
GATED = """\
def g(x: u8[2, 128], *, s: f32, t: f32, z: u8):
    a = dequantize_linear(x, s, z)
    q = quantize_linear(sigmoid(a), t, dtype=u8)
    y = quantize_linear(mul(a, dequantize_linear(q, t)), s, z, dtype=u8)
    return {results}"""
ERF = """\
def g(x: u8[2, 128], *, s: f32{shape}, t: f32, z: u8):
    a = dequantize_linear(x, s, axis=1)
    y = quantize_linear(erf(a), t, z, dtype=u8)
    return y"""
CHEAP = """\
def g(x: u8[2, 128], *, s: f32, t: f32, z: u8):
    y = quantize_linear(relu(dequantize_linear(x, s, z)), t, z, dtype=u8)
    return y"""
NUMBERS = {"s": np.float32(0.03), "t": np.float32(1 / 255), "z": np.uint8(121)}


def ops_after(g: Graph, ctx: PassContext = RECODES) -> list[str]:
    """The ops that are left, once the graph gives the same codes as before."""
    (want, *_), _ = run(g, [CODES]), requantized(g, ctx)
    (got, *_) = run(g, [CODES])
    np.testing.assert_array_equal(got, want)
    return [n.op.name for n in g.nodes()]


def test_codes_within_a_chain_are_part_of_it() -> None:
    assert ops_after(parse(GATED.format(results="y"), NUMBERS)) == ["recode"]


def test_codes_that_others_read_end_a_chain() -> None:
    g = parse(GATED.format(results="y, q"), NUMBERS)
    ops = ops_after(g)
    assert ops.count("recode") == 1 and "mul" in ops  # of q alone: y reads x and q
    assert g.outputs[1].node is not None and g.outputs[1].node.op.name == "recode"


@pytest.mark.parametrize("shape,tables", [("", 1), ("[128]", 0)])
def test_a_table_has_one_scale(shape: str, tables: int) -> None:
    scales = np.full(128, 0.03, np.float32) if shape else np.float32(0.03)
    assert ops_after(parse(ERF.format(shape=shape), {**NUMBERS, "s": scales})).count("recode") == tables


def test_a_few_operations_are_no_table() -> None:
    assert "recode" not in ops_after(parse(CHEAP, NUMBERS))


def test_strict_numerics_and_other_targets_have_no_tables() -> None:
    for ctx in (PassContext(RECODES.facts, "strict"), CTX):
        g = parse(GATED.format(results="y"), NUMBERS)
        requantized(g, ctx)
        assert "recode" not in [n.op.name for n in g.nodes()]
