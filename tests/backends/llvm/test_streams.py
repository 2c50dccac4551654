"""Large results are stored past the caches: which buffers, the code, and the same numbers wherever results begin."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dnnc.backends.llvm import streams
from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.runtime.frames import aligned_empty
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.loops.verify import verify_kernel

TARGET = parse_target("llvm")
AVX512 = parse_target("llvm -mcpu=skylake-avx512").feature_set
N = streams.LEAST // 4  # floats of the smallest result that is streamed


def kernel(n: int, body: str) -> str:
    return f"def k(x: f32[{n}], y: f32[{n}]):\n    for i in parallel({n // 16}):\n        {body}\n"


MAP = "y[16*i:+16] = x[16*i:+16] + 1.0"

CASES = {  # text -> the results that are streamed
    "whole vectors": (kernel(N, MAP), ["y"]),
    "small": (kernel(N // 2, MAP), []),
    "half a line": (kernel(N, "y[16*i:+8] = x[16*i:+8] + 1.0"), ["y"]),
    "too short vectors": (kernel(N, "y[16*i:+4] = x[16*i:+4] + 1.0"), []),
    "not at multiples": (kernel(N, "y[16*i + 1:+8] = x[16*i:+8] + 1.0"), []),
    "masked": (kernel(N, "y[16*i:+16:20 - i] = x[16*i:+16] + 1.0"), []),
    "read again": (kernel(N, "y[16*i:+16] = y[16*i:+16] + x[16*i:+16]"), []),
    "one of two": (
        f"def k(x: f32[{N}], y: f32[{N}], z: f32[{N // 16}]):\n    for i in parallel({N // 16}):\n        y[16*i:+16] "
        "= x[16*i:+16]\n        z[i] = x[16*i]\n",
        ["y"],
    ),
    "rows that begin anywhere": (
        f"def k(x: f32[{N // 16}, 20], y: f32[{N // 16}, 20]):\n    for i in parallel({N // 16}):\n        y[i, 0:+16] "
        "= x[i, 0:+16]\n", [],
    ),
    "open shape": (f"def k(n: dim[1, {N}], x: f32[n, 16], y: f32[n, 16]):\n    for i in parallel(n):\n        y[i, "
                   "0:+16] = x[i, 0:+16]\n", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_which_results(name: str) -> None:
    text, want = CASES[name]
    k = verify_kernel(parse_kernel(text))
    assert sorted(b.name for b in streams.streamed(k.entry, AVX512)) == want
    code = emit_kernel(k, "k", AVX512)
    assert ("!nontemporal" in code) == ("@k..past(" in code) == (f"@{streams.FENCE}()" in code) == bool(want)


def test_other_cpus_store_as_ever() -> None:
    k = parse_kernel(kernel(N, MAP))
    for features in (None, frozenset[str](), parse_target("llvm -mcpu=x86-64").feature_set, frozenset(("neon",))):
        assert "nontemporal" not in emit_kernel(k, "k", features)


def test_the_code() -> None:
    """One vector past the caches, then a fence: other threads read what a kernel wrote before it returned."""
    code = emit_kernel(parse_kernel(kernel(N, MAP)), "k", AVX512)
    past, through, entry = code.split("define ")[1:]
    assert (
        past.count("@llvm.prefetch.p0(") == 1 and f"i64 {streams.AHEAD}" in past and "prefetch" not in through + entry
    )
    assert (
        past.startswith("internal void @k..past(")
        and through.startswith("internal void @k..through(")
        and entry.startswith("void @k(")
    )
    assert past.count(", align 64, !nontemporal !{i32 1}") == 1 and past.rstrip().endswith(
        f"call void @{streams.FENCE}()\n  ret void\n}}"
    )
    assert "nontemporal" not in through and streams.FENCE not in through
    assert entry.index("ptrtoint ptr %y to i64") < entry.index("br i1 %.whole, label %.past, label %.through")


def test_what_is_read_ahead() -> None:
    """Large operands, a line at a time; none of a kernel that sums."""
    wide = (
        f"def k(x: f32[{N}], s: f32[64], y: f32[{N}]):\n    for i in parallel({N // 64}):\n"
        "        y[64*i:+64] = x[64*i:+64] * s[0:+64]\n"
    )
    assert emit_kernel(parse_kernel(wide), "k", AVX512).count("call void @llvm.prefetch.p0(") == 4
    summed = f"""\
def k(x: f32[{N}], y: f32[{N}]):
    for i in parallel({N // 64}):
        a: f32[16] @ register
        a[0:+16] = x[64*i:+16]
        for j in range(4):
            a[0:+16] = a[0:+16] + x[64*i + 16*j:+16]
        for j in range(4):
            y[64*i + 16*j:+16] = a[0:+16]
"""
    code = emit_kernel(parse_kernel(summed), "k", AVX512)
    assert "!nontemporal" in code and "prefetch" not in code


@pytest.mark.parametrize("shift", [0, 4, 32])
@pytest.mark.parametrize("threads", [1, 3])
def test_results_may_begin_anywhere(shift: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one result, or two of which one begins at no multiple of a line; nothing beside them is written."""
    monkeypatch.setattr(streams, "LEAST", 1 << 10)
    n = 4096
    text = f"""\
def k(x: f32[{n}], y: f32[{n}], z: f32[{n}]):
    for i in parallel({n // 16}):
        y[16*i:+16] = x[16*i:+16] * 2.0
        z[16*i:+16] = x[16*i:+16] - 1.0
"""
    k = verify_kernel(parse_kernel(text))
    assert len(streams.streamed(k.entry, AVX512)) == 2
    symbol = f"k_streams_{shift}_{threads}"
    code = emit_kernel(k, symbol, TARGET.feature_set)
    loaded = load_objects([compile_text(code, TARGET.cpu, TARGET.features)])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64)(loaded.address(symbol))
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    blocks = [aligned_empty(4 * n + 128).view(np.float32) for _ in range(2)]
    for b in blocks:
        b[:] = 7.0
    y, z = blocks[0][:n], blocks[1][shift // 4 : shift // 4 + n]
    for t in range(threads):
        call(x.ctypes.data, y.ctypes.data, z.ctypes.data, None, t, threads)
    np.testing.assert_array_equal(y, x * 2)
    np.testing.assert_array_equal(z, x - 1)
    assert (
        (blocks[0][n:] == 7.0).all()
        and (blocks[1][: shift // 4] == 7.0).all()
        and (blocks[1][shift // 4 + n :] == 7.0).all()
    )
