"""The LLVM printer: short golden texts, promotion of register tiles, symbols, determinism."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import numpy as np
import pytest
from kernels import TARGET, graphs, program, symbolic
from native_check import one_node

from dnnc.backends.llvm.compile import ALLOWED_SYMBOLS, _prepare, compile_text, load_objects
from dnnc.backends.llvm.elf import undefined_symbols
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.spelling import literal
from dnnc.driver import compile
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph.text import parse as graph_parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Alloc, count_stmts, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import MAX_STATEMENTS, verify_kernel
from dnnc.ir.op import Trait
from dnnc.ir.ops import FAMILIES
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.decompose import decompose

GRAPHS = {**graphs(), **symbolic()}

KERNELS = {
    "tail": """
def k(x: f32[21], y: f32[21]):
    for i in range(3):
        y[8*i:+8:21 - 8*i] = x[8*i:+8:21 - 8*i] + 1.0
""",
    "tile": """
def k(a: f32[2, 9], b: f32[9, 8], c: f32[2, 8]):
    acc: f32[2, 8] @ register
    for i in unroll(2):
        acc[i, 0:+8] = 0.0
    for r in range(9):
        for i in unroll(2):
            acc[i, 0:+8] = fma(a[i, r], b[r, 0:+8], acc[i, 0:+8])
    for i in unroll(2):
        c[i, 0:+8] = acc[i, 0:+8]
""",
    "parallel": """
def k(N: dim[1, 64], x: f32[N, 4], y: f32[N, 4]):
    for i in parallel(N):
        y[i, 0:+4] = max(x[i, 0:+4], 0.0)
""",
    "gather": """
def k(x: f32[10], at: i64[6], y: f32[6]):
    for i in range(6):
        y[i] = x[guard(at[i], 0, 10)]
""",
    "branch": """
def k(N: dim[0, 64], x: f32[64], y: f32[64]):
    for i in range(64):
        if i < N:
            y[i] = x[i]
        else:
            y[i] = -x[i]
""",
}


@pytest.mark.parametrize("name", KERNELS)
def test_text(name: str, golden: Callable[..., None]) -> None:
    kernel = verify_kernel(parse_kernel(KERNELS[name]))
    text = emit_kernel(kernel, "k_golden", frozenset(("fma", "avx2", "sse4.1")))
    golden(text)
    assert not undefined_symbols(compile_text(text, "haswell", "+avx2,+fma"))


@pytest.mark.parametrize(
    ("index", "shuffled"),
    [
        ("lanes(8) // 4 * 4 + r", True),  # a whole row, whose lanes change places
        ("(lanes(8) * 3 + r) % 8", True),
        ("lanes(8) // 4 + 4 * j + 2 * r", True),  # part of a row from a place that is known at run time
        ("lanes(8) // 4 * 2 + 5 * j", False),  # a vector of four would reach past the row
        ("lanes(8) // 2 * j", False),
    ],
)
def test_gathers_from_one_vector_are_shuffles(index: str, shuffled: bool) -> None:
    kernel = parse_kernel(f"""
def k(x: f32[2, 8], y: f32[2, 2, 2, 8]):
    for i in range(2):
        for j in range(2):
            for r in unroll(2):
                y[i, j, r, 0:+8] = x[i, {index}]
""")
    ir = emit_kernel(kernel, "k_lanes", TARGET.feature_set)
    assert ("masked.gather" not in ir) == shuffled
    x = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
    found, want = np.zeros((2, 2, 2, 8), np.float32), np.zeros((2, 2, 2, 8), np.float32)
    loaded = load_objects([compile_text(ir, TARGET.cpu, TARGET.features)])
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64)(loaded.address("k_lanes"))(
        x.ctypes.data, found.ctypes.data, None, 0, 1
    )
    run_kernel(kernel, {"x": x, "y": want})
    np.testing.assert_array_equal(found, want)


@pytest.mark.family("choices")
@pytest.mark.parametrize("name", GRAPHS)
def test_register_tiles_become_registers(name: str) -> None:
    """After the pass list no alloca of a register buffer is left, and calls of libm alone leave the module."""
    for step in program(GRAPHS[name]).steps:
        text = emit_kernel(step.kernel, "k_x", TARGET.feature_set)
        _, module = _prepare(text, TARGET.cpu, TARGET.features, True)
        left = set(re.findall(r"%([\w]+)\.\d+ = alloca", str(module)))
        tiles = {
            s.buf.name for s in walk_stmts(step.kernel.entry.body) if isinstance(s, Alloc) and s.buf.space == "register"
        }
        assert not left & tiles, f"{step.kernel.name}: {sorted(left & tiles)} stay in memory\n{step.text}"
        obj = compile_text(text, TARGET.cpu, TARGET.features)
        assert undefined_symbols(obj) <= ALLOWED_SYMBOLS
        assert count_stmts(step.kernel) <= MAX_STATEMENTS


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("family", FAMILIES)
def test_scheduled_text_reads_back(family: str) -> None:
    """Every kernel of every sample prints, parses and verifies, and gives the same code again."""
    for op in FAMILIES[family]:
        for s in op.samples if op.host is None and Trait.HOST not in op.traits else ():
            g = one_node(op.name, s.inputs, **dict(s.attrs))
            decompose(g, PassContext())
            for step in program(g).steps:
                again = verify_kernel(parse_kernel(step.text))
                assert show_kernel(again) == step.text
                assert emit_kernel(again, "k_x") == emit_kernel(step.kernel, "k_x")


@pytest.mark.slow
def test_twice_the_same_bytes() -> None:
    for name in ("conv", "softmax", "gelu_add", "matmul_n"):
        first, second = (program({**graphs(), **symbolic()}[name]) for _ in range(2))
        for a, b in zip(first.steps, second.steps, strict=True):
            texts = [emit_kernel(s.kernel, "k_x", TARGET.feature_set) for s in (a, b)]
            assert texts[0] == texts[1]
            assert len({compile_text(t, TARGET.cpu, TARGET.features) for t in texts}) == 1


@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v2", "sandybridge", "haswell", "skylake-avx512", "sapphirerapids"])
def test_every_cpu_compiles_without_library_calls(cpu: str) -> None:
    """No fmaf, floorf or __truncsfhf2: what a CPU lacks is spelled out."""
    target = parse_target(f"llvm -mcpu={cpu}")
    text = """
def k(x: f32[16], h: f16[16], y: f32[16], z: f16[16], w: bf16[16]):
    for i in range(2):
        y[8*i:+8] = fma(floor(x[8*i:+8]), rint(x[8*i:+8]), cast_f32(h[8*i:+8]))
        z[8*i:+8] = cast_f16(x[8*i:+8])
        w[8*i:+8] = cast_bf16(trunc(x[8*i:+8]))
"""
    obj = compile_text(
        emit_kernel(verify_kernel(parse_kernel(text)), "k_x", target.feature_set), target.cpu, target.features
    )
    assert undefined_symbols(obj) == set()


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "value,dtype,text",
    [
        (1.5, "f32", "0x3FF8000000000000"), (float("nan"), "f32", "0x7FF8000000000000"),
        (-0.0, "f64", "0x8000000000000000"),
        (1.5, "f16", "0xH3E00"), (1e6, "f16", "0xH7C00"), (1.5, "bf16", "16320"), (448.0, "f8e4m3fn", "126"),
        (-1, "i8", "-1"), (255, "u8", "-1"),
        (2**63, "u64", str(-(2**63))), (True, "bool", "true"),
    ],
)  # fmt: skip
def test_literals(value: float, dtype: str, text: str) -> None:
    assert literal(value, BY_NAME[dtype]) == text


def test_a_zero_vector_is_zero_bits() -> None:
    for t in ("f32", "f16", "bf16", "i8", "bool", "f8e5m2"):
        assert literal(0, BY_NAME[t], 4) == "zeroinitializer"
    assert literal(-0.0, BY_NAME["f32"], 4) != "zeroinitializer" != literal(-0.0, BY_NAME["f16"], 4)


TILE = """\
def k(a: f32[24, 8], b: f32[8, 16], y: f32[48, 16]):
    for p in range(2):
        acc: f32[24, 1, 16] @ register
        for im in unroll(24):
            acc[im, 0, 0:+16] = 0.0
        for r in range(8):
            for im_1 in unroll(24):
                acc[im_1, 0, 0:+16] = fma(a[im_1, r], b[r, 0:+16], acc[im_1, 0, 0:+16])
        for im_2 in unroll(24):
            y[24*p + im_2, 0:+16] = VALUE
"""
MANY = "fma(fma(fma(fma(fma(fma(t, 0.1, 0.2), t, 0.3), t, 0.4), t, 0.5), t, 0.6), t, 0.7)".replace(
    "t", "acc[im_2, 0, 0:+16]"
)


def test_a_tile_is_set_aside_for_an_epilogue_that_needs_its_registers() -> None:
    code = emit_kernel(parse_kernel(TILE.replace("VALUE", MANY)), "k")
    assert code.count("asm sideeffect") == 2 and "@constants.k = private unnamed_addr constant [7 x float]" in code
    assert "asm" not in emit_kernel(parse_kernel(TILE.replace("VALUE", "max(acc[im_2, 0, 0:+16], 0.0)")), "k")
    small = TILE.replace("VALUE", MANY).replace("24", "8").replace("48", "16")
    assert "asm" not in emit_kernel(parse_kernel(small), "k")


def test_the_table_of_an_epilogue_without_constants() -> None:
    number = MANY.replace("acc[im_2, 0, 0:+16]", "a[im_2, 0]")  # those of scalars are written where they are
    code = emit_kernel(parse_kernel(TILE.replace("VALUE", f"acc[im_2, 0, 0:+16] * {number}")), "k")
    assert (
        code.count("@constants.k") == 2 and "@constants.k = private unnamed_addr constant [1 x float]" in code
    )  # named, so there must be one


def test_a_tile_set_aside_has_its_values() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((24, 8), (8, 16)))
    found, want = np.zeros((48, 16), np.float32), np.zeros((48, 16), np.float32)
    kernel = parse_kernel(TILE.replace("VALUE", MANY))
    target = parse_target("llvm")
    loaded = load_objects(
        [compile_text(emit_kernel(kernel, "k_tile", target.feature_set), target.cpu, target.features)]
    )
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64)(loaded.address("k_tile"))
    call(a.ctypes.data, b.ctypes.data, found.ctypes.data, None, 0, 1)
    run_kernel(kernel, {"a": a, "b": b, "y": want})
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


@pytest.mark.family("cases")
@pytest.mark.parametrize("n", [17, 33, 18, 31])
@pytest.mark.parametrize("t", ["bf16", "f16", "f32", "i8"])
def test_one_lane_is_stored_alone(t: str, n: int) -> None:
    """A store with one lane of numbers that were made smaller: LLVM would write twice their bytes. The gate finds what
    is written outside.
    """
    g = graph_parse(
        f"def f(x: {t}[{n}]):\n    y = {'layer_norm(x, x, x, axis=0)' if t != 'i8' else 'add(x, x)'}\n    return y\n"
    )
    compile(g, cache=False, threads=1, verify="kernels")
