"""Chains over vectors whose size is known at run time only: one kernel for all sizes."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import maps, templates
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.program import lower_group
from dnnc.passes.schedule.problem import Problem, classify
from dnnc.tools.sample_graphs import graph_of

CHAIN = """
def chain(x: f32[N], z: {other}[N], s: f32):
    y = add(mul(tanh(x), s), cast(z, to=f32))
    return y
"""


def problem(other: str = "f32") -> Problem:
    g = graph_of(CHAIN.replace("{other}", other))
    (group,) = plan_fusion(g).groups
    return classify(group.nodes, lower_group(g, group))


def scheduled(p: Problem, **knobs: int) -> Kernel:
    (offered,) = maps.candidates(p, GpuTarget())
    return verify_kernel(maps.apply(p, {**dict(offered), **knobs}, GpuTarget()))


@pytest.mark.parametrize("other", ["f32", "i8", "f64"])
@pytest.mark.parametrize("n", [1, 3, 16, 127, 128, 1000, 4111])
def test_every_size(other: str, n: int) -> None:
    kernel = scheduled(problem(other), blocks=2, threads=32)
    rng = np.random.default_rng(0)
    x, s = rng.standard_normal(n).astype(np.float32), np.float32([0.5])
    z = rng.integers(-5, 5, n).astype({"f32": np.float32, "i8": np.int8, "f64": np.float64}[other])
    y = np.full(n, np.nan, np.float32)
    run_kernel(
        kernel, {"N": np.int64(n), **dict(zip([b.name for b in kernel.entry.buffers], (x, s, z, y), strict=True))}
    )
    np.testing.assert_allclose(y, np.tanh(x) * s + z.astype(np.float32), rtol=1e-6, atol=1e-6)


def test_a_grid_of_one_size_fills_the_device() -> None:
    kernel = scheduled(problem())
    assert launch_of(kernel).grid == (132 * 8, 1, 1) and launch_of(kernel).block == (256, 1, 1)
    text = emit_kernel(kernel, "k", GpuTarget())
    assert (
        "k(i64 N, const f32*" in text and text.count("ld<4, 4>(") == 2 and text.count("st<4>(") == 1
    )  # 16 bytes at a time


def test_other_schedules_need_sizes() -> None:
    assert [t.name for t in templates(GpuTarget()) if t.candidates(problem())] == ["map"]
