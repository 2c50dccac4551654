"""Convolutions and matrix products of many geometries through the whole compiler, layouts included, against the float64
interpreter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.errors import ParseError
from dnnc.tools.accuracy import first_difference
from dnnc.tools.sample_graphs import graph_of


def convolution(rng: np.random.Generator) -> str:
    """One to three spatial axes (of one element, too), kernels that differ by axis, uneven pads, strides, dilations,
    groups, residuals.
    """
    rank = int(rng.choice((1, 2, 2, 2, 3)))
    kind = rng.choice(("dense", "depthwise", "grouped"), p=(0.4, 0.2, 0.4))
    i, o = int(rng.choice((1, 3, 8, 16, 17, 32, 40))), int(rng.choice((1, 2, 3, 5, 8, 16, 17, 32, 40)))
    group = 1
    if kind == "depthwise":
        o = group = i
    elif kind == "grouped":
        group = int(rng.choice((2, 3, 5, 8, 16)))
        i, o = (group * int(rng.choice((1, 2, 3, 4, 8, 12, 16, 24))) for _ in range(2))
    spatial = [int(rng.choice((1, 2, 5, 9, 14, 15, 30))) for _ in range(rank)]
    kernel = [int(rng.choice((1, 1, 2, 3, 5))) if n > 1 else int(rng.choice((1, 1, 3))) for n in spatial]
    if rng.random() < 0.1:  # a long kernel, as of positions in audio
        kernel[-1] = 2 * spatial[-1]
    strides, dilations = ([int(rng.choice((1, 1, 2, far))) for _ in range(rank)] for far in (3, 7))
    reach = [(k - 1) * d for k, d in zip(kernel, dilations)]
    pads = [int(rng.integers(0, r // 2 + 2)) for r in (*reach, *reach)]
    n = int(rng.choice((1, 1, 2)))

    def dims(*d: int) -> str:
        return ", ".join(map(str, d))

    attrs = f"strides=({dims(*strides)},), pads=({dims(*pads)}), dilations=({dims(*dilations)},), group={group}"
    after = rng.choice(
        (
            "v",
            "relu(v)",
            "add(relu(v), v)",
            "concat(v, relu(v), axis=1)",
            "pad(relu(v), 2.0, pads=P)",
            "conv(v, k)",
            "reduce_mean(v, axes=A)",
        )
    )
    after = after.replace("P", str((0, 0, *(1,) * rank, 0, 0, *(2,) * rank))).replace(
        "A", str(tuple(range(2, 2 + rank)))
    )
    return (
        f"def g(x: f32[{dims(n, i, *spatial)}], *, w: f32[{dims(o, i // group, *kernel)}], b: f32[{o}], k: "
        f"f32[{dims(1 + o % 3, o, *[1] * rank)}]):\n"
        f"    v = conv(x, w, b, {attrs})\n    return {after}"
    )


def product(rng: np.random.Generator) -> str:
    """Rows in one or several axes, constant or computed right operands, batches on one side or both."""
    lead = [int(d) for d in rng.choice((1, 2, 3, 7), int(rng.integers(0, 3)))]
    m, k, n = (int(rng.choice((1, 2, 5, 16, 17, 33, 70))) for _ in range(3))
    a = ", ".join(map(str, [*lead, m, k]))
    b = ", ".join(map(str, [*(lead if rng.random() < 0.4 else []), k, n]))
    constant = "*, " if rng.random() < 0.7 else ""
    after = rng.choice(("v", "gelu(v)", "softmax(v)", "add(v, tanh(v))"))
    return f"def g(a: f32[{a}], {constant}b: f32[{b}]):\n    v = matmul(a, b)\n    return {after}"


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("make", [convolution, product])
@pytest.mark.parametrize("part", range(11))
def test_random_geometry(make: Any, part: int) -> None:
    done = 0
    for seed in range(part * 30, part * 30 + 30):
        rng = np.random.default_rng(seed)
        text = make(rng)
        try:
            g = graph_of(text, seed)
        except ParseError:  # the window is larger than the padded input
            continue
        inputs = [rng.standard_normal(v.type.shape).astype(np.float32) for v in g.inputs]
        got = dnnc.compile(g, cache=False, threads=1 + seed % 2)(*inputs)
        wrong = first_difference(g, inputs, [got])
        assert wrong is None, f"seed {seed}: output {wrong}\n{text}"
        done += 1
    assert done > 12
