"""Convolutions whose rows of channels are padded to whole vectors: sums over the padding too, by every template that
offers itself.
"""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.backends.runtime.link import pack
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import classify

CONV = """
def f(x: {t}[{n}, {c}, 6, 7] @ "{rows}", w: {t}[{o}, {c}, {k}, {k}] @ "{rows}", b: {t}[{o}]):
    h: {t}[{n}, {o}, {oh}, {ow}] @ "{rows}" = conv(x, w, b, strides=({s}, {s}), pads=({p}, {p}, {p}, {p}))
    y: {t}[{n}, {o}, {oh}, {ow}] @ "{rows}" = relu(h)
    return y
"""


def conv(t: str, n: int, c: int, o: int, k: int, s: int = 1) -> str:
    p, block = k // 2, 16 // int(t[-2:].replace("16", "2").replace("32", "4"))
    sizes = [(d + 2 * p - k) // s + 1 for d in (6, 7)]
    return CONV.format(t=t, n=n, c=c, o=o, k=k, s=s, p=p, oh=sizes[0], ow=sizes[1], rows=f"0 2 3 1/{block} 1%{block}")


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize(
    "text, offered",
    [
        pytest.param(conv("f16", 2, 20, 19, 3), {"wgmma", "mma"}, marks=pytest.mark.slow),
        pytest.param(
            conv("f16", 2, 67, 72, 3, s=2), {"wgmma", "mma"}, marks=pytest.mark.slow
        ),  # a result without padding
        (conv("f16", 3, 36, 21, 1), {"wgmma", "mma"}),
        (conv("f32", 1, 13, 10, 3), {"simt"}),
    ],
)
def test_every_template_gives_what_the_graph_means(text: str, offered: set[str]) -> None:
    g = parse(text)
    nodes = list(g.nodes())
    low = lower(g, nodes, g.outputs)
    problem = classify(nodes, low)
    c = problem.contraction
    assert c is not None and (c.red.size % 8 == 0) == ("f16" in text)  # whole vectors; elements of 4 bytes need none
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(d) for d in v.type.shape]).astype(v.type.dtype.numpy) for v in g.inputs]  # type: ignore[call-overload]
    (want,) = run(g, arrays, "float64")
    y = g.outputs[0].type
    by_value = {v: pack(a, v.type) for v, a in zip(g.inputs, arrays)}
    found = set()
    small = GpuTarget(sms=2)  # blocks that walk over several tiles
    for template in templates(small):
        for knobs in list(template.candidates(problem))[:2]:
            kernel = verify_kernel(template.apply(problem, dict(knobs)))
            got = np.full(y.physical, 7, y.dtype.numpy)
            args = {
                b.name: by_value[v] if v in by_value else got for b, v in zip(problem.kernel.entry.buffers, low.params)
            }
            run_kernel(kernel, args)
            found.add(template.name)
            padded = pack(np.asarray(want).astype(y.dtype.numpy), y)  # zeros in the padding
            sums = c.red.size**2 * float(
                np.finfo(np.float32).eps
            )  # terms of about 1, added in float32; then the result is rounded
            rounded = 2 * float(np.finfo(y.dtype.numpy).eps)
            np.testing.assert_allclose(
                got.astype(np.float64), padded.astype(np.float64), rtol=rounded, atol=sums, err_msg=template.name
            )
            assert (got.reshape(-1, padded.shape[-2] * padded.shape[-1])[:, int(y.shape[1]) :] == 0).all()  # type: ignore[arg-type]
    assert offered <= found


NET = """
def net(x: f32[2, 3, 21, 19], *, a: f32[35, 3, 3, 3], b: f32[77, 35, 3, 3], c: f32[77, 77, 1, 1],
    d: f32[16, 77, 3, 3], s: f32[35]):
    h = relu(conv(x, a, s, pads=(1, 1, 1, 1)))
    i = relu(conv(h, b, None, strides=(2, 2), pads=(1, 1, 1, 1)))
    j = add(conv(i, c), i)
    return conv(relu(j), d, None, pads=(1, 1, 1, 1))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("precision, bound", [("float32", 1e-5), ("float16", 5e-3), ("tf32", 5e-3)])
def test_a_net_of_odd_channels_on_a_device(precision: str, bound: float) -> None:
    rng = np.random.default_rng(0)
    sizes = {"a": (35, 3, 3, 3), "b": (77, 35, 3, 3), "c": (77, 77, 1, 1), "d": (16, 77, 3, 3), "s": (35,)}
    weights = {k: (rng.standard_normal(n) / np.sqrt(np.prod(n[1:]))).astype(np.float32) for k, n in sizes.items()}
    g = parse(NET, constants=weights)
    x = rng.standard_normal((2, 3, 21, 19)).astype(np.float32)
    (want,) = run(g, [x], "float64")
    f = dnnc.compile(g, target="cuda", precision=precision, cache=False)
    np.testing.assert_allclose(f(x), want, atol=bound * float(np.abs(want).max()))
