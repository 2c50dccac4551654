"""Images padded ahead of convolutions that matrix tiles compute: text before and after, the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.llvm.facts import facts
from dnnc.backends.llvm.features import parse_target
from dnnc.ir.dtype import bf16, i8, u8
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.pad_images import pad_images

TILES = PassContext(facts(parse_target("llvm -mcpu=sapphirerapids"), "default"))
VECTORS = PassContext(facts(parse_target("llvm -mcpu=icelake-server"), "default"))


def graph(kind: str, channels: int = 64, side: int = 9, attrs: str = "pads=(1, 0, 2, 1)", group: int = 1) -> Graph:
    x, w = kind.split()
    shape = (16, channels // group, 3, 3)
    said = f"{attrs}, group={group}" + ("" if x == "bf16" else ", out_dtype=i32")
    text = f"""\
def g(x: {x}[2, {channels}, {side}, {side}], *, w: {w}[{", ".join(map(str, shape))}]):
    y = conv(x, w, {said})
    return y"""
    dtype = {"bf16": bf16, "i8": i8}[w].numpy
    return parse(text, {"w": np.random.default_rng(0).integers(-4, 5, shape).astype(dtype)})


@pytest.mark.parametrize("kind", ["bf16 bf16", "u8 i8", "i8 i8"])
def test_the_image_is_padded_and_results_are_the_same(kind: str) -> None:
    g = graph(kind)
    before, x = g.copy(), np.random.default_rng(1).integers(0, 5, (2, 64, 9, 9))
    x = x.astype({"bf16": bf16, "u8": u8, "i8": i8}[kind.split()[0]].numpy)
    assert pad_images(g, TILES)
    verify(g)
    pad, conv = g.nodes()
    assert pad.op.name == "pad" and pad.attrs["pads"] == (0, 0, 1, 0, 0, 0, 2, 1)
    assert conv.inputs[0] is pad.output and not any(conv.attrs["pads"] or ())
    np.testing.assert_array_equal(run(g, [x])[0], run(before, [x])[0])


def test_two_convolutions_share_a_padded_image() -> None:
    g = parse(
        """\
def g(x: bf16[1, 32, 9, 9], *, w: bf16[16, 32, 3, 3]):
    y = conv(x, w, pads=(1, 1, 1, 1))
    z = conv(x, w, pads=(1, 1, 1, 1), strides=(2, 2))
    return y, z""",
        {"w": np.ones((16, 32, 3, 3), bf16.numpy)},
    )
    assert pad_images(g, TILES)
    assert sorted(n.op.name for n in g.nodes()) == ["conv", "conv", "pad"]


@pytest.mark.parametrize(
    "g",
    [
        graph("bf16 bf16", attrs="pads=(0, 0, 0, 0)"),
        graph("bf16 bf16", channels=8),  # half a block
        graph("u8 i8", channels=48),  # no rows of 64 bytes
        graph("bf16 bf16", side=4),  # few pixels of a row
        graph("bf16 bf16", channels=32, group=16),
    ],
)
def test_what_stays(g: Graph) -> None:
    assert not pad_images(g, TILES)


def test_other_cpus_and_strict_sums_stay() -> None:
    assert not pad_images(graph("bf16 bf16"), VECTORS)
    assert not pad_images(graph("bf16 bf16"), PassContext(TILES.facts, "strict"))
    assert pad_images(graph("u8 i8"), PassContext(TILES.facts, "strict"))  # sums of integers are exact
