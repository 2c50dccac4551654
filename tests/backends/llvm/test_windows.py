"""Pooling over blocked images: tiles of pixels with peeled borders, every tail; NaN as NumPy has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels import program
from native_check import check_close, run_native

from dnnc.backends.llvm.features import parse_target
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.types import TensorType

pytestmark = pytest.mark.family("shapes")

CASES: dict[str, dict[str, Any]] = {
    "3x3": {"kernel": (3, 3), "pads": (1, 1, 1, 1)},
    "3x3 stride 2": {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)},
    "2x2 stride 2": {"kernel": (2, 2), "strides": (2, 2)},
    "uneven pads": {"kernel": (3, 2), "strides": (1, 2), "pads": (0, 1, 2, 0)},
    "dilated": {"kernel": (2, 3), "dilations": (2, 2), "pads": (1, 2, 1, 2)},
    "wide": {"kernel": (1, 13), "pads": (0, 6, 0, 6)},
}


def pooled(op: str, width: int, case: str, between: str = "") -> Graph:
    """A convolution by the unit matrix, which makes its image blocked, and a pool of it."""
    g = Graph("g")
    b = Builder(g)
    v = b.conv(
        g.add_input("x", TensorType(f32, (1, 32, 7, width))), g.constant(np.eye(32, dtype=np.float32)[:, :, None, None])
    )
    v = b.op(between, v) if between else v
    g.outputs = [b.op(op, v, **CASES[case])]
    return g


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=haswell"])
@pytest.mark.parametrize("op", ["max_pool", "avg_pool"])
@pytest.mark.parametrize("case", CASES)
def test_every_width(case: str, op: str, target: str) -> None:
    for width in (5, 8, 9, 23):
        x = np.random.default_rng(width).standard_normal((1, 32, 7, width)).astype(np.float32)
        g = pooled(op, width, case)
        (got,), (want,) = run_native(g, [x], target), run(g, [x], "float64")
        check_close(got, want, f32, 32)


# what makes NaN and infinities of -1 and 0 behind the convolution, in which they would spread to all channels
SPECIAL = [("log", -1.0, np.isnan), ("log", 0.0, np.isneginf), ("reciprocal", 0.0, np.isposinf)]


@pytest.mark.slow
@pytest.mark.parametrize("between, value, is_special", SPECIAL)
@pytest.mark.parametrize("case", ["3x3", "3x3 stride 2", "2x2 stride 2"])
def test_special_values_anywhere(case: str, between: str, value: float, is_special: Any) -> None:
    g = pooled("max_pool", 20, case, between)
    rng = np.random.default_rng(0)
    for _ in range(6):
        x = rng.random((1, 32, 7, 20), np.float32) + np.float32(0.5)
        x[rng.random(x.shape) < 0.05] = value
        x[0, 3] = value
        (got,), (want,) = run_native(g, [x]), run(g, [x], "float64")
        assert is_special(want).any() and np.array_equal(is_special(got), is_special(want))
        check_close(got, want, f32, 32)


def test_a_tile_of_pixels_without_guards() -> None:
    p = program(pooled("max_pool", 32, "3x3"), parse_target("llvm -mcpu=skylake-avx512 -threads=2"))
    (step,) = [s for s in p.steps if "max_pool" in s.kernel.entry.name]
    text = show_kernel(step.kernel)
    middle = text[text.index("for po in range(1, 3)") :].split("_l0")[0]
    assert "f32[8, 16] @ register" in middle and "for r1 in unroll(3)" in middle and "if " not in middle
