"""Shapes that used to leave the limits of the compiler: each compiles strictly, by the first schedule of each kernel,
and is right.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.compile_program import schedule
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import TensorType
from dnnc.options import CompileOptions
from dnnc.tools.accuracy import first_difference
from support.devices import interpreted

pytestmark = pytest.mark.family("shapes")

Array = np.ndarray[Any, Any]
LONGEST = {1: 997, 2: 47, 3: 13}  # of an axis, by rank
MOST = 3e6  # products of a case


def convolution(seed: int) -> tuple[Graph, list[Array]]:
    """A convolution with any kernel up to 31, dilation up to 16, padding up to 32, stride up to 5, over one to three
    axes, and what may follow it.
    """
    r = random.Random(seed)
    rank = r.choice((1, 1, 2, 2, 2, 3))
    while True:
        spatial = [r.randint(1, LONGEST[rank]) for _ in range(rank)]
        kernel = [r.choice((1, 2, 3, 3, 4, 5, 7, 8, 11, 15, 25, 31)) for _ in range(rank)]
        dilations = [r.choice((1, 1, 1, 2, 3, 4, 8, 16)) for _ in range(rank)]
        strides = [r.choice((1, 1, 1, 2, 2, 3, 4, 5)) for _ in range(rank)]
        same = [min(32, d * (k - 1) // 2) for k, d in zip(kernel, dilations)]
        pads = same * 2 if r.random() < 0.5 else [r.choice((0, 0, 1, 2, 3, 5, 8, 16, 32)) for _ in range(2 * rank)]
        left = [n + p + q - d * (k - 1) - 1 for n, p, q, k, d in zip(spatial, pads, pads[rank:], kernel, dilations)]
        channels, outputs = r.choice((1, 2, 3, 8, 16, 24, 32)), r.choice((1, 4, 8, 16, 19, 32))
        group = r.choice((1, 1, 1, 2, channels))
        outputs = channels * r.choice((1, 2)) if group == channels else outputs
        if min(left) < 0 or channels % group or outputs % group:
            continue
        size = np.prod([m // s + 1 for m, s in zip(left, strides)])
        if size * np.prod(kernel) * outputs * channels // group <= MOST:
            break
    g, rng = Graph("g"), np.random.default_rng(seed)
    b = Builder(g)
    x = g.add_input("x", TensorType(f32, (1, channels, *spatial)))
    filters = rng.standard_normal((outputs, channels // group, *kernel)) / np.sqrt(
        np.prod(kernel) * channels // group + 1
    )
    y = b.op(
        "conv", x, g.constant(filters.astype(np.float32), "w"),
        strides=tuple(strides), pads=tuple(pads), dilations=tuple(dilations), group=group,
    )  # fmt: skip
    tail = r.choice(("", "relu", "residual"))
    g.outputs = [b.op("relu", y) if tail == "relu" else b.op("add", y, b.op("tanh", y)) if tail else y]
    return g, [rng.standard_normal(x.type.shape).astype(np.float32)]


def rotations(seed: int) -> tuple[Graph, list[Array]]:
    """Slices, negations and concatenations in a row as in rotary embeddings, with sums and products between."""
    r, g = random.Random(seed), Graph("g")
    b, rank = Builder(g), r.choice((2, 3, 4))
    shape = (*(r.choice((1, 2, 3, 8, 12)) for _ in range(rank - 1)), r.choice((8, 16, 24, 64)))
    v = x = g.add_input("x", TensorType(f32, shape))
    cosines = g.add_input("c", TensorType(f32, shape[-2:]))

    def part(v: Value, axis: int, at: int, n: int, step: int = 1) -> Any:
        starts, steps = ([z if k == axis else o for k in range(rank)] for z, o in ((at, 0), (step, 1)))
        size = tuple(n if k == axis else int(str(d)) for k, d in enumerate(v.type.shape))
        return b.op("slice", v, starts=tuple(starts), steps=tuple(steps), shape=size)

    for _ in range(r.randint(1, 24)):
        axis = rank - 1 if r.random() < 0.8 else r.randrange(rank)
        n, kind = int(str(v.type.shape[axis])), r.random()
        if kind < 0.6 and n > 1:
            ends = [0, *sorted(r.sample(range(1, n), min(r.choice((1, 1, 2, 3, 7)), n - 1))), n]
            parts = [part(v, axis, p, q - p) for p, q in itertools.pairwise(ends)]
            parts = [b.op("neg", p) if r.random() < 0.5 else p for p in parts]
            v = b.op("concat", *r.sample(parts, len(parts)), axis=axis)
        elif kind < 0.7 and n % 2 == 0:
            v = b.op("concat", b.op("neg", part(v, axis, 1, n // 2, 2)), part(v, axis, 0, n // 2, 2), axis=axis)
        else:
            v = b.op("mul", v, cosines) if kind < 0.85 else b.op("add", v, b.op("sin", x))
    g.outputs = [v]
    rng = np.random.default_rng(seed)
    return g, [rng.standard_normal(u.type.shape).astype(np.float32) for u in g.inputs]


CASES = [
    pytest.param(make, seed, id=f"{make.__name__}-{seed}") for make in (convolution, rotations) for seed in range(48)
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "seed"), CASES)
def test_on_the_cpu(make: Any, seed: int) -> None:
    g, arrays = make(seed)
    f = dnnc.compile(g.copy(), threads=1, cache=False, strict_compile=True)
    assert f.report.steps_down == []
    assert all(not k.choice.startswith("naive") for k in f.report.programs[0].kernels)
    assert first_difference(g, arrays, [f(*arrays)]) is None


@pytest.mark.parametrize(("make", "seed"), CASES)
def test_for_a_gpu(make: Any, seed: int) -> None:
    """Each kernel has a schedule, CUDA text and a launch."""
    machine = interpreted(arch=("sm_90a", "sm_80", "sm_120")[seed % 3])
    program = schedule(make(seed)[0], machine, CompileOptions(target=machine.text, strict_compile=True))
    assert program.steps_down == ()
    for s in program.kernels:
        if s.choice.template not in ("cudnn", "cublaslt"):
            assert emit_kernel(s.kernel, "k_x", machine.target)
            launch_of(s.kernel)
