"""Transposed convolutions become convolutions: the graph, and the numbers against the op's own reference."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import GPU_SPLIT, TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.conv_transpose import conv_transpose
from dnnc.passes.rewrites.fold import fold

W = np.random.default_rng(2).standard_normal((4, 2, 3, 3)).astype(np.float32)

CASES = [
    ("f32[1, 4, 5, 3]", (4, 3, 2, 2), "strides=(2, 2)"),
    ("f32[2, 4, 5, 6]", (4, 3, 3, 3), "strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1)"),
    ("f32[1, 3, 4, 4]", (3, 5, 4, 4), "strides=(2, 3), pads=(1, 0, 1, 2)"),
    ("f32[1, 3, 7]", (3, 2, 5), "strides=(3,), pads=(2, 1)"),
    ("f32[1, 2, 4, 4]", (2, 2, 3, 3), ""),
    ("f32[1, 2, 3, 4, 3]", (2, 3, 2, 2, 3), "strides=(2, 1, 2), pads=(1, 0, 1, 0, 1, 1)"),
    ("f32[1, 2, 5, 5]", (2, 2, 1, 1), "strides=(2, 2)"),
    ("f32[1, 2, 9]", (2, 3, 16), "strides=(8,), pads=(4, 4)"),
    ("f32[1, 2, 9]", (2, 3, 16), "strides=(8,), pads=(13, 9)"),
    ("f32[1, 2, 5, 6]", (2, 2, 3, 2), "dilations=(2, 3), pads=(1, 3, 4, 0)"),
    ("f32[1, 2, 5, 6]", (2, 2, 3, 2), "strides=(3, 2), dilations=(2, 3), pads=(1, 3, 2, 0)"),
    ("f32[2, 4, 5, 6]", (4, 3, 3, 3), "strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1), group=2"),
    ("f32[1, 6, 7, 4]", (6, 1, 4, 1), "strides=(2, 3), pads=(1, 0, 1, 0), output_padding=(0, 1), group=6"),
    ("f32[1, 6, 7]", (6, 2, 5), "dilations=(3,), pads=(2, 14), group=3"),
    ("f32[1, 4, 3, 4, 3]", (4, 3, 2, 3, 3), "strides=(2, 1, 2), dilations=(1, 2, 2), pads=(1, 0, 1, 0, 1, 1), group=2"),
    ("f32[2, 4, 2, 3]", (4, 3, 9, 10), "strides=(9, 8), pads=(1, 2, 0, 3), group=2"),
    ("f32[1, 6, 3, 2]", (6, 1, 9, 9), "strides=(9, 9), group=3"),
]


@pytest.mark.parametrize(("x", "w", "attrs"), CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_numbers(x: str, w: tuple[int, ...], attrs: str, with_bias: bool) -> None:
    rng = np.random.default_rng(1)
    dims = ", ".join(map(str, w))
    made = w[1] * int(attrs.partition("group=")[2] or 1)
    bias = f", b: f32[{made}]" if with_bias else ""
    operands = "x, w" + (", b" if with_bias else "") + (f", {attrs}" if attrs else "")
    text = f"def g(x: {x}, *, w: f32[{dims}]{bias}):\n    y = conv_transpose({operands})\n    return y"
    constants = {"w": rng.standard_normal(w).astype(np.float32), "b": rng.standard_normal(made).astype(np.float32)}
    g = parse(text, constants)
    data = rng.standard_normal([int(d) for d in x[4:-1].split(",")]).astype(np.float32)
    want = run(g, [data], "float64")[0]
    assert conv_transpose(g, PassContext())
    verify(g)
    assert "conv_transpose" not in str(g)
    got = run(g, [data], "float64")[0]
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(want).max())
    assert not conv_transpose(g, PassContext())


def test_the_graph() -> None:
    g = parse(
        "def g(x: f32[1, 4, 5, 3], *, w: f32[4, 3, 2, 2]):\n    y = conv_transpose(x, w, strides=(2, 2))\n    return y",
        {"w": np.ones((4, 3, 2, 2), np.float32)},
    )
    conv_transpose(g, PassContext())
    fold(g, PassContext())
    assert [n.op.name for n in g.nodes()] == ["conv", "interleave"]
    assert next(g.nodes()).inputs[1].type.shape == (12, 4, 1, 1)


@pytest.mark.parametrize(
    ("ctx", "made"),
    [
        (PassContext(TargetFacts(lanes=16)), 64),
        (PassContext(TargetFacts(lanes=4)), 48),
        (PassContext(TargetFacts(channels_last=True, reductions=GPU_SPLIT)), 48),
    ],
)
def test_a_phase_has_whole_blocks(ctx: PassContext, made: int) -> None:
    g = parse(
        "def g(x: f32[1, 4, 5, 3], *, w: f32[4, 12, 2, 2], b: f32[12]):\n    y = conv_transpose(x, w, b, strides=(2, "
        "2))\n    return y",
        {"w": np.ones((4, 12, 2, 2), np.float32), "b": np.ones(12, np.float32)},
    )
    conv_transpose(g, ctx)
    fold(g, ctx)
    z, y = g.nodes()
    assert (z.op.name, z.output.type.shape[1]) == ("conv", made)
    assert (y.op.name, y.output.type.shape) == ("interleave", (1, 12, 10, 6))


def test_the_graph_of_groups() -> None:
    """Each phase has the taps that fall on it: of three taps two, or one."""
    g = parse(
        (
            "def g(x: f32[1, 4, 5], *, w: f32[4, 2, 3]):\n    y = conv_transpose(x, w, strides=(2,), group=2)\n"
            "    return y"
        ),
        {"w": np.arange(24, dtype=np.float32).reshape(4, 2, 3)},
    )
    conv_transpose(g, PassContext())
    fold(g, PassContext())
    assert [n.op.name for n in g.nodes()] == ["conv", "conv", "concat", "interleave", "slice"]
    even, odd, *_ = (n for n in g.nodes())
    assert even.attrs["pads"] == (1, 1) and odd.attrs["pads"] == (0, 1)
    assert g.constants[even.inputs[1]].tolist()[0] == [[2, 0], [8, 6]]  # type: ignore[index]
    assert g.constants[odd.inputs[1]].tolist()[3] == [[16], [22]]  # type: ignore[index]


@pytest.mark.parametrize("attrs", ["strides=(2, 2)", "strides=(2, 2), group=2", "dilations=(2, 2), pads=(1, 2, 0, 1)"])
def test_images_of_any_size(attrs: str) -> None:
    text = (
        f"N: dim[1, 99]\ndef g(x: f32[N, 4, N, 5], *, w: f32[4, 2, 3, 3]):\n    y = conv_transpose(x, w, {attrs})\n"
        "    return y"
    )
    g = parse(text, {"w": W})
    assert conv_transpose(g, PassContext())
    verify(g)


def test_negative_pads_stay() -> None:
    text = (
        "def g(x: f32[1, 4, 5, 5], *, w: f32[4, 2, 3, 3]):\n"
        "    y = conv_transpose(x, w, strides=(2, 2), pads=(-1, 0, 0, 0))\n    return y"
    )
    g = parse(text, {"w": W})
    assert not conv_transpose(g, PassContext())
