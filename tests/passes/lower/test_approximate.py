"""Cheaper quotients and exponentials: which expressions they replace, where, and how far off they are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dnnc.backends.cuda.spelling import supported
from dnnc.backends.llvm.spelling import supported as cpu_spelled
from dnnc.ir.expr import Op, walk
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel, Store, exprs, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.expand import decompose

Array = np.ndarray[Any, Any]
INF, NAN = math.inf, math.nan
FAST = supported("standard")
GELU = "x[i] * 0.5 * (erf(x[i] * 0.7071067811865476) + 1.0)"
TANH = "x[i] * 0.5 * (tanh((x[i] * x[i] * x[i] * 0.044715 + x[i]) * 0.7978845608028654) + 1.0)"
SILU = "x[i] / (exp(-0.0 - x[i]) + 1.0)"


def kernel(value: str, n: int, to: str = "f32") -> Kernel:
    stored = value if to in ("f32", "i32", "u8") else f"cast_{to}({value})"
    return parse_kernel(f"def k(x: f32[{n}], y: {to}[{n}]):\n    for i in range({n}):\n        y[i] = {stored}\n")


def calls(k: Kernel) -> set[str]:
    return {x.name for f in k.funcs for s in walk_stmts(f.body) for e in exprs(s) for x in walk(e) if isinstance(x, Op)}


def fast(value: str, x: Array) -> Array:
    """What a kernel that stores bfloat16 computes, before it rounds."""
    k = decompose(kernel(value, x.size, "bf16"), FAST)
    text = show_kernel(k).replace(f"y: bf16[{x.size}]", f"y: f32[{x.size}]").replace("cast_bf16(", "(")
    y = np.full(x.size, NAN, np.float32)
    run_kernel(verify_kernel(parse_kernel(text)), {"x": x, "y": y})
    return y.astype(np.float64)


def gelu(x: float) -> float:
    return x * 0.5 * math.erfc(-x * math.sqrt(0.5))


def gelu_tanh(x: float) -> float:
    return x / (1 + math.exp(-2 * (x**3 * 0.044715 + x) * 0.7978845608028654)) if x > -8 else 0.0


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


CASES = {
    "gelu": (GELU, gelu, 2e-6, 3.5, 6e-4),
    "gelu_tanh": (TANH, gelu_tanh, 2e-6, 6.0, 1e-4),
    "silu": (SILU, silu, 1e-6, 60.0, 1e-5),
}


@pytest.mark.parametrize("name", CASES)
def test_error(name: str) -> None:
    """Absolute (relative to the largest result nearby), and relative down the left tail."""
    text, f, absolute, tail, relative = CASES[name]
    x = np.concatenate([np.linspace(-7, 7, 4001), np.linspace(-tail, 0, 2000)[:-1]]).astype(np.float32)
    want = np.array([f(v) for v in x.tolist()])
    off = np.abs(fast(text, x) - want)
    assert (off / np.maximum(1, np.abs(want))).max() < absolute
    left = (x < -1e-3) & (x >= -tail)
    assert (off[left] / np.abs(want[left])).max() < relative


@pytest.mark.parametrize("name", CASES)
def test_special_values(name: str) -> None:
    text = CASES[name][0]
    x = np.array([0.0, NAN, INF, 3e38, 65504.0, -65504.0], np.float32)
    y = fast(text, x)
    np.testing.assert_array_equal(y[:5], [0.0, NAN, INF, x[3].astype(np.float64), 65504.0])
    assert abs(y[5]) < 1e-30  # the left tail fades out


def test_exponentials_of_16_bits() -> None:
    x = np.linspace(-80, 80, 4001).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    assert (np.abs(fast("exp(x[i])", x) - want) / want).max() < 2.0**-17
    assert fast("exp(x[i])", np.array([-INF, INF, NAN], np.float32)).tolist()[:2] == [0.0, INF]


REPLACED = [  # value, what is stored, what is gone, what is there
    (GELU, "f16", {"erf"}, {"exp2"}),
    (TANH, "bf16", {"tanh", "/"}, {"exp2", "recip"}),
    (SILU, "f16", {"exp", "/"}, {"exp2", "recip"}),
    (SILU, "f32", {"/"}, {"exp", "recip"}),
    ("x[i] / 8.0", "f32", {"/"}, set()),
    ("x[i] / -0.25", "f32", {"/"}, set()),
    ("x[i] / 6.0", "f16", {"/"}, set()),
    ("x[i] / (x[i] * x[i] + 1.0)", "f32", {"/"}, {"recip"}),
    ("x[i] / max(abs(x[i]), 2.0)", "f32", {"/"}, {"recip"}),
]
KEPT = [
    (GELU, "f32", {"erf"}),  # 32 bits show the error
    ("exp(x[i])", "f32", {"exp"}),
    ("x[i] / (x[i] + 1.0)", "f32", {"/"}),  # may be anything
    ("x[i] / (abs(x[i]) + 0.5)", "f32", {"/"}),
    ("x[i] / 255.0", "f32", {"/"}),  # rounding to integers shows an error of one ulp
    ("x[i] / 1e-40", "f32", {"/"}),  # 1e40 is no float32
    ("exp2(x[i]) / x[i]", "f16", {"/"}),
    ("exp2(x[i] * 3.0) / x[i]", "f16", {"/"}),
    ("x[i] * 0.5 * (erf(x[i] * 0.7) + 1.0)", "f16", {"erf"}),
]


@pytest.mark.parametrize("value, to, gone, there", REPLACED)
def test_replaced(value: str, to: str, gone: set[str], there: set[str]) -> None:
    k = kernel(value, 8, to)
    found = calls(verify_kernel(decompose(k, FAST)))
    assert not found & gone and there <= found
    for other in (supported("strict"), ()):
        assert not calls(decompose(k, other)) & {"recip", "exp2"}


@pytest.mark.parametrize("value, to, there", KEPT)
def test_kept(value: str, to: str, there: set[str]) -> None:
    assert there <= calls(decompose(kernel(value, 8, to), FAST))


@pytest.mark.parametrize("kept", [False, True])
def test_rows_of_a_softmax_have_one_reciprocal(kept: bool) -> None:
    """The terms are computed again, or kept in registers."""
    text = """\
def k(x: f32[4, 8], y: f32[4, 8]):
    for i in range(4):
        m: f32[1] @ register
        m[0] = -3e38
        s: f32[1] @ register
        s[0] = 0.0
        for j in range(8):
            m[0] = fmax(m[0], x[i, j])
        for j in range(8):
            s[0] = s[0] + exp(x[i, j] - m[0])
        for j in range(8):
            y[i, j] = exp(x[i, j] - m[0]) / s[0]
"""
    if kept:
        text = text.replace(
            "        for j in range(8):\n            y",
            "        r: f32[8] @ register\n        for j in range(8):\n            r[j] = exp(x[i, j] - m[0])\n        "
            "for j in range(8):\n            y",
        )
        text = text.replace("exp(x[i, j] - m[0]) / s[0]", "r[j] / s[0]")
    k = parse_kernel(text)
    made = verify_kernel(decompose(k, FAST))
    assert "recip(s[0])" in show_kernel(made) and "/" not in calls(made)
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32) * 4
    found, want = np.zeros((4, 8), np.float32), np.zeros((4, 8), np.float32)
    run_kernel(made, {"x": x, "y": found})
    run_kernel(k, {"x": x, "y": want})
    np.testing.assert_allclose(found, want, rtol=3e-7)
    other = (
        text.replace("r[j] = exp", "r[j] = 2.0 * exp")
        if kept
        else text.replace("exp(x[i, j] - m[0]) / s", "x[i, j] / s")
    )
    assert "/" in calls(decompose(parse_kernel(other), FAST))  # s may be any number


CPU = cpu_spelled("standard")
JOINED: dict[
    str, tuple[str, Any, float]
] = {  # on a CPU, which expands exp and erf: value, what it is, the error allowed relative to x
    "gelu": (GELU, gelu, 2.4e-7),
    "gelu by a quotient": ("x[i] * 0.5 * (erf(x[i] / 1.4142135623730951) + 1.0)", gelu, 2.4e-7),
    "gelu_tanh": (TANH, gelu_tanh, 6e-7),
    "silu": (SILU, silu, 6e-7),
}


@pytest.mark.parametrize("name", JOINED)
def test_joined_where_all_is_expanded(name: str) -> None:
    value, f, bound = JOINED[name]
    k = decompose(kernel(value, 8003), CPU)
    assert not calls(k) & {"exp", "erf", "tanh", "/"}
    assert show_kernel(decompose(kernel(value, 8), ())) != show_kernel(decompose(kernel(value, 8), CPU))
    x = np.concatenate([np.linspace(-30, 30, 8000), [-0.0, 3e38, 1e-40]]).astype(np.float32)
    y = np.full(x.size, NAN, np.float32)
    run_kernel(verify_kernel(k), {"x": x, "y": y})
    want = np.array([f(v) if abs(v) < 80 else max(v, 0.0) for v in x.tolist()])
    assert (np.abs(y - want) <= bound * np.abs(x.astype(np.float64)) + 1e-37).all()
    ends = np.array([INF, -INF, NAN] + [0.0] * 8000, np.float32)
    run_kernel(k, {"x": ends, "y": y})
    assert y[0] == INF and np.isnan(y[1:3]).all() and not y[3:].any()  # x * 0 is NaN for -inf, by definition


def test_a_sum_with_an_exponential_is_one_step() -> None:
    k = decompose(kernel("exp(x[i]) + 3.0", 8), CPU)
    (store,) = [s for s in walk_stmts(k.entry.body) if isinstance(s, Store)]
    assert isinstance(store.value, Op) and store.value.name == "fma"
    assert not any(
        isinstance(e, Op) and e.name == "fma"
        for e in [
            exprs(s)[-1] for s in walk_stmts(decompose(kernel("exp(x[i]) + 3.0", 8)).entry.body) if isinstance(s, Store)
        ]
    )


def test_a_result_of_32_bits_beside_one_of_16_decides() -> None:
    text = (
        "def k(x: f32[8], y: f16[8], z: f32[8]):\n    for i in range(8):\n        y[i] = cast_f16(exp(x[i]))\n"
        "        z[i] = x[i]\n"
    )
    assert "exp" in calls(decompose(parse_kernel(text), FAST))
    assert "exp2" in calls(
        decompose(parse_kernel(text.replace("z: f32", "z: i32").replace("z[i] = x[i]", "z[i] = cast_i32(x[i])")), FAST)
    )


@pytest.mark.parametrize(
    "value, fused",
    [
        ("x[i] * 2.0 + 1.0", True),
        ("1.5 + x[i] * -0.25", True),
        ("x[i] * 3.0 + 1.0", False),
        ("x[i] * x[i] + 1.0", False),
    ],
)
def test_a_product_without_rounding_joins_its_sum(value: str, fused: bool) -> None:
    k = kernel(value, 8)
    assert ("fma" in calls(decompose(k, CPU))) == fused and "fma" not in calls(decompose(k, cpu_spelled("strict")))
    x = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    got, want = np.zeros(8, np.float32), np.zeros(8, np.float32)
    run_kernel(decompose(k, CPU), {"x": x, "y": got})
    run_kernel(k, {"x": x, "y": want})
    np.testing.assert_array_equal(got, want)


def test_bytes_hide_the_error_of_a_gelu_and_other_integers_do_not() -> None:
    quantized = f"cast_i32(rint(fmin(fmax({GELU}, -8.0), 7.0)))"
    assert "erf" not in calls(decompose(kernel(f"cast_u8({quantized} + i32(8))", 8, "u8"), FAST))
    assert "erf" in calls(decompose(kernel(quantized, 8, "i32"), FAST))
