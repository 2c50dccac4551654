"""Convolutions of bytes with few output channels: the same sums, with neighbouring pixels as channels."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.neighbouring_results import pixels_together, widened
from support.quantized import CTX, RNG, inputs, rewritten, weights

CONV = """\
def g(x: {x}, *, w: {w}, sw: f32[{o}], b: i32[{o}], s: f32, sb: f32[{o}], z: {t}):
    c = conv(dequantize_linear(x, s, z), dequantize_linear(w, sw, axis=0), dequantize_linear(b, sb, axis=0){attrs})
    return c"""


@pytest.mark.parametrize(
    "image,filters,attrs,zero,stride",
    [
        ("u8[2, 32, 9, 30]", (3, 32, 3, 3), ", pads=(1, 1, 1, 1)", 117, 4),
        ("u8[1, 32, 9, 31]", (3, 32, 3, 3), ", pads=(1, 1, 1, 1)", 0, 4),
        ("i8[1, 32, 9, 29]", (2, 32, 3, 5), "", -3, 8),
        ("u8[2, 16, 67]", (1, 16, 7), ", pads=(3, 3)", 9, 16),
        ("u8[1, 16, 4, 5, 18]", (4, 16, 1, 3, 3), ", pads=(0, 1, 1, 0, 1, 1)", 128, 4),
        ("u8[1, 32, 9, 30]", (3, 32, 3, 3), ", pads=(1, 1, 1, 1), strides=(1, 2)", 117, 2),  # as it is
        ("u8[1, 32, 9, 30]", (3, 32, 1, 1), "", 117, 1),  # nothing to share
        ("u8[1, 32, 9, 30]", (9, 32, 3, 3), "", 117, 1),  # wide enough
        ("u8[1, 4, 9, 30]", (3, 4, 3, 3), "", 117, 1),  # too little work
    ],
)
def test_sums_are_the_same(image: str, filters: tuple[int, ...], attrs: str, zero: int, stride: int) -> None:
    o, t = filters[0], image[:2]
    scales = RNG.uniform(0.001, 0.003, o).astype(np.float32)
    text = CONV.format(x=image, w=f"i8{list(filters)}", o=o, t=t, attrs=attrs)
    data = {
        "w": weights("i8", *filters), "sw": scales, "b": RNG.integers(-2000, 2000, o).astype(np.int32),
        "s": np.float32(0.05), "sb": np.float32(0.05) * scales, "z": np.array(zero, np.uint8 if t == "u8" else np.int8),
    }  # fmt: skip
    got, plain = (parse(text, {k: np.asarray(a) for k, a in data.items()}) for _ in range(2))
    xs = inputs(got)
    rewritten(got)
    rewritten(plain, PassContext(TargetFacts(multiplies_bytes=True, channels_last=True)))
    convs = [n for n in got.nodes() if n.op.name == "conv"]
    (conv,) = (n for n in convs if n.inputs[1].type.shape[1] > 1)  # type: ignore[union-attr]
    assert (conv.attrs["strides"] or (1,))[-1] == stride
    assert all(n.output.type.shape[1] == o for n in plain.nodes() if n.op.name == "conv")
    np.testing.assert_array_equal(run(got, xs)[0], run(plain, xs)[0], strict=True)


def test_pixels_go_by_lanes() -> None:
    w = np.ones((3, 64, 3, 3), np.int32)
    assert [pixels_together((1, 64, 8, 99), w, {}, lanes) for lanes in (0, 4, 8, 16)] == [1, 1, 2, 4]
    assert pixels_together((1, 64, 8, 3), w, {}, 16) == 1 and CTX.facts.lanes == 16
    assert widened(np.array([[[1, 2]], [[3, 4]]]), 2).tolist() == [[[1, 2, 0]], [[0, 1, 2]], [[3, 4, 0]], [[0, 3, 4]]]
