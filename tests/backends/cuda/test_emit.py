"""Operator IR as CUDA C++: the text, how it is launched, and that NVRTC takes every operation with every type, without
local memory.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import STORED, each, indices, operations, trigonometry

from dnnc.backends.cuda.emit import emit_kernel, emit_module, kernel_number, launch_of
from dnnc.backends.cuda.hopper import VALUES
from dnnc.backends.cuda.nvrtc import OPTIONS, compile_cuda, library
from dnnc.backends.cuda.spelling import literal
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.runtime.device import Launch
from dnnc.ir.dtype import BY_NAME, f32, f64
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import Expr, Op, const, walk
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.loops.stmt import Buffer, Builder, Eval, Func, Kernel, exprs, walk_stmts
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.loops.verify import verify_kernel

H200 = GpuTarget()


def functions(text: str) -> str:
    """The kernel without the prelude."""
    kernel = emit_kernel(verify_kernel(parse_kernel(text)), "k_test", H200)
    return kernel[kernel.index('extern "C"') :]


def ptx(text: str) -> str:
    nvrtc = library()
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-arch=compute_90a", *(o for o in OPTIONS if "ptxas" not in o)))
        found = nvrtc.getPTX(program)
        return found if isinstance(found, str) else bytes(found).decode()
    finally:
        nvrtc.destroyProgram(program)


MAP = """
def scale(a: f16[64, 20] @ strides(24, 1), idx: i64[64], s: f32, y: f32[64, 20], f: bool[64]):
    for b in block.x(2):
        for t in thread.x(32):
            i: i64 = 32*b + t
            row: i64 = guard(idx[i], 0, 64)
            for j in unroll(3):
                v: f32x8 = cast_f32(a[row, 8*j:+8:-8*j + 20]) * s
                y[i, 8*j:+8:-8*j + 20] = max(v, 0.0)
            f[i] = y[i, 3] < 2.0
"""


def test_a_map() -> None:
    assert functions(MAP) == (
        'extern "C" __global__ void __launch_bounds__(32) '
        "k_test(const f16* __restrict__ a, const i64* __restrict__ idx, f32 s, f32* __restrict__ y, u8* __restrict__ "
        "f, i32* status) {\n"
        "  const int b = blockIdx.x;\n"
        "  const int t = threadIdx.x;\n"
        "  const int i = 32*b + t;\n"
        f"  const int row = guard(idx[i], 0, 64, status, {kernel_number('k_test')});\n"
        "  UNROLL for (int j = 0; j < 3; ++j) {\n"
        "    const V<f32, 8> v = from_f16(ld_first<8, 8>(a + 24*row + 8*j, 20 - 8*j)) * splat<f32, 8>(s);\n"
        "    st_first<4>(y + (20*i + 8*j), maximum(v, splat<f32, 8>(0.0f)), 20 - 8*j);\n"
        "  }\n"
        "  f[i] = y[20*i + 3] < 2.0f;\n"
        "}\n"
    )


REDUCE = """
def total(x: f32[3, 100], y: f32[3]):
    for r in block.y(3):
        s: f32[4] @ shared
        for w in warp(4):
            for l in lane(32):
                acc: f32[1] @ register
                acc[0] = 0.0
                for i in range(w, 4):
                    if 32*i + l < 100:
                        acc[0] = acc[0] + x[r, 32*i + l]
                for o in unroll(5):
                    acc[0] = acc[0] + shfl_xor(acc[0], shl(1, o))
                if l == 0:
                    s[w] = acc[0]
                barrier()
                if w == 0:
                    if l == 0:
                        y[r] = hsum(s[0:+4])
"""


def test_a_reduction() -> None:
    text = functions(REDUCE)
    for line in (
        "const int r = blockIdx.y;", "__shared__ __align__(128) f32 s[4];", "const int w = threadIdx.x / 32;",
        "const int l = threadIdx.x % 32;",
        "f32 acc[1];", "for (int i = w; i < 4; ++i) {", "acc[0] = acc[0] + shfl_xor(acc[0], shl(1LL, (i64)o));",
        "__syncthreads();",
        "y[r] = hsum(ld<4, 4>(s));",
    ):  # fmt: skip
        assert line in text
    assert launch_of(parse_kernel(REDUCE)) == Launch((1, 3, 1), (128, 1, 1))


def test_loops_that_share_a_name_and_names_that_are_taken() -> None:
    text = functions("""
def k(int: f32[4, 8], add: f32[4, 8], V: f32[8]):
    for i in range(4):
        for min in range(8):
            status: f32 = int[i, min] + V[min]
            add[i, min] = status
        for i in range(8):
            add[0, i] = V[i]
""")
    assert (
        "k_test(const f32* __restrict__ int_, f32* __restrict__ add_, const f32* __restrict__ V_, i32* status)" in text
    )
    assert "for (int min_ = 0; min_ < 8; ++min_)" in text and "const f32 status_ = int_[8*i + min_] + V_[min_];" in text
    assert "for (int i_1 = 0; i_1 < 8; ++i_1) {\n      add_[i_1] = V_[i_1];" in text


def test_a_value_used_twice_by_each_next_one_is_printed_once() -> None:
    x, y = (Buffer(n, f32, (const(4),)) for n in "xy")
    b = Builder()
    e: Expr = x[0]
    for _ in range(60):
        e = e * e + 1.0
    b.store(y, (0,), e)
    text = emit_kernel(Kernel((Func("k", (x, y), b.block()),)), "k_test", H200)
    assert len(text) < 12_000


@pytest.mark.slow
def test_dynamic_shared_memory_starts_where_48_kilobytes_end() -> None:
    text = """
def k(x: f32[8192], y: f32[8192]):
    for b in block.x(1):
        s: f32[8192] @ shared
        r: f16[{n}, 64] @ shared.swizzle8
        for t in thread.x(64):
            s[t] = x[t]
            r[0, t] = cast_f16(x[t])
            barrier()
            y[t] = s[63 - t] + cast_f32(r[0, 63 - t])
"""
    small, large = (parse_kernel(text.format(n=n)) for n in (128, 256))
    assert (
        launch_of(small).shared_bytes == 0
        and compile_cuda(emit_kernel(small, "k_test", H200), "sm_90a").shared_bytes == 48 * 1024
    )
    assert launch_of(large).shared_bytes == 64 * 1024
    c = emit_kernel(large, "k_test", H200)
    assert "f16* const r = (f16*)(shared_ + 0);" in c and "f32* const s = (f32*)(shared_ + 32768);" in c
    assert compile_cuda(c, "sm_90a").shared_bytes == 0


@pytest.mark.slow
def test_a_kernel_that_overlaps_its_predecessor_reads_nothing_early() -> None:
    text = """
def k(x: f32[32], y: f32[32]):
    for b in block.x(1):
        for t in thread.x(32):
            pdl_wait()
            y[t] = x[t]
            pdl_launch()
"""
    code = emit_kernel(parse_kernel(text), "k_test", H200)
    assert "griddepcontrol.wait" in ptx(code) and compile_cuda(code, "sm_80").registers
    assert (
        "k_test(f32* x, f32* y, i32* status)" in code
    )  # `const ... __restrict__` would let the compiler read x before pdl_wait


def test_a_called_function() -> None:
    text = emit_kernel(parse_kernel("""
def twice(x: f32[4], n: dim[0, 4], y: f32[4]):
    y[0:+4:n] = x[0:+4:n] * 2.0

def k(x: f32[8, 4], y: f32[8, 4]):
    for i in range(8):
        twice(addr(x[i, 0]), 3, addr(y[i, 0]))
"""), "k_test", H200)  # fmt: skip
    assert (
        "FN void k_test_twice(const f32* x, i64 n, f32* y, i32* status) {\n  st_first<1>(y, ld_first<1, 4>(x, (int)n) "
        "* splat<f32, 4>(2.0f), (int)n);" in text
    )
    assert "k_test_twice(x + 4*i, 3LL, y + 4*i, status);" in text
    assert "const f32* __restrict__ x, f32* __restrict__ y" in text
    compile_cuda(text, "sm_80")


# --- launching --------------------------------------------------------------------------------------------------------

GRID = "def k(y: f32[64]):\n"
LAUNCHES = [
    ("    y[0] = 1.0\n", Launch((1, 1, 1), (1, 1, 1))),
    ("    for i in range(64):\n        y[i] = 1.0\n", Launch((1, 1, 1), (1, 1, 1))),
    (
        "    for b in block.x(0):\n        for t in thread.x(64):\n            y[t] = 1.0\n",
        Launch((0, 1, 1), (64, 1, 1)),
    ),
    (
        "    for a in block.z(2):\n        for b in block.x(3):\n            for t in thread.x(4):\n                "
        "y[t] = 1.0\n",
        Launch((3, 1, 2), (4, 1, 1)),
    ),
    (
        "    for t in thread.x(8):\n        y[t] = 1.0\n    for u in thread.x(8):\n        y[u] = 2.0\n",
        Launch((1, 1, 1), (8, 1, 1)),
    ),
]


@pytest.mark.parametrize("body,want", LAUNCHES, ids=range(len(LAUNCHES)))
def test_launch(body: str, want: Launch) -> None:
    assert launch_of(parse_kernel(GRID + body)) == want


BAD = [
    (
        "    for b in block.x(2):\n        y[b] = 1.0\n    for c in block.x(2):\n        y[c] = 1.0\n",
        "must be the only statement",
    ),
    ("    for i in range(2):\n        for b in block.x(2):\n            y[b] = 1.0\n", "inside of another statement"),
    ("    for b in block.x(2):\n        for c in block.x(2):\n            y[c] = 1.0\n", "two block.x loops"),
    ("    for b in block.y(70000):\n        y[0] = 1.0\n", "70000 blocks along block.y; there may be 65535"),
    ("    for t in thread.x(2048):\n        y[0] = 1.0\n", "2048 threads in a block; there may be 1024"),
    (
        "    for t in thread.x(8):\n        y[t] = 1.0\n    for t in thread.x(16):\n        y[t] = 1.0\n",
        "a thread loop has 8 threads, others 16",
    ),
    (
        "    for b in block.x(1):\n        y[0] = 1.0\n        for t in thread.x(8):\n            y[t] = 1.0\n",
        "all threads of a block would write y",
    ),
    ("    for i in vector(8):\n        y[i] = 1.0\n", "a vector loop has no CUDA form"),
    ("    s: f16[8] @ shared\n    cp_async(addr(s[1:+8]), addr(s[0:+8]))\n", "4, 8 or 16 aligned bytes"),
]


@pytest.mark.family("cases")
@pytest.mark.parametrize("body,message", BAD, ids=[m for _, m in BAD])
def test_what_has_no_form_is_told(body: str, message: str) -> None:
    with pytest.raises(InternalError, match=re.escape(message)):
        emit_kernel(parse_kernel(GRID + body), "k_test", H200)


def test_a_symbol_of_the_prelude_is_refused() -> None:
    with pytest.raises(InternalError, match="a name of the prelude"):
        emit_kernel(parse_kernel(GRID + "    y[0] = 1.0\n"), "splat", H200)


# --- constants --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_f32_constants_are_exact(x: float) -> None:
    text = literal(x, f32)
    assert text.endswith("f") and np.float32(text[:-1]).view(np.uint32) == np.float32(x).view(np.uint32)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_f64_constants_are_exact(x: float) -> None:
    assert np.float64(literal(x, f64)).view(np.uint64) == np.float64(x).view(np.uint64)


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "v,t,text",
    [(-(1 << 31), "i32", "(-2147483647 - 1)"), (-(1 << 63), "i64", "(-9223372036854775807LL - 1)"), (3, "u32", "3u"),
    (3, "u8", "u8(3)"),
     (1.5, "f16", "f16{0x3e00}"), (1.5, "bf16", "bf16{0x3fc0}"), (True, "bool", "true"),
     (float("-inf"), "f32", "-__int_as_float(0x7f800000)")],
    ids=str,
)  # fmt: skip
def test_constants(v: Any, t: str, text: str) -> None:
    assert literal(v, BY_NAME[t]) == text


# --- every operation with every type ----------------------------------------------------------------------------------

MATRIX = """
def matrix_{t}(a: {t}[64, 64], c: f32[64, 64]):
    for b in block.x(1):
        s: {t}[64, 64] @ shared.swizzle8
        for w in warp(1):
            for l in lane(32):
                for i in range(16):
                    cp_async(addr(s[4*i + l // 8, 8*(l % 8):+8]), addr(a[4*i + l // 8, 8*(l % 8):+8]), 8 - i)
                cp_async_commit()
                cp_async_wait(0)
                barrier()
                syncwarp()
                x: {t}x8 = ldmatrix_x4(addr(s[l % 16, 8*(l // 16):+8]))
                y: {t}[8] @ register
                y[0:+8] = ldmatrix_x4_trans(addr(s[16 + l % 16, 8*(l // 16):+8]))
                acc: f32[2, 4] @ register
                for j in unroll(2):
                    acc[j, 0:+4] = 0.0
                    acc[j, 0:+4] = mma_m16n8k16(acc[j, 0:+4], x, y[4*j:+4])
                    acc[j, 0:+4] = mma_sp_m16n8k32(acc[j, 0:+4], x, y[0:+8], u32(17476), i64(1))
                    acc[j, 0:+4] = mma_m16n8k8(acc[j, 0:+4], c[l, 0:+4], c[l, 4:+2])
                    acc[j, 0:+4] = mma_m16n8k8_cut(acc[j, 0:+4], c[l, 0:+4], c[l, 4:+2])
                    c[l, 4*j:+4] = acc[j, 0:+4]
                pdl_launch()
"""
CODES = """
def codes(a: u32[32], q: i8[32, 8], z: u8[32], y: f16[32, 2, 8], b: bf16[32, 2, 8], t: f32[32], w: u8[32, 4]):
    for block in block.x(1):
        for l in thread.x(32):
            y[l, 0, 0:+8] = halves_f16(a[l], cast_i32(z[l]))
            y[l, 1, 0:+8] = f16_words(words(halves_f16(i8_words(words(q[l, 0:+8])), i32(3))))
            b[l, 0, 0:+8] = bf16_words(words(halves_bf16(a[l], i32(8))))
            b[l, 1, 0:+8] = halves_bf16(q[l, 0:+8], cast_i32(z[l]))
            w[l, 0:+4] = u8_words(words(z[0:+4]))
            t[l] = lookup(a[l], 0.5, -1.0, 2.0, 4.0)
"""
BYTES = """
def bytes_{t}(a: {t}[16, 32], b: i8[16, 32], c: i32[32, 5]):
    for block in block.x(1):
        s: {t}[16, 32] @ shared
        r: i8[16, 32] @ shared
        for w in warp(1):
            for l in lane(32):
                cp_async(addr(s[l % 16, 16*(l // 16):+16]), addr(a[l % 16, 16*(l // 16):+16]))
                cp_async(addr(r[l % 16, 16*(l // 16):+16]), addr(b[l % 16, 16*(l // 16):+16]))
                cp_async_commit()
                cp_async_wait(0)
                barrier()
                x: {t}x16 = ldmatrix_x4(addr(s[l % 16, 16*(l // 16):+16]))
                y: i8[16] @ register
                y[0:+16] = ldmatrix_x4(addr(r[l % 8 + 8*(l // 16), 16*(l // 8 % 2):+16]))
                acc: i32[4] @ register
                acc[0:+4] = mma_m16n8k32(c[l, 0:+4], x, y[0:+8])
                c[l, 0:+4] = acc[0:+4]
                c[l, 4] = dot4(c[l, 4], a[l // 2, 16*(l % 2):+4], b[l // 2, 16*(l % 2):+4])
"""
HOPPER = {*VALUES, *(n for n, i in TABLE.items() if i.effect)} - {
    "barrier",
    "syncwarp",
    "prefetch",
    "cp_async",
    "cp_async_commit",
    "cp_async_wait",
}


def compiled_without_local_memory(kernels: list[Kernel], arch: str) -> None:
    text = emit_module([(k, f"k_{k.name}") for k in kernels], GpuTarget(arch))
    c = compile_cuda(text, arch)
    assert c.spills == 0 and c.local_bytes == 0, c.log


@pytest.mark.slow
def test_trigonometry_compiles() -> None:
    text = emit_module([(trigonometry(t), f"k_{t}") for t in (f32, f64)], H200)
    assert compile_cuda(text, "sm_90a").spills == 0


@pytest.mark.family("cases")
@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_operation_compiles(lanes: int, arch: str) -> None:
    compiled_without_local_memory([*(operations(t, lanes) for t in STORED), indices()], arch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f32", "i8", "f8e5m2"])
def test_operations_of_a_type_compile(name: str) -> None:
    compiled_without_local_memory([operations(BY_NAME[name], 4), indices()], "sm_90a")


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_warp_matrices_compile_without_local_memory(t: str) -> None:
    compiled_without_local_memory([parse_kernel(MATRIX.format(t=t))], "sm_90a")


def test_codes_come_apart_without_local_memory() -> None:
    kernel = verify_kernel(parse_kernel(CODES))
    compiled_without_local_memory([kernel], "sm_80")
    rng = np.random.default_rng(0)
    a, z = rng.integers(0, 1 << 32, 32, dtype=np.uint32), rng.integers(0, 16, 32).astype(np.uint8)
    q = rng.integers(-128, 128, (32, 8)).astype(np.int8)
    y, b, t = np.zeros((32, 2, 8), np.float16), np.zeros((32, 2, 8), BY_NAME["bf16"].numpy), np.zeros(32, np.float32)
    w = np.zeros((32, 4), np.uint8)
    run_kernel(kernel, {"a": a, "q": q, "z": z, "y": y, "b": b, "t": t, "w": w})
    apart = np.stack([a >> np.uint32(4 * k) & 15 for k in (0, 4, 1, 5, 2, 6, 3, 7)], 1).astype(np.float32)
    assert (y[:, 0] == apart - z[:, None]).all() and (y[:, 1] == q - 3.0).all()
    assert (b[:, 0].astype(np.float32) == apart - 8).all() and (t == np.array([0.5, -1, 2, 4])[a % 4]).all()
    assert (w == z[:4]).all()


@pytest.mark.parametrize("t", ["u8", "i8"])
def test_matrices_of_bytes_compile_without_local_memory(t: str) -> None:
    kernel = verify_kernel(parse_kernel(BYTES.format(t=t)))
    compiled_without_local_memory([kernel], "sm_80")
    dtype = np.uint8 if t == "u8" else np.int8
    a, b = np.arange(512).astype(dtype).reshape(16, 32), np.arange(512, 0, -1).astype(np.int8).reshape(16, 32)
    c = np.zeros((32, 5), np.int32)
    run_kernel(kernel, {"a": a, "b": b, "c": c})
    want, rows = a.astype(int) @ b[:8].astype(int).T, np.arange(32)
    assert (c[:, :4].reshape(8, 4, 2, 2) == want.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3)).all()
    fours = [(int(16 * (k % 2)), k // 2) for k in rows]
    assert c[:, 4].tolist() == [int(a[r, k : k + 4].astype(int) @ b[r, k : k + 4].astype(int)) for k, r in fours]


# which CPUs spell, and GPUs have no need of, or expand
CPU_ALONE = {
    "dot2", "estimate", "interleave_high", "interleave_low", "lookup", "piece", "recode", "scale", "sparse_rows",
    "tile_dot", "tile_load", "tile_store", "tile_zero", "trusted",
}  # fmt: skip


def test_every_intrinsic_is_in_one_of_these_kernels_or_of_hopper() -> None:
    seen: set[str] = set()
    for k in [*each(), parse_kernel(MATRIX.format(t="f16")), parse_kernel(BYTES.format(t="u8")), parse_kernel(CODES)]:
        for s in walk_stmts(k.entry.body):
            seen |= {s.name} if isinstance(s, Eval) else set()
            seen |= {x.name for e in exprs(s) for x in walk(e) if isinstance(x, Op)}
    assert set(TABLE) - seen <= HOPPER | CPU_ALONE


def test_integer_kernels_are_of_the_width_of_their_bounds() -> None:
    k = parse_kernel(
        "def k(y: f32[70000, 70000]):\n    for i in range(70000):\n        for j in range(9):\n            y[i, j] = "
        "1.0\n"
    )
    assert "y[70000LL*i + (i64)j] = 1.0f;" in emit_kernel(k, "k_test", H200)


# --- what the compiler makes of it ------------------------------------------------------------------------------------

ACCESS = """
def k(x: {t}[64, {n}], y: {t}[64, {n}]):
    for r in block.x(64):
        s: {t}[{n}] @ shared
        for t in thread.x(64):
            s[{w}*t:+{w}] = x[r, {w}*t:+{w}]
            barrier()
            y[r, {w}*t:+{w}] = s[{last} - {w}*t:+{w}]
"""


@pytest.mark.parametrize("t", ["f32", "f16", "u8"])
def test_accesses_are_16_bytes_wide_and_read_only_where_they_can_be(t: str) -> None:
    w = 16 // BY_NAME[t].bytes
    text = ptx(emit_kernel(parse_kernel(ACCESS.format(t=t, n=64 * w, w=w, last=63 * w)), "k_test", H200))
    found = re.findall(r"\b((?:ld|st)\.(?:global|shared|local|param)\S*)", text)
    assert [a for a in found if "param" not in a] == [
        "ld.global.nc.v4.u32",
        "st.shared.v4.u32",
        "ld.shared.v4.u32",
        "st.global.v4.u32",
    ]


def test_half_floats_are_converted_in_pairs() -> None:
    k = "def k(x: f32[64], y: f16[64]):\n    for t in thread.x(8):\n        y[8*t:+8] = cast_f16(x[8*t:+8])\n"
    text = ptx(emit_kernel(parse_kernel(k), "k_test", H200))
    assert text.count("cvt.rn.f16x2.f32") == 4 and "st.global.v4.u32" in text


def test_nothing_contracts_but_what_is_written() -> None:
    k = "def k(x: f32[64], y: f32[64]):\n    for t in thread.x(64):\n        y[t] = {}\n"
    plain, fused = (
        ptx(emit_kernel(parse_kernel(k.format(e)), "k_test", H200)) for e in ("x[t]*x[t] + 1.5", "fma(x[t], x[t], 1.5)")
    )
    assert "fma.rn" not in plain and "mul.rn.f32" in plain and "fma.rn.f32" in fused
