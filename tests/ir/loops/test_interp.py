"""The interpreter against NumPy, and the errors it must find; threads of a GPU are in test_interp_gpu.py."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.errors import InputError, VerifyError
from dnnc.ir.loops.interp import Interpreter, run_kernel
from dnnc.ir.loops.text import parse_kernel
from support.kernels import f32, fails, run

rng = np.random.default_rng(0)

# --- values -----------------------------------------------------------------------------------------------------------

NAIVE = """
def gemm(A: f32[26, 40], B: f32[40, 64], C: f32[26, 64]):
    for i in range(26):
        for j in range(64):
            acc: f32[1] @ register
            acc[0] = 0.0
            for k in range(40):
                acc[0] = fma(A[i, k], B[k, j], acc[0])
            C[i, j] = acc[0]
"""
SCHEDULED = """
def gemm(A: f32[26, 40], B: f32[2, 40, 32], C: f32[26, 64]):
    for jo in parallel(2):
        for io in range(3):
            acc: f32[12, 2, 16] @ register
            for im in unroll(12):
                for jn in unroll(2):
                    acc[im, jn, 0:+16] = 0.0
            for ko in range(10):
                prefetch(addr(B[jo + 1, 0, 2048*io + 16*ko]))
                for ku in unroll(4):
                    for im_1 in unroll(12):
                        for jn_1 in unroll(2):
                            acc[im_1, jn_1, 0:+16] = fma(A[im_1 + min(12*io, 14), 4*ko + ku],
                                B[jo, 4*ko + ku, 16*jn_1:+16], acc[im_1, jn_1, 0:+16])
            for im_2 in unroll(12):
                for jn_2 in unroll(2):
                    C[im_2 + min(12*io, 14), 16*jn_2 + 32*jo:+16] = acc[im_2, jn_2, 0:+16]
"""


def test_naive_and_scheduled_gemm_agree_bit_for_bit() -> None:
    a, b, c, d = f32(26, 40), f32(40, 64), f32(26, 64), f32(26, 64)
    run(NAIVE, A=a, B=b, C=c)
    run(SCHEDULED, A=a, B=np.ascontiguousarray(b.reshape(40, 2, 32).transpose(1, 0, 2)), C=d)
    np.testing.assert_allclose(c, a @ b, atol=1e-5)
    np.testing.assert_array_equal(c, d)


def test_symbolic_dims_strides_and_flat_arrays() -> None:
    text = """
def rows(N: dim[1, 100], K: dim, lda: dim, A: f32[N, K] @ strides(lda, 1), y: f32[N]):
    for i in range(N):
        y[i] = 0.0
        for k in range(K):
            y[i] = y[i] + A[i, k]
"""
    a, y = f32(5, 9), f32(5)
    run(text, N=5, K=7, lda=9, A=a.reshape(-1), y=y)
    np.testing.assert_allclose(y, a[:, :7].sum(1), rtol=1e-5)
    with pytest.raises(InputError, match="N = 101"):
        run(text, N=101, K=7, lda=9, A=a, y=y)
    with pytest.raises(InputError, match="A needs 52 elements, the array has 45"):
        run(text, N=6, K=7, lda=9, A=a, y=f32(6))
    with pytest.raises(InputError, match="float64"):
        run(text, N=5, K=7, lda=9, A=a.astype(np.float64), y=y)


def test_limits_read_zero_and_write_the_first_lanes() -> None:
    text = """
def tail(x: f32[21], y: f32[21], s: f32[2]):
    for i in range(2):
        v: f32x16 = x[16*i:+16:21 - 16*i]
        s[i] = hsum(v)
        y[16*i:+16:21 - 16*i] = v + 1.0
"""
    x, y, s = f32(21), f32(21), f32(2)
    run(text, x=x, y=y, s=s)
    np.testing.assert_array_equal(y, x + np.float32(1))
    np.testing.assert_allclose(s, [x[:16].sum(), x[16:].sum()], rtol=1e-5)
    fails(
        text.replace(":21 - 16*i] = v", "] = v"),
        "index 21 of axis 0 is outside of 0..20",
        "y[16*i:+16] = v + 1.0",
        x=x,
        y=y,
        s=s,
    )


def test_overlapping_tails_may_write_the_same_value_only() -> None:
    text = """
def copy(x: f32[20], y: f32[20]):
    for i in KIND(2):
        y[min(16*i, 4):+16] = x[min(16*i, 4):+16]
"""
    for kind in ("range", "parallel"):
        x, y = f32(20), np.zeros(20, np.float32)
        run(text.replace("KIND", kind), x=x, y=y)
        np.testing.assert_array_equal(x, y)
    x, y = np.arange(20, dtype=np.float32), f32(20)
    fails(
        text.replace("KIND", "parallel").replace("= x[min(16*i, 4):+16]", "= x[2*i:+16]"),
        "two iterations write y[4]",
        "y[min(",
        x=x,
        y=y,
    )
    x[0] = np.nan  # the same bits, though no equal number
    x[:] = x[0]
    run(text.replace("KIND", "parallel"), x=x, y=y)
    x[:] = np.linspace(-1, 0, 20)
    fails(text.replace("KIND", "parallel").replace("] = x", "] = y[0:+16] + x"), "race", "y[min(", x=x, y=y)


def test_gather_scatter_and_guard() -> None:
    text = """
def take(x: f32[10], at: i64[8], y: f32[8], z: f32[8]):
    v: f32x8 = x[at[0:+8]]
    y[0:+8] = v
    for i in range(8):
        z[at[i] % 8] = x[guard(at[i] - 2, 0, 10)]
"""
    x, at, y, z = f32(10), np.array([9, 0, 3, 2, 4, 5, 6, 7]), f32(8), np.zeros(8, np.float32)
    run(text, x=x, at=at, y=y, z=z)
    want = np.zeros(8, np.float32)
    want[at % 8] = x[np.clip(at - 2, 0, 9)]
    np.testing.assert_array_equal(y, x[at])
    np.testing.assert_array_equal(z, want)
    fails(text, "index 10 of axis 0 is outside of 0..9", "v: f32x8 = x[at[0:+8]]", x=x, at=at + 1, y=y, z=z)


def test_types_wrap_saturate_and_propagate_nan() -> None:
    text = """
def types(x: f32[4], h: f16[4], q: i8[4], b: bool[4], u: u8[4], y: i32[4], m: f32[4]):
    for i in range(4):
        h[i] = cast_f16(x[i])
        y[i] = cast_i32(x[i]*f32(1e10))
        b[i] = (x[i] < 0.0) & (not (x[i] == 1.5))
        u[i] = select(b[i], u8(7), u8(250)) + u8(10)
        q[i] = truncdiv(q[i], i8(0)) + truncmod(q[i], i8(3))
        m[i] = max(x[i], bits_f32(i32(2143289344)))
"""
    x, q = np.array([1.5, -2, np.nan, 0.1], np.float32), np.array([-7, 7, -128, 1], np.int8)
    h, b, u, y, m = (
        np.zeros(4, np.float16),
        np.zeros(4, np.bool_),
        np.zeros(4, np.uint8),
        np.zeros(4, np.int32),
        np.zeros(4, np.float32),
    )
    run(text, x=x, h=h, q=q, b=b, u=u, y=y, m=m)
    np.testing.assert_array_equal(h, x.astype(np.float16))
    assert (y.tolist(), b.tolist(), u.tolist(), q.tolist()) == (
        [2**31 - 1, -(2**31), 0, 10**9],
        [False, True, False, False],
        [4, 17, 4, 4],
        [-1, 1, -2, 1],
    )
    assert np.isnan(m).all()


def test_integers_of_64_bits_wrap() -> None:
    y = np.zeros(3, np.int64)
    run("def k(y: i64[3]):\n    for i in range(3):\n        y[i] = i*9223372036854775807 + 1\n", y=y)
    assert y.tolist() == [1, -(2**63), -1]


def test_funcs_get_addresses_and_scalars() -> None:
    text = """
def axpy(n: dim, s: f32, x: f32[n], y: f32[n]):
    for i in range(n):
        y[i] = y[i] + s*x[i]

def main(A: f32[6, 8], B: f32[6, 8]):
    for i in parallel(6):
        t: f32[8] @ local
        for j in range(8):
            t[j] = 1.0
        axpy(i + 1, A[i, 0], addr(A[i, 1]), addr(t[1]))
        for j in range(8):
            B[i, j] = t[j]
"""
    a, b = f32(6, 8), f32(6, 8)
    run(text, A=a, B=b)
    want = np.ones_like(a)
    for i in range(6):
        want[i, 1 : 2 + i] += a[i, 0] * a[i, 1 : 2 + i]
    np.testing.assert_allclose(b, want, rtol=1e-6)
    fails(text.replace("i + 1, A", "i + 3, A"), "outside of the memory passed in", "y[i] = ", A=a, B=b)


def test_loops_whose_bounds_differ_between_threads() -> None:
    text = """
def tri(x: f32[70, 70], y: f32[70]):
    for i in parallel(70):
        acc: f32[1] @ register
        acc[0] = 0.0
        for j in range(i, 70):
            if x[i, j] < 0.0:
                acc[0] = acc[0] - x[i, j]
            else:
                acc[0] = acc[0] + 2.0*x[i, j]
        y[i] = acc[0]
"""
    x, y = f32(70, 70), f32(70)
    run(text, x=x, y=y)
    np.testing.assert_allclose(y, np.triu(np.where(x < 0, -x, 2 * x)).sum(1), rtol=1e-5)


def test_loop_carried_dependences_are_kept_in_order() -> None:
    text = """
def scan(x: f32[50], y: f32[51]):
    for i in range(50):
        y[i + 1] = y[i] + x[i]
"""
    x, y = f32(50), np.zeros(51, np.float32)
    run(text, x=x, y=y)
    np.testing.assert_array_equal(y[1:], np.cumsum(x))
    shift = "def k(x: f32[8], y: f32[8]):\n    for i in range(7):\n        y[i + 1] = x[i]\n"
    same = f32(8)
    first = same[0]
    run(shift, x=same, y=same)  # the two names are one array
    assert (same == first).all()


@pytest.mark.slow
def test_widening_never_changes_a_result() -> None:
    """Random nests, most of them with dependences between iterations, against the same in sequence."""
    widened = 0
    for _ in range(120):
        k = rng.integers(0, 4, 12)
        n, m = (int(v) for v in rng.integers(2, 5, 2))
        text = f"""
def k(x: f64[64, 64], y: f64[64, 64]):
    for i in range({n}):
        for j in unroll({m}):
            t: f64[2] @ register
            a: i64 = {k[0]}*i + {k[1]}*j
            t[0] = y[a + {k[2]}, {k[3]}*i + j]*f64(0.5) + x[i, j]
            for u in range({k[4]}):
                t[0] = t[0] + y[{k[5]}*i + {k[6]} + a, {k[3]}*i + j + u // 2]
            if i < j + {k[7]}:
                y[a + {k[8] // 2}, {k[3]}*i + {k[9]}*j + {k[10] // 2}:+2] = t[0]
"""
        x, y = rng.standard_normal((64, 64)), rng.standard_normal((64, 64))
        z = y.copy()
        wide, narrow = (Interpreter(parse_kernel(text), 1, widen) for widen in (True, False))
        wide.run({"x": x, "y": y})
        narrow.run({"x": x, "y": z})
        np.testing.assert_array_equal(y, z, text)
        widened += wide.progress < narrow.progress
    assert 10 < widened < 110


def test_scratch_outside_of_a_parallel_loop_is_undefined_after_it() -> None:
    text = """
def k(x: f32[40], y: f32[40], z: f32[40]):
    t: f32[2] @ local
    c: f32[1] @ local
    c[0] = 2.0
    for i in parallel(40):
        t[0] = x[i]*c[0]
        y[i] = t[0]
    for j in parallel(40):
        z[j] = t[0]
"""
    x, y, z = f32(40), f32(40), f32(40)
    run(text, x=x, y=y, z=z)
    np.testing.assert_array_equal(y, 2 * x)
    assert np.isnan(z).all()


def test_every_copy_of_private_memory_starts_as_garbage() -> None:
    text = """
def k(y: f32[3]):
    for i in range(3):
        t: f32[1] @ register
        if i < 1:
            t[0] = 5.0
        y[i] = t[0]
"""
    y = f32(3)
    run(text, y=y)
    np.testing.assert_array_equal(y, np.array([5, np.nan, np.nan], np.float32))


def test_naive_convolution_is_widened() -> None:
    text = """
def conv(x: f32[8, 12, 12], w: f32[16, 8, 3, 3], y: f32[16, 10, 10]):
    for o in range(16):
        for i in range(10):
            for j in range(10):
                acc: f32[1] @ register
                acc[0] = 0.0
                for c in range(8):
                    for ky in range(3):
                        for kx in range(3):
                            acc[0] = fma(x[c, i + ky, j + kx], w[o, c, ky, kx], acc[0])
                y[o, i, j] = acc[0]
"""
    x, w, y = f32(8, 12, 12), f32(16, 8, 3, 3), f32(16, 10, 10)
    it = Interpreter(parse_kernel(text), 1)
    it.run({"x": x, "w": w, "y": y})
    assert it.progress < 200, "one by one these are 120,000 statements"
    want = sum(
        np.einsum("oc,cij->oij", w[:, :, a, b], x[:, a : a + 10, b : b + 10]) for a in range(3) for b in range(3)
    )
    np.testing.assert_allclose(y, want, atol=1e-4)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_out_of_bounds_names_axis_and_statement() -> None:
    text = """
def k(x: f32[4, 6], y: f32[4, 6]):
    for i in range(4):
        for j in range(6):
            y[i, j] = x[i, j + 1]
"""
    with pytest.raises(VerifyError) as e:
        run(text, x=f32(4, 6), y=f32(4, 6))
    assert str(e.value) == "x[i, j + 1]: index 6 of axis 1 is outside of 0..5\n  at: y[i, j] = x[i, j + 1]"


def test_select_evaluates_both_sides() -> None:
    fails(
        "def k(x: f32[4], y: f32[4]):\n    for i in range(4):\n        y[i] = select(i < 3, x[i + 1], 0.0)\n",
        "index 4 of axis 0",
        x=f32(4),
        y=f32(4),
    )
    run(
        "def k(x: f32[4], y: f32[4]):\n    for i in range(4):\n        if i < 3:\n            y[i] = x[i + 1]\n",
        x=f32(4),
        y=f32(4),
    )


def test_missing_cast_is_found() -> None:
    fails(
        "def k(x: f16[4], y: f32[4]):\n    for i in range(4):\n        y[i] = x[i]\n",
        "a cast is missing",
        x=np.zeros(4, np.float16),
        y=f32(4),
    )


def test_parallel_accumulation_is_a_race() -> None:
    text = """
def dot(x: f32[50], y: f32[1]):
    for i in parallel(50):
        y[0] = y[0] + x[i]
"""
    fails(text, "race: one iteration writes y[0], which another one reads", "at: y[0] = ", x=f32(50), y=f32(1))


def test_parallel_neighbour_is_a_race_across_chunks_too() -> None:
    text = "def k(y: f32[40001]):\n    for i in parallel(40000):\n        y[i + 1] = y[i] + 1.0\n"
    fails(text, "race", "y[i + 1] = ", y=np.zeros(40001, np.float32))
    far = (
        "def k(y: f32[60000], x: f32[60000]):\n    for i in parallel(40000):\n        y[i] = 1.0\n"
        "        x[i] = y[min(i + 20000, 59999)]\n"
    )
    fails(far, "race", y=np.zeros(60000, np.float32), x=np.zeros(60000, np.float32))


TWO = """
def two(x: f32[64], t: f32[64], y: f32[64]):
    for i in parallel(64):
        t[i] = x[i] + 1.0
    barrier()
    for i in parallel(64):
        y[i] = t[63 - i]
"""


def test_barrier_orders_parallel_loops() -> None:
    x, t, y = f32(64), f32(64), f32(64)
    run(TWO, x=x, t=t, y=y)
    np.testing.assert_array_equal(y, (x + np.float32(1))[::-1])
    fails(
        TWO.replace("    barrier()\n", ""),
        "one iteration reads t[63], which another one writes",
        "y[i] = t[",
        x=x,
        t=t,
        y=y,
    )
    fails(TWO.replace("    barrier()\n", "").replace("63 - i", "i"), "race", x=x, t=t, y=y)
    fails(
        TWO.replace("t[i] =", "barrier()\n        t[i] ="), "inside of a parallel loop", "at: barrier()", x=x, t=t, y=y
    )


def test_every_cpu_thread_executes_what_is_outside_of_parallel_loops() -> None:
    text = TWO.replace("    barrier()\n", "    barrier()\n    t[0] = 0.0\n    barrier()\n")
    fails(text, "every thread executes this", "t[0] = 0.0", x=f32(64), t=f32(64), y=f32(64))
    run_kernel(parse_kernel(text), {"x": f32(64), "t": f32(64), "y": f32(64)}, threads=1)


@pytest.mark.parametrize(("value", "want"), [("x[i] & -4", "i32"), ("7 - x[i]", "i32"), ("shl(x[i], 2)", "i32")])
def test_bare_numbers_have_the_type_of_the_other_operand(value: str, want: str) -> None:
    kernel = parse_kernel(f"def k(x: i32[8], y: i32[8]):\n    for i in range(8):\n        y[i] = {value}\n")
    loop = kernel.entry.body[0]
    assert {a.dtype.name for a in loop.body[0].value.args} == {want}
