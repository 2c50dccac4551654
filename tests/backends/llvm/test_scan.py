"""Running sums and products: one step for each element, in every layout of rows and columns."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import TARGET

from dnnc.backends.llvm.templates import templates
from dnnc.driver import compile
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.count import statements
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import Step

SHAPES = [(1,), (7,), (5, 1), (1, 9), (3, 40), (40, 3), (33, 65), (2, 17, 5), (4, 3, 130), (0, 4), (4, 0), (9, 300)]
DTYPES = {"f32": 1e-5, "f64": 1e-13, "f16": 1e-2, "i32": 0, "i64": 0}


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_and_axis(dtype: str, exclusive: bool, reverse: bool) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        x = (rng.integers(-9, 9, shape) if dtype[0] == "i" else rng.standard_normal(shape)).astype(
            {"f": "float", "i": "int"}[dtype[0]] + dtype[1:]
        )
        for axis in range(len(shape)):
            text = (
                f"def g(x: {dtype}{list(shape)}):\n"
                f"    return cumsum(x, axis={axis}, exclusive={exclusive}, reverse={reverse})"
            )
            got = compile(parse(text), cache=False, threads=2)(x)
            flipped = np.flip(x, axis) if reverse else x
            want = np.cumsum(flipped.astype(np.float64 if dtype[0] == "f" else x.dtype), axis)
            want = want - flipped if exclusive else want
            want = np.flip(want, axis) if reverse else want
            scale = max(np.abs(want).max(initial=0), 1)
            assert np.abs(got.astype(want.dtype) - want).max(initial=0) <= DTYPES[dtype] * scale, (shape, axis)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1), (3, 7), (40, 33), (2, 300)])
def test_sizes_that_are_known_when_called(sizes: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    for axis in (0, 1):
        f = compile(
            parse(f"def g(x: f32[M, N]):\n    return cumprod(x, axis={axis})"),
            cache=False,
            dims={"M": (1, 64), "N": (1, 512)},
        )
        np.testing.assert_allclose(f(x), np.cumprod(x, axis), rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("shape,axis", [((64, 512), 0), ((64, 512), 1), ((8, 96, 64), 1), ((4096,), 0), ((3, 500), 1)])
def test_steps_grow_with_the_elements_and_not_with_their_square(shape: tuple[int, ...], axis: int) -> None:
    g = parse(f"def g(x: f32{list(shape)}):\n    return relu(cumsum(x, axis={axis}))")
    (step,) = compile_program(g, PassContext(TargetFacts(lanes=TARGET.lanes)), templates(TARGET)).steps
    assert isinstance(step, Step) and step.choice.template == "scan"
    assert statements(step.kernel.entry.body, {}) < 6 * np.prod(shape)
