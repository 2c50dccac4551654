"""Which values lie in the memory of others."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.passes.analysis.alias import find_aliases, root, slice_offset
from dnnc.passes.rewrites.layout import assign_layouts
from dnnc.tools.sample_graphs import graph_of

CASES = [
    (
        "a view",
        "def g(x: f32[4, 6]):\n    a = exp(x)\n    b = reshape(a, shape=(24,))\n    return softmax(b)",
        ["b in a + 0"],
    ),
    (
        "rows of a matrix are one stretch, columns are not",
        "def g(x: f32[8, 6]):\n    a = exp(x)\n    r = slice(a, starts=(2, 0), steps=(1, 1), shape=(3, 6))\n"
        "    c = slice(a, starts=(0, 2), steps=(1, 1), shape=(8, 3))\n    return softmax(r), softmax(c)",
        ["r in a + 48"],
    ),
    (
        "not every second row",
        "def g(x: f32[8, 6]):\n    r = slice(exp(x), starts=(0, 0), steps=(2, 1), shape=(4, 6))\n    return softmax(r)",
        [],
    ),
    (
        "an output has memory of its own",
        "def g(x: f32[8, 6]):\n    a = exp(x)\n    r = slice(a, starts=(2, 0), steps=(1, 1), shape=(3, 6))\n    return "
        "softmax(a), r",
        [],
    ),
    (
        "operands of a concatenation along the outermost axis that has several elements",
        "def g(x: f32[1, 3, 64], y: f32[1, 5, 64]):\n    a = softmax(x)\n    b = softmax(y)\n    c = concat(a, b, "
        "axis=1)\n    return softmax(c), exp(a)",
        ["a in c + 0", "b in c + 768"],
    ),
    (
        "not along an inner one",
        "def g(x: f32[2, 3, 64]):\n    a = softmax(x)\n    b = softmax(a)\n    return softmax(concat(a, b, axis=1))",
        [],
    ),
    (
        "an input stays where it is",
        "def g(x: f32[3, 64]):\n    return softmax(concat(x, softmax(x), axis=0))",
        [],
    ),
    (
        "one operand twice",
        "def g(x: f32[3, 64]):\n    a = softmax(x)\n    return softmax(concat(a, a, axis=0))",
        [],
    ),
    (
        "a concatenation in another one, a slice of it, and a view as an operand",
        "def g(x: f32[3, 64], y: f32[128]):\n    a = softmax(x)\n    b = softmax(exp(x))\n    c = concat(a, b, "
        "axis=0)\n    e = softmax(y)\n"
        "    v = reshape(e, shape=(2, 64))\n    d = concat(c, v, axis=0)\n    s = slice(d, starts=(5, 0), steps=(1, "
        "1), shape=(2, 64))\n"
        "    return softmax(d), softmax(s)",
        ["v in e + 0", "s in d + 1280", "a in c + 0", "b in c + 768", "c in d + 0", "e in d + 1536"],
    ),
    (
        "cheap and small operands are computed in the kernel of the concatenation",
        "def g(x: f32[3, 64], y: f32[3, 64]):\n    return softmax(concat(exp(x), exp(y), axis=0))",
        [],
    ),
    (
        "large ones are not",
        "def g(x: f32[64, 64], y: f32[64, 64]):\n    a = exp(x)\n    b = exp(y)\n    c = concat(a, b, axis=0)\n    "
        "return softmax(c)",
        ["a in c + 0", "b in c + 16384"],
    ),
    (
        "the result is an output",
        "def g(x: f32[3, 64]):\n    a = softmax(x)\n    b = softmax(a)\n    c = concat(a, b, axis=0)\n    return c",
        ["a in c + 0", "b in c + 768"],
    ),
    (
        "an operand is an output as well",
        "def g(x: f32[3, 64]):\n    a = softmax(x)\n    c = concat(a, softmax(a), axis=0)\n    return c, a",
        [],
    ),
    (
        "sizes that are known at run time only",
        "N: dim[1, 9]\ndef g(x: f32[N, 64]):\n    a = softmax(x)\n    return softmax(concat(a, softmax(a), axis=0))",
        [],
    ),
]


@pytest.mark.family("cases")
@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_aliases_and_numbers(text: str, expected: list[str]) -> None:
    g = graph_of(text)
    found = find_aliases(g).of
    assert [f"{v.name} in {w.name} + {at}" for v, (w, at) in found.items()] == expected
    sizes = [[d if isinstance(d, int) else 7 for d in v.type.shape] for v in g.inputs]
    inputs = [np.random.default_rng(k).standard_normal(s).astype(np.float32) for k, s in enumerate(sizes)]
    want = dnnc.compile(g, target="reference")(*inputs)
    for threads in (1, 2):
        got = dnnc.compile(g, cache=False, threads=threads)(*inputs)
        for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_root_adds_up_the_bytes() -> None:
    g = graph_of(CASES[8][1])
    by_name = {v.name: v for n in g.nodes() for v in n.outputs}
    of = find_aliases(g).of
    assert {n: (r.name, at) for n in "abcevs" for r, at in [root(of, by_name[n])]} == {
        "a": ("d", 0), "b": ("d", 768), "c": ("d", 0), "e": ("d", 1536), "v": ("d", 1536), "s": ("d", 1280),
    }  # fmt: skip


def test_blocks_of_channels() -> None:
    text = """def g(x: f32[1, 16, 6, 6], *, w: f32[32, 16, 3, 3], v: f32[48, 16, 1, 1]):
    a = conv(x, w, pads=(1, 1, 1, 1))
    b = conv(x, v)
    c = concat(a, b, axis=1)
    return max_pool(c, kernel=(2, 2)), relu(a)"""
    g = graph_of(text)
    assign_layouts(g, 16)
    by_name = {v.name: (w.name, at) for v, (w, at) in find_aliases(g).of.items()}
    assert by_name["a"] == ("c", 0) and by_name["b"] == ("c", 2 * 6 * 6 * 16 * 4)


@pytest.mark.parametrize(("start", "size", "at"), [(16, 32, 2304), (8, 32, None), (16, 8, None), (0, 16, 0)])
def test_slices_of_blocks(start: int, size: int, at: int | None) -> None:
    text = f"""def g(x: f32[1, 16, 6, 6], *, w: f32[64, 16, 1, 1]):
    a = conv(x, w)
    s = slice(a, starts=(0, {start}, 0, 0), steps=(1, 1, 1, 1), shape=(1, {size}, 6, 6))
    return relu(s)"""
    g = graph_of(text)
    node = next(n for n in g.nodes() if n.op.name == "slice")
    layout = "0 1/16 2 3 1%16"
    for v in (node.inputs[0], node.output):
        assert v is not None
        v.type = (
            graph_of(
                f'def h(x: f32[{", ".join(map(str, v.type.shape))}] @ "{layout}"):\n    return pack(x, layout=None)'
            )
            .inputs[0]
            .type
        )
    assert slice_offset(node) == at
