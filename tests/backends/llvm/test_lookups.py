"""Numbers of a table on every CPU: the instruction where there is one, conversions, and memory; the same bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm.ceilings import bind
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.runtime.frames import aligned_empty
from dnnc.ir.dtype import f32, u8, u32
from dnnc.ir.expr import const, load
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel
from dnnc.ir.loops.text import parse_kernel
from dnnc.passes.lower.expand import expand_lookup, expand_recode

CPUS = [c for c in ("x86-64", "x86-64-v3", "x86-64-v4") if not parse_target(f"llvm -mcpu={c}").foreign]
NEWER = [c for c in ("icelake-server",) if not parse_target(f"llvm -mcpu={c}").foreign]
TABLES = {
    "unsigned": range(16),
    "signed": [*range(8), *range(-8, 0)],
    "moved": range(-3, 13),
    "few": [0.5, -1.0, 2.0, 7.0],
    "float": np.random.default_rng(0).standard_normal(16).astype(np.float32).tolist(),
}


def text(lanes: int, table: Any) -> str:
    numbers = ", ".join(repr(float(x)) for x in table)
    read = f"0:+{lanes}" if lanes > 1 else "0"
    code = f"shr(w[{read}], u32(4)) & u32(15)"
    return f"def k(w: u32[{lanes}], y: f32[{lanes}]):\n    y[{read}] = lookup({code}, {numbers})\n"


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("cpu", CPUS)
def test_numbers_of_a_table(cpu: str, table: Any) -> None:
    target = parse_target(f"llvm -mcpu={cpu} -threads=1")
    for lanes in (1, target.lanes):
        k = parse_kernel(text(lanes, table))
        w = np.random.default_rng(1).integers(0, 1 << 32, lanes, dtype=np.uint64).astype(np.uint32)
        want = np.array(table, np.float32)[(w >> 4 & 15) % len(table)]
        buffers = [aligned_empty(4 * lanes) for _ in range(2)]
        buffers[0][:] = w.view(np.uint8)
        bind(k, target, buffers)()
        np.testing.assert_array_equal(buffers[1].view(np.float32), want)
        y = np.zeros(lanes, np.float32)
        run_kernel(k, {"w": w, "y": y})
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("cpu", CPUS + NEWER)
def test_bytes_of_a_table(cpu: str) -> None:
    target = parse_target(f"llvm -mcpu={cpu} -threads=1")
    table = np.random.default_rng(0).integers(0, 256, 256).astype(np.uint8)
    words = ", ".join(map(str, table.view("<i8")))
    for lanes in (1, 4, 8, 16):
        read = f"{lanes}*i:+{lanes}" if lanes > 1 else "i"
        k = parse_kernel(
            f"def k(x: u8[256], y: u8[256]):\n    for i in range({256 // lanes}):\n"
            f"        y[{read}] = recode(x[{read}], {words})\n"
        )
        x, y = aligned_empty(256), aligned_empty(256)
        x[:] = np.random.default_rng(1).permutation(256)
        bind(k, target, [x, y])()
        np.testing.assert_array_equal(y, table[x])
        z = np.zeros(256, np.uint8)
        run_kernel(k, {"x": x, "y": z})
        np.testing.assert_array_equal(z, y)


@pytest.mark.parametrize(
    ("cpu", "name"),
    [("icelake-server", "vpermi2var.qi"), ("skylake-avx512", "vpermi2var.hi"), ("haswell", "gather.d.d")],
)
def test_instructions_that_take_bytes_of_a_table(cpu: str, name: str) -> None:
    lanes = parse_target(f"llvm -mcpu={cpu}").lanes
    words = ", ".join("0" * 32)
    text = f"def k(x: u8[{lanes}], y: u8[{lanes}]):\n    y[0:+{lanes}] = recode(x[0:+{lanes}], {words})\n"
    assert name in emit_kernel(parse_kernel(text), "k", parse_target(f"llvm -mcpu={cpu}").feature_set)


def test_bytes_of_a_table_by_choices() -> None:
    table = np.random.default_rng(0).integers(0, 256, 256).astype(np.uint8)
    x, y = Buffer("x", u8, (const(256),)), Buffer("y", u8, (const(256),))
    b = Builder()
    with b.loop("i", 256) as i:
        b.store(y, (i,), expand_recode(load(x, (i,)), *map(const, table.view("<i8").tolist())))
    found = np.zeros(256, np.uint8)
    run_kernel(Kernel((Func("k", (x, y), b.block()),)), {"x": np.arange(256, dtype=np.uint8), "y": found})
    np.testing.assert_array_equal(found, table)


def test_choices_by_bits_give_the_same_numbers() -> None:
    w, y = Buffer("w", u32, (const(16),)), Buffer("y", f32, (const(16),))
    b = Builder()
    with b.loop("i", 16) as i:
        b.store(y, (i,), expand_lookup(load(w, (i,)), *(const(x, f32) for x in TABLES["float"])))
    found = np.zeros(16, np.float32)
    run_kernel(Kernel((Func("k", (w, y), b.block()),)), {"w": np.arange(16, 32, dtype=np.uint32), "y": found})
    assert found.tolist() == TABLES["float"]


def test_one_instruction_takes_the_code_out_of_its_word() -> None:
    k = parse_kernel(text(16, TABLES["float"]))
    found = emit_kernel(k, "k", parse_target("llvm -mcpu=skylake-avx512").feature_set)
    assert "permvar.sf.512" in found and " and " not in found and "select" not in found


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize(("rows", "block", "bits"), [(1, 8, 4), (3, 136, 4), (9, 24, 4), (70, 34, 4), (2, 68, 2)])
def test_products_of_codes(cpu: str, rows: int, block: int, bits: int) -> None:
    rng, blocks = np.random.default_rng(rows), -(-136 // block)
    table = tuple(rng.integers(-4, 5, 1 << bits).astype(float).tolist())
    codes = rng.integers(0, 1 << bits, (136, 37)).astype(np.uint8)
    w = codes.astype(ml_dtypes.uint4 if bits == 4 else ml_dtypes.uint2)
    s = rng.integers(1, 4, (blocks, 37)).astype(np.float32)
    z = rng.integers(0, 4, (blocks, 37)).astype(np.uint8)
    g = parse(
        f"def g(x: f32[{rows}, 136], w: u{bits}[136, 37], s: f32[{blocks}, 37], z: u8[{blocks}, 37]):\n"
        f"    return matmul(x, decode(w, s, z, axis=0, block={block}, table={table}))"
    )
    for k, a in ((3, z), (2, s), (1, w)):  # constants in the place of inputs
        v = g.inputs.pop(k)
        g.replace_all_uses(v, g.constant(a, type=v.type))
    x = rng.integers(-3, 4, (rows, 136)).astype(np.float32)
    plain = (np.array(table)[codes] - z.repeat(block, 0)[:136]) * s.repeat(block, 0)[:136]
    f = dnnc.compile(g, target=f"llvm -mcpu={cpu} -threads=2")
    np.testing.assert_array_equal(f(x), x @ plain)
    assert "packed" in f.source("graph")
