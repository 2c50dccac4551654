"""Sums of products of bytes have the same bits on every CPU: the instruction, its expansions and the interpreter.

Those of bfloat16 are rounded once or twice more or less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels import TARGET

import dnnc
from dnnc.backends.llvm.ceilings import bind
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import X86_CPUS, parse_target
from dnnc.backends.runtime.frames import aligned_empty
from dnnc.ir.dtype import BY_NAME, bf16
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel

Array = np.ndarray[Any, Any]
NAMES = ("x86-64", "x86-64-v3", "x86-64-v4", "cascadelake", "alderlake")
CPUS = [c for c in NAMES if not parse_target(f"llvm -mcpu={c}").foreign]


def extremes(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Bytes, half of them the largest or the smallest: sums of two products that 16 bits do not hold."""
    rng, t = np.random.default_rng(seed), BY_NAME[dtype]
    low, high = t.range
    x = rng.integers(low, high + 1, shape)
    return np.where(rng.random(shape) < 0.5, np.where(rng.random(shape) < 0.5, low, high), x).astype(t.numpy)


@pytest.mark.parametrize("dtype", ["u8", "i8"])
@pytest.mark.parametrize("quads", [1, 16])
@pytest.mark.parametrize("cpu", CPUS)
def test_bits_of_an_instruction(cpu: str, quads: int, dtype: str) -> None:
    target = parse_target(f"llvm -mcpu={cpu} -threads=1")
    n = target.lanes
    k = parse_kernel(f"""\
def k(a: {dtype}[{4 * n}], b: i8[{4 * n}], y: i32[{n}]):
    y[0:+{n}] = dot4(y[0:+{n}], a[0:+{4 if quads == 1 else 4 * n}], b[0:+{4 * n}])
""")
    a, b = extremes((4 * n,), dtype), extremes((4 * n,), "i8", 1)
    start = np.random.default_rng(2).integers(-(1 << 31), 1 << 31, n).astype(np.int32)
    bytes_ = np.tile(a[:4], n) if quads == 1 else a
    want = (start + (bytes_.astype(np.int64) * b).reshape(n, 4).sum(1)).astype(np.int32)
    buffers = []
    for x in (a, b, start):
        buffers.append(aligned_empty(x.nbytes))
        buffers[-1][:] = x.view(np.uint8)
    bind(k, target, buffers)()
    np.testing.assert_array_equal(buffers[2].view(np.int32), want)
    interpreted = start.copy()
    run_kernel(k, {"a": a, "b": b, "y": interpreted})
    np.testing.assert_array_equal(interpreted, want)


def test_the_instruction_is_used_where_it_is_there() -> None:
    k = parse_kernel("def k(a: u8[4], b: i8[64], y: i32[16]):\n    y[0:+16] = dot4(y[0:+16], a[0:+4], b[0:+64])\n")
    assert "vpdpbusd.512" in emit_kernel(k, "k", parse_target("llvm -mcpu=znver4").feature_set)
    without = emit_kernel(k, "k", parse_target("llvm -mcpu=skylake-avx512").feature_set)
    assert "vpdpbusd" not in without and "pmaddw" in without and "pmaddub" not in without


CASES = {
    "product": ("matmul(x, w, out_dtype=i32)", (7, 36), (36, 40)),
    "columns": ("matmul(x, w, out_dtype=i32)", (5, 8), (8, 3)),
    "row": ("matmul(x, w, out_dtype=i32)", (1, 64), (64, 50)),
    "batch": ("matmul(x, w, out_dtype=i32)", (2, 3, 12), (12, 17)),
    "conv": ("conv(x, w, out_dtype=i32, pads=(1, 1, 1, 1))", (1, 24, 9, 10), (20, 24, 3, 3)),
    "image": ("conv(x, w, out_dtype=i32, strides=(2, 2), pads=(1, 0, 2, 1))", (2, 3, 11, 9), (16, 3, 3, 3)),
    "pointwise": ("conv(x, w, out_dtype=i32)", (1, 40, 5, 5), (6, 40, 1, 1)),
    "images": ("conv(x, w, out_dtype=i32, pads=(1, 1, 1, 1))", (9, 24, 2, 2), (20, 24, 3, 3)),
    "steps": ("conv(x, w, out_dtype=i32, dilations=(2,), pads=(2, 2))", (1, 16, 30), (32, 16, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_contractions(case: str) -> None:
    text, x, w = CASES[case]
    shapes = [", ".join(map(str, s)) for s in (x, w)]
    source = f"def g(x: u8[{shapes[0]}], *, w: i8[{shapes[1]}]):\n    y = {text}\n    return y"
    a, b = extremes(x, "u8"), extremes(w, "i8", 1)
    want = run(parse(source, {"w": b}), [a])[0]
    for cpu in (TARGET.cpu, "x86-64-v3", "x86-64"):
        f = dnnc.compile(parse(source, {"w": b}), target=f"llvm -mcpu={cpu}", cache=False, strict_compile=True)
        np.testing.assert_array_equal(np.asarray(f(a)), want)
        assert any("contraction" in str(k.choice) for p in f.report.programs for k in p.kernels)


PAIRS_CPU = "llvm -mcpu=znver4 -mattr=-sse4a"  # adds up pairs as fast as products; CPUs of another maker can run it


@pytest.mark.parametrize("pairs", [1, 16])
@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v4", *([] if parse_target(PAIRS_CPU).foreign else [PAIRS_CPU[11:]])])
def test_sums_of_two_bfloat16_products(cpu: str, pairs: int) -> None:
    target = parse_target(f"llvm -mcpu={cpu} -threads=1")
    n = target.lanes
    k = parse_kernel(f"""\
def k(a: bf16[{2 * n}], b: bf16[{2 * n}], y: f32[{n}]):
    y[0:+{n}] = y[0:+{n}] + dot2(a[0:+{2 if pairs == 1 else 2 * n}], b[0:+{2 * n}])
""")
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(2 * n).astype(bf16.numpy) for _ in range(2))
    start = rng.standard_normal(n).astype(np.float32)
    left = np.tile(a[:2], n) if pairs == 1 else a
    terms = left.astype(np.float64) * b.astype(np.float64)
    want, size = start + terms.reshape(n, 2).sum(1), np.abs(start) + np.abs(terms).reshape(n, 2).sum(1)
    buffers = []
    for x in (a, b, start):
        buffers.append(aligned_empty(x.nbytes))
        buffers[-1][:] = x.view(np.uint8)
    bind(k, target, buffers)()
    interpreted = start.copy()
    run_kernel(k, {"a": a, "b": b, "y": interpreted})
    for got in (buffers[2].view(np.float32), interpreted):
        assert (np.abs(got - want) <= 3 * 2**-24 * size).all()


def test_bfloat16_pairs_are_one_instruction_where_it_is_fast() -> None:
    k = parse_kernel("def k(a: bf16[2], b: bf16[32], y: f32[16]):\n    y[0:+16] = y[0:+16] + dot2(a[0:+2], b[0:+32])\n")
    assert "dpbf16ps.512" in emit_kernel(k, "k", parse_target("llvm -mcpu=znver4").feature_set)
    assert "dpbf16ps" not in emit_kernel(k, "k", parse_target("llvm -mcpu=cascadelake").feature_set)
    fast = {c for c in X86_CPUS if (rates := parse_target(f"llvm -mcpu={c}").rates).pairs >= rates.fma}
    assert fast == {"znver4", "znver5"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_contractions_of_bfloat16(case: str) -> None:
    text, x, w = CASES[case]
    text = text.replace("out_dtype=i32, ", "").replace(", out_dtype=i32", "")
    shapes = [", ".join(map(str, s)) for s in (x, w)]
    source = f"def g(x: bf16[{shapes[0]}], *, w: bf16[{shapes[1]}]):\n    y = {text}\n    return y"
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(s).astype(bf16.numpy) for s in (x, w))
    want, size = (
        run(parse(source.replace("bf16", "f64"), {"w": f(b.astype(np.float64))}), [f(a.astype(np.float64))])[0]
        for f in (np.asarray, np.abs)
    )
    terms = np.prod(w[1:]) if "conv" in text else w[-2]
    for target in ("llvm", "llvm -mcpu=x86-64-v3", *([] if parse_target(PAIRS_CPU).foreign else [PAIRS_CPU])):
        f = dnnc.compile(parse(source, {"w": b}), target=target, cache=False, strict_compile=True)
        kernels = "".join(show_kernel(k.kernel) for k in f.programs[0].scheduled.kernels)
        assert ("dot2" in kernels) == (parse_target(target).rates.pairs >= 1 and case not in ("image", "pointwise"))
        got = np.asarray(f(a)).astype(np.float64)
        assert (np.abs(got - want) <= 2**-8 * np.abs(want) + terms * 2**-24 * size).all()


NET = """\
def g(x: f32[1, 3, 20, 20], *, w: i8[24, 3, 3, 3], u: f32[24], v: i8[24, 1, 3, 3], s: f32, t: f32, z: u8, m: i8[24, 9],
      n: i8[4, 24, 1, 1], o: i8[24, 4, 1, 1]):
    q = dequantize_linear(quantize_linear(x, s, z, dtype=u8), s, z)
    c = relu(conv(q, dequantize_linear(w, u, axis=0), pads=(1, 1, 1, 1), strides=(2, 2)))
    d = dequantize_linear(quantize_linear(c, t, z, dtype=u8), t, z)
    e = dequantize_linear(quantize_linear(conv(d, dequantize_linear(n, t)), t, z, dtype=u8), t, z)
    h = dequantize_linear(quantize_linear(conv(e, dequantize_linear(o, t)), t, z, dtype=u8), t, z)
    k = conv(h, dequantize_linear(v, t), pads=(1, 1, 1, 1), group=24)
    f = dequantize_linear(quantize_linear(add(k, d), s, z, dtype=u8), s, z)
    p = dequantize_linear(quantize_linear(reduce_mean(f, axes=(2, 3), keepdims=False), s, z, dtype=u8), s, z)
    y = matmul(p, dequantize_linear(m, t))
    return y"""


@pytest.mark.slow
def test_a_net_has_the_same_bits_without_vectors_of_avx() -> None:
    rng = np.random.default_rng(0)
    data = {
        "w": extremes((24, 3, 3, 3), "i8"), "v": extremes((24, 1, 3, 3), "i8", 1), "m": extremes((24, 9), "i8", 2),
        "u": rng.uniform(0.001, 0.01, 24), "s": np.array(0.03), "t": np.array(0.04), "z": np.array(99, np.uint8),
        "n": extremes((4, 24, 1, 1), "i8", 3), "o": extremes((24, 4, 1, 1), "i8", 4),
    }  # fmt: skip
    data = {k: a.astype(np.float32) if a.dtype.kind == "f" else a for k, a in data.items()}
    x = rng.standard_normal((1, 3, 20, 20)).astype(np.float32)
    texts = [f"llvm -mcpu={cpu}" for cpu in (TARGET.cpu, "x86-64")]
    first, got = (
        np.asarray(dnnc.compile(parse(NET, data), target=t, cache=False, strict_compile=True)(x)) for t in texts
    )
    assert np.ptp(first) > 0
    np.testing.assert_array_equal(got.view(np.int32), first.view(np.int32))
