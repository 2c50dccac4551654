"""Filters' gradients for parts of the images."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.target import GPU_SPLIT, TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.split_filters import split_filters

GPU = PassContext(facts=TargetFacts(reductions=GPU_SPLIT))


def graph(images: int, channels: int, size: int, kernel: int, t: str = "f32", group: int = 1) -> str:
    pad = kernel // 2
    x = f"{t}[{images}, {channels}, {size}, {size}]"
    sides = f"kernel=({kernel}, {kernel}), pads=({pad}, {pad}, {pad}, {pad}), group={group}"
    return f"def g(x: {x}, g: {x}):\n    return conv_backward_filter(x, g, {sides})"


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ((8, 4, 32, 1), 8),  # one tile: as many parts as there are images of enough pixels
        ((8, 4, 16, 1), 2),  # parts of at least 1024 pixels
        ((4, 6, 32, 3, "f32", 6), 4),  # depthwise
        ((1, 64, 56, 1), 1),
        ((8, 4, 32, 1, "f16"), 1),  # parts would be rounded
        ((2, 512, 32, 3), 1),  # 576 tiles
    ],
)
def test_parts_of_the_images(args: tuple[int, ...], parts: int) -> None:
    g = parse(graph(*args))
    assert split_filters(g, GPU) == (parts > 1)
    assert [n.attrs["parts"] for n in g.nodes() if n.op.name == "conv_backward_filter"] == [parts]
    assert not split_filters(parse(graph(*args)), PassContext())


def test_the_sum_of_the_parts() -> None:
    g = parse(graph(4, 6, 32, 3, group=2))
    xs = [np.random.default_rng(k).standard_normal((4, 6, 32, 32)) for k in range(2)]
    (want,) = run(g, xs, "float64")
    assert split_filters(g, GPU) and g.outputs[0].type.shape == (6, 3, 3, 3)
    (got,) = run(g, xs, "float64")
    assert np.abs(got - want).max() < 1e-10
