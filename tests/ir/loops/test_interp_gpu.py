"""Kernels of GPUs interpreted: blocks, shared memory, tensor cores and asynchronous copies, and their races."""

from __future__ import annotations

import numpy as np

from support.kernels import f32, fails, run

rng = np.random.default_rng(0)

SOFTMAX = """
def softmax(x: f16[3, 64], y: f16[3, 64]):
    for row in block.x(3):
        part: f32[2] @ shared
        for w in warp(2):
            for l in lane(32):
                v: f32 = cast_f32(x[row, 32*w + l])
                r: f32[1] @ register
                r[0] = v
                for o in unroll(5):
                    r[0] = max(r[0], shfl_xor(r[0], shl(1, o)))
                if l == 0:
                    part[w] = r[0]
                barrier()
                m: f32 = max(part[0], part[1])
                BETWEEN
                r[0] = exp(v - m)
                e: f32 = r[0]
                for o in unroll(5):
                    r[0] = r[0] + shfl_xor(r[0], shl(1, o))
                if l == 0:
                    part[w] = r[0]
                AFTER
                y[row, 32*w + l] = cast_f16(e/(part[0] + part[1]))
"""


def softmax(between: str, after: str) -> str:
    return SOFTMAX.replace("BETWEEN", between).replace("AFTER", after).replace("                \n", "")


def test_softmax_over_two_warps() -> None:
    x, y = rng.standard_normal((3, 64)).astype(np.float16), np.zeros((3, 64), np.float16)
    run(softmax("barrier()", "barrier()"), x=x, y=y)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), atol=1e-4)
    fails(
        softmax("", "barrier()"),
        "race: thread 0 writes part[0] read by thread 1 with no barrier between",
        "part[w] = r[0]",
        x=x,
        y=y,
    )
    fails(softmax("barrier()", ""), "reads part[0] written by thread 0", "y[row, ", x=x, y=y)
    fails(
        softmax("barrier()", "if l < 5:\n                    barrier()"), "reached by a part of the threads", x=x, y=y
    )
    fails(
        softmax("if l < 5:\n                    r[0] = shfl_xor(r[0], 1)", "barrier()"), "by a part of a warp", x=x, y=y
    )


def test_blocks_may_not_meet() -> None:
    text = """
def k(y: f32[64]):
    for b in block.x(3):
        for t in thread.x(32):
            y[16*b + t] = 1.0
"""
    fails(text, "one block writes y[16], which another one writes", y=f32(64))


def test_shared_memory_must_be_written_before_it_is_read() -> None:
    text = """
def k(y: f32[64]):
    for t in thread.x(64):
        s: f32[64] @ shared
        if t < 63:
            s[t] = 1.0
        barrier()
        y[t] = s[t]
"""
    fails(text, "read of s[63], which nobody has written", "y[t] = s[t]", y=f32(64))


def test_threads_of_the_cpu_as_one_block() -> None:
    text = """
def k(x: f32[8, 10], s: f32[8], y: f32[1]):
    for t in thread.x(8):
        s[t] = 0.0
        for i in range(10):
            s[t] = s[t] + x[t, i]
        barrier()
        if t == 0:
            y[0] = 0.0
            for u in range(8):
                y[0] = y[0] + s[u]
"""
    x, s, y = f32(8, 10), f32(8), f32(1)
    run(text, x=x, s=s, y=y)
    np.testing.assert_allclose(y[0], x.sum(), rtol=1e-5)
    fails(text.replace("        barrier()\n", ""), "thread 0 reads s[1] written by thread 1", x=x, s=s, y=y)


MMA = """
def gemm(A: f16[64, 128], B: f16[32, 128], C: f32[64, 32]):
    for bm in block.y(2):
        for bn in block.x(2):
            sa: f16[3, 32, 32] @ shared.swizzle4
            sb: f16[3, 16, 32] @ shared.swizzle4
            for w in warp(2):
                for l in lane(32):
                    t: i64 = 32*w + l
                    acc: f32[2, 4] @ register
                    for j in unroll(2):
                        acc[j, 0:+4] = 0.0
                    for p in unroll(2):
                        for r in unroll(2):
                            cp_async(addr(sa[p, 16*r + t // 4, 8*(t % 4):+8]),
                                addr(A[32*bm + 16*r + t // 4, 32*p + 8*(t % 4):+8]))
                        cp_async(addr(sb[p, t // 4, 8*(t % 4):+8]), addr(B[16*bn + t // 4, 32*p + 8*(t % 4):+8]))
                        cp_async_commit()
                    for kt in range(4):
                        cp_async_wait(1)
                        barrier()
                        if kt + 2 < 4:
                            for r in unroll(2):
                                cp_async(addr(sa[(kt + 2) % 3, 16*r + t // 4, 8*(t % 4):+8]),
                                    addr(A[32*bm + 16*r + t // 4, 32*kt + 64 + 8*(t % 4):+8]))
                            cp_async(addr(sb[(kt + 2) % 3, t // 4, 8*(t % 4):+8]),
                                addr(B[16*bn + t // 4, 32*kt + 64 + 8*(t % 4):+8]))
                        cp_async_commit()
                        for kk in unroll(2):
                            a: f16x8 = ldmatrix_x4(addr(sa[kt % 3, 16*w + l % 16, 16*kk + 8*(l // 16):+8]))
                            b: f16[8] @ register
                            b[0:+8] = ldmatrix_x4(addr(sb[kt % 3, l % 8 + 8*(l // 16), 16*kk + 8*(l // 8 % 2):+8]))
                            for j in unroll(2):
                                acc[j, 0:+4] = mma_m16n8k16(acc[j, 0:+4], a, b[4*j:+4])
                    for j in unroll(2):
                        for h in unroll(2):
                            C[32*bm + 16*w + 8*h + l // 4, 16*bn + 8*j + 2*(l % 4):+2] = acc[j, 2*h:+2]
"""


def test_tensor_core_gemm_with_asynchronous_copies() -> None:
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((64, 128), (32, 128)))
    c = f32(64, 32)
    run(MMA, A=a, B=b, C=c)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-3)
    fails(
        MMA.replace("cp_async_wait(1)", "cp_async_wait(2)"),
        "while an asynchronous copy into it is in flight",
        "ldmatrix_x4(",
        A=a,
        B=b,
        C=c,
    )
    fails(
        MMA.replace("                        barrier()\n", ""), "race: thread", "with no barrier between", A=a, B=b, C=c
    )
    fails(MMA.replace("(kt + 2) % 3, 16*r", "(kt + 1) % 3, 16*r"), "two copies into sa, element", A=a, B=b, C=c)


TMA = """
def gemm(A: f16[32, 256], B: f16[16, 256], C: f32[32, 16]):
    for bm in block.x(1):
        sa: f16[2, 32, 64] @ shared.swizzle8
        sb: f16[2, 16, 64] @ shared.swizzle8
        full: u64[2] @ shared
        empty: u64[2] @ shared
        for w in warp(3):
            for l in lane(32):
                if 32*w + l == 0:
                    for s in range(2):
                        mbar_init(addr(full[s]), 1)
                        mbar_init(addr(empty[s]), 2)
                    mbar_fence()
                barrier()
                if w < 2:
                    acc: f32[2, 4] @ register
                    for j in unroll(2):
                        acc[j, 0:+4] = 0.0
                    for kt in range(4):
                        mbar_wait(addr(full[kt % 2]), kt // 2 % 2)
                        for kk in unroll(4):
                            a: f16x8 = ldmatrix_x4(addr(sa[kt % 2, 16*w + l % 16, 16*kk + 8*(l // 16):+8]))
                            b: f16[8] @ register
                            b[0:+8] = ldmatrix_x4(addr(sb[kt % 2, l % 8 + 8*(l // 16), 16*kk + 8*(l // 8 % 2):+8]))
                            for j in unroll(2):
                                acc[j, 0:+4] = mma_m16n8k16(acc[j, 0:+4], a, b[4*j:+4])
                        syncwarp()
                        if l == 0:
                            mbar_arrive(addr(empty[kt % 2]))
                    for j in unroll(2):
                        for h in unroll(2):
                            C[16*w + 8*h + l // 4, 8*j + 2*(l % 4):+2] = acc[j, 2*h:+2]
                else:
                    if l == 0:
                        for kt in range(4):
                            mbar_wait(addr(empty[kt % 2]), 1 - kt // 2 % 2)
                            mbar_expect(addr(full[kt % 2]), 6144)
                            tma_load(addr(sa[kt % 2, 0, 0:+64]), addr(A[0, 64*kt:+64]), 32, addr(full[kt % 2]))
                            tma_load(addr(sb[kt % 2, 0, 0:+64]), addr(B[0, 64*kt:+64]), 16, addr(full[kt % 2]))
"""


def without(text: str, word: str) -> str:
    """The text with the one statement that holds `word` taken out."""
    lines = [x for x in text.splitlines() if word not in x]
    assert len(lines) == len(text.splitlines()) - 1
    return "\n".join(lines)


def test_warp_roles_with_mbarriers_and_tma() -> None:
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((32, 256), (16, 256)))
    c = f32(32, 16)
    run(TMA, A=a, B=b, C=c)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-3)
    fails(without(TMA, "syncwarp"), "race: thread 64 writes", "read by thread", "tma_load(", A=a, B=b, C=c)
    fails(without(TMA, "mbar_wait(addr(full"), "which nobody has written", "ldmatrix_x4", A=a, B=b, C=c)
    fails(
        without(TMA, "mbar_wait(addr(empty"), "deadlock", A=a, B=b, C=c
    )  # full[s] is two phases ahead before the consumers look
    fails(without(TMA, "mbar_expect"), "bytes more than mbar_expect has announced", "tma_load(", A=a, B=b, C=c)
    fails(without(TMA, "                barrier()"), "with no barrier between", A=a, B=b, C=c)
