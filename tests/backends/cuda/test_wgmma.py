"""Matrix products on Hopper's tensor cores: the kernels interpreted on small shapes, planted bugs found, compiled for
sm_90a without spills.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import wgmma
from dnnc.backends.cuda.templates.contraction.wgmma import build
from dnnc.backends.cuda.templates.contraction.wgmma_kernel import Product, Tiling
from dnnc.ir.dtype import DType, bf16, f16, f32
from dnnc.ir.errors import VerifyError
from dnnc.ir.expr import Expr, cast, const, maximum
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Buffer, Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel

Array = np.ndarray[Any, Any]
H200 = GpuTarget()


def gemm(m: int, n: int, k: int, t: Tiling, dtype: DType = f16, kn: bool = False, batch: int = 1) -> Kernel:
    """c = relu(a @ b + bias)."""
    z = (batch,) if batch > 1 else ()
    shapes = {"a": (*z, m, k), "b": (*z, *((k, n) if kn else (n, k))), "c": (*z, m, n)}
    a, b, c = (Buffer(name, dtype, tuple(map(const, s))) for name, s in shapes.items())
    bias = Buffer("bias", f32, (const(n),))

    def finish(z: Expr, row: Expr, col: Expr, lane: Expr, total: Expr) -> Expr:
        return cast(maximum(total + bias[col + lane], const(0.0, f32)), dtype)

    return verify_kernel(build(Product("gemm", (a, b, bias, c), a, b, c, batch, m, n, k, finish, kn), t))


def run(kernel: Kernel, dtype: DType = f16, kn: bool = False) -> float:
    """Interpret the kernel on drawn operands; the largest error, relative to the largest element."""
    rng = np.random.default_rng(0)
    shapes = {b.name: tuple(int(d.value) for d in b.shape) for b in kernel.entry.buffers}  # type: ignore[attr-defined]
    args = {
        name: rng.standard_normal(s).astype(np.float32 if name == "bias" else dtype.numpy) for name, s in shapes.items()
    }
    args["c"] = np.full(shapes["c"], np.nan).astype(dtype.numpy)
    run_kernel(kernel, args)
    a, b = args["a"].astype(np.float64), args["b"].astype(np.float64)
    want = np.maximum(a @ (b if kn else np.swapaxes(b, -1, -2)) + args["bias"], 0)
    return float(abs(args["c"].astype(np.float64) - want).max() / abs(want).max())


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "m, n, k, t, dtype, kn, batch",
    [
        (64, 128, 192, Tiling(64, 64, 2, 8, 1), f16, False, 1),
        (128, 64, 128, Tiling(128, 64, 3, 8, 132), bf16, False, 1),
        (100, 72, 200, Tiling(64, 128, 3, 8, 2), f16, True, 1),  # nothing is a multiple of a tile
        (24, 64, 72, Tiling(64, 64, 2, 8, 2), f16, False, 2),
        (40, 72, 256, Tiling(64, 64, 2, 8, 132, 2), f16, True, 1),  # two blocks share a tile's sum
        pytest.param(100, 72, 256, Tiling(128, 64, 2, 8, 132, 2), bf16, False, 2, marks=pytest.mark.slow),
        pytest.param(
            192, 392, 72, Tiling(128, 192, 2, 8, 1), bf16, True, 1, marks=pytest.mark.slow
        ),  # an odd number of stores a tile
        pytest.param(136, 264, 136, Tiling(128, 256, 4, 8, 2), f16, False, 1, marks=pytest.mark.slow),
        pytest.param(320, 64, 64, Tiling(64, 64, 2, 4, 3), f16, True, 2, marks=pytest.mark.slow),
    ],
)
def test_interpreted(m: int, n: int, k: int, t: Tiling, dtype: DType, kn: bool, batch: int) -> None:
    kernel = gemm(m, n, k, t, dtype, kn, batch)
    text = show_kernel(kernel)
    assert show_kernel(parse_kernel(text)) == text
    assert run(kernel, dtype, kn) < (2e-3 if dtype is f16 else 1e-2)


def test_an_element_more_is_not_stored() -> None:
    """What lies behind the result in memory stays: the box of the last store is cut off."""
    kernel = gemm(24, 72, 64, Tiling(64, 128, 2, 8, 2))
    c = np.full(24 * 72 + 100, 7, np.float16)
    rng = np.random.default_rng(0)
    args = {
        "a": rng.standard_normal((24, 64)).astype(np.float16),
        "b": rng.standard_normal((72, 64)).astype(np.float16),
    }
    run_kernel(kernel, {**args, "bias": np.zeros(72, np.float32), "c": c})
    assert (c[24 * 72 :] == 7).all() and not (c[: 24 * 72] == 7).all()


# --- planted bugs -----------------------------------------------------------------------------------------------------

# (what is replaced, by what, which occurrence, what is said)
BUGS = {
    "consumers do not wait": ("mbar_wait(addr(full[s]), parity)", "syncwarp()", 0, "race|in flight|nobody has written"),
    "the producer does not wait": (
        "mbar_wait(addr(empty[s_1]), -parity_1 + 1)",
        "syncwarp()",
        0,
        "in flight|asynchronously|race|deadlock",
    ),
    "a stage is released before its product is complete": (
        "wgmma_wait(1)",
        "wgmma_wait(2)",
        0,
        "race: thread 128 writes s[ab]|asynchronously",
    ),
    "nobody waits for the sums": (
        "wgmma_wait(0, addr(acc[0:+32]))",
        "wgmma_wait(0)",
        0,
        "acc is touched before wgmma_wait",
    ),
    "registers are not fenced": ("wgmma_fence()", "syncwarp()", 0, r"wgmma_fence\(\) is missing"),
    "the engine may see old shared memory": (
        "fence_async()",
        "syncwarp()",
        0,
        r"tma_store reads out.* without fence_async\(\)",
    ),
    "the store starts too early": (
        "named_barrier(w + 1, 128)",
        "syncwarp()",
        1,
        "race|nobody has written|without fence_async",
    ),
    "a store buffer is filled while it is read": (
        "bulk_wait_read(1)",
        "bulk_wait_read(3)",
        0,
        "still read asynchronously",
    ),
    "not all know that the buffer is free": (
        "named_barrier(w + 1, 128)",
        "syncwarp()",
        0,
        "race|still read asynchronously",
    ),
    "too few bytes": (
        "mbar_expect(addr(full[s_1]), 16384)",
        "mbar_expect(addr(full[s_1]), 8192)",
        0,
        "8192 bytes more than mbar_expect",
    ),
    "too many bytes": ("mbar_expect(addr(full[s_1]), 16384)", "mbar_expect(addr(full[s_1]), 16400)", 0, "deadlock"),
    "the engine does not know the mbarriers": ("mbar_fence()", "syncwarp()", 0, r"mbar_fence\(\) is missing"),
    "mbarriers are used before they are made": ("barrier()", "syncwarp()", 0, "race|never initialized"),
    "a part of a warp group": (
        "wgmma_commit()",
        "if lane < 16:\n                                wgmma_commit()",
        0,
        "part of a warp group",
    ),
}


SPLIT_BUGS = {
    "sums are read before they are there": ("cluster_barrier()", "barrier()", 0, "race|nobody has written"),
    "a block ends while its sums are read": ("cluster_barrier()", "barrier()", 1, "after the last peer"),
    "a part of the cluster": (
        "cluster_barrier()",
        "if part < 1:\n                    cluster_barrier()",
        0,
        "a part of the threads",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", SPLIT_BUGS)
def test_planted_bugs_of_clusters(bug: str) -> None:
    old, new, which, said = SPLIT_BUGS[bug]
    parts = show_kernel(gemm(64, 64, 128, Tiling(64, 64, 2, 8, 132, 2))).split(old)
    assert len(parts) == 3
    text = old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])
    with pytest.raises(VerifyError, match=said):
        run(parse_kernel(text))


@pytest.mark.family("cases")
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs(bug: str) -> None:
    old, new, which, said = BUGS[bug]
    text = show_kernel(gemm(64, 256, 320, Tiling(64, 64, 2, 8, 1)))
    lines = text.split("\n")
    at = [k for k, line in enumerate(lines) if line.strip() == old]
    assert len(at) > which
    lines[at[which]] = lines[at[which]].replace(old, new)
    with pytest.raises(VerifyError, match=said):
        run(parse_kernel("\n".join(lines)))


@pytest.mark.slow
def test_best_guesses() -> None:
    def first(m: int, n: int, k: int) -> tuple[int, int, int]:
        t = wgmma.tilings(1, m, n, k, H200)[0]
        return t.bm, t.bn, t.split

    assert first(4096, 4096, 4096) == (128, 256, 1)
    assert first(4096, 768, 3072) == (128, 192, 1)
    assert first(1024, 1024, 1024) == (64, 128, 1)
    assert first(128, 3072, 768) == (64, 64, 1)
    assert first(128, 768, 3072)[2] > 1  # a few tiles, each shared by blocks
    assert first(196, 256, 1024)[2] == 4  # 16 clusters of 8 blocks could not all run at once
    # many small sums: blocks share multiprocessors, so that ends and beginnings overlap
    few = wgmma.tilings(1, 401408, 96, 64, H200, 18, 16)[0]
    assert few.resident > 1 and few.bm == 64 and few.stages <= -(-401408 // 64 * 2 // few.blocks)
    assert few.resident * (few.shared_bytes + 1024) <= H200.shared_per_sm
    assert wgmma.tilings(1, 4096, 3072, 768, H200, 12)[0].resident == 1
    small = next(t for t in wgmma.tilings(1, 128, 768, 768, H200) if (t.bm, t.bn) == (64, 64))
    assert 2 * (small.shared_bytes + 1024) <= H200.shared_per_sm  # a block of the next kernel fits beside it
    for t in wgmma.tilings(1, 512, 512, 512, H200):
        assert t.stages >= 2 if t.split > 1 else 4
        assert launch_of(gemm(512, 512, 512, t)).shared_bytes <= H200.shared_bytes


# --- compiled ---------------------------------------------------------------------------------------------------------

SIZES = [
    (bm, bn, dtype, kn)
    for bm, bn in ((128, 256), (128, 192), (64, 128), (64, 64))
    for dtype, kn in ((f16, False), (bf16, True))
]


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "bm, bn, dtype, kn",
    [SIZES[0], *(pytest.param(*s, marks=pytest.mark.slow) for s in SIZES[1:])],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_compiles_without_spills(bm: int, bn: int, dtype: DType, kn: bool) -> None:
    t = next(t for t in wgmma.tilings(1, 1000, 1000, 1000, H200) if (t.bm, t.bn) == (bm, bn))
    c = compile_cuda(emit_kernel(gemm(1000, 1000, 1000, t, dtype, kn), "gemm", H200), "sm_90a")
    assert c.spills == 0 and c.local_bytes == 0 and c.registers <= (168 if bm == 128 else bn // 2 + wgmma.REGISTERS)
    assert "serialized" not in c.log and "ignored" not in c.log, (
        c.log
    )  # products stay in flight, registers change hands


@pytest.mark.slow
@pytest.mark.parametrize("bm, bn, split", [(64, 64, 8), (64, 128, 4), (128, 128, 2)])
def test_split_sums_compile_without_spills(bm: int, bn: int, split: int) -> None:
    t = next(t for t in wgmma.tilings(1, 64, 768, 3072, H200) if (t.bm, t.bn, t.split) == (bm, bn, split))
    kernel = gemm(64, 768, 3072, t, kn=True)
    assert launch_of(kernel).cluster == split
    c = compile_cuda(emit_kernel(kernel, "gemm", H200), "sm_90a")
    assert c.spills == 0 and c.local_bytes == 0 and "serialized" not in c.log, c.log
